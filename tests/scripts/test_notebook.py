"""docs/first_hour.ipynb as `make notebook` has executed it: whole, without an error, and small."""

from __future__ import annotations

import json

from support import ROOT

NOTEBOOK = ROOT / "docs" / "first_hour.ipynb"


def test_the_outputs_are_whole_without_an_error_or_a_path_of_this_checkout():
    text = NOTEBOOK.read_text(encoding="utf-8")
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert "error" not in [output["output_type"] for output in outputs]
    printed = ["".join(output["text"]) for output in outputs if "text" in output]
    assert [one for one in printed if "\r" in one.replace("\r\n", "\n") or "Warning" in one] == []
    assert len(text) < 1_000_000 and str(ROOT) not in text
