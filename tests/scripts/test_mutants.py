"""scripts/mutants.yaml: each mutant changes one place, and its test exists; `python -m scripts.mutants` runs them."""

from __future__ import annotations

import pytest

from scripts.mutants import load
from support import ROOT


@pytest.mark.parametrize("mutant", load().values(), ids=load())
def test_a_mutant_changes_one_place_and_names_a_test(mutant):
    content = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert mutant.mutated() not in (None, content)
    file, _, name = mutant.test.partition("::")
    assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8")
