"""The fuzzer of `scripts/fuzz`: drawn files of every kind, and all that reads them. Works, one sentence, or a bad sample."""

from __future__ import annotations

import json

import pytest

from open_clip_zerovl.core.errors import UserError
from scripts.fuzz import inputs
from scripts.fuzz.readers import KINDS
from scripts.fuzz.run import Failed, Tally, fuzz, outcome_of, prepare


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    prepare(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow  # half a minute a kind, four minutes in all
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_works_or_ends_in_a_sentence_or_a_bad_sample(kind):
    tally = Tally()
    fuzz(kind, tally, examples=2000, seconds=28)
    readings = [
        sum(tally[kind, name, outcome] for outcome in ("works", "sentence", "bad sample"))
        for name in KINDS[kind][1]
    ]
    assert min(readings) >= 5 and sum(tally[kind, name, "works"] for name in KINDS[kind][1]) >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_of_each_kind(kind):
    fuzz(kind, Tally(), examples=4, seconds=20)


def test_an_error_without_a_sentence_is_a_failure(tmp_path, monkeypatch):
    def raising(error):
        def read(folder):
            raise error

        return read

    assert outcome_of(lambda folder: None, tmp_path) == "works"
    assert outcome_of(raising(UserError("it is bad")), tmp_path) == "sentence"
    assert outcome_of(raising(OSError(5, "x")), tmp_path) == "sentence"  # the boundary's
    for error in (ZeroDivisionError("x"), UserError(""), MemoryError()):
        with pytest.raises(Failed):
            outcome_of(raising(error), tmp_path)
    with pytest.raises(Failed, match="MemoryError"):
        outcome_of(lambda folder: bytearray(6 << 30) and None, tmp_path)
    monkeypatch.setattr("scripts.fuzz.run.LIMIT_SECONDS", 1)
    with pytest.raises(Failed, match="did not end within 1 s"):

        def endless(folder):
            while True:
                pass

        outcome_of(endless, tmp_path)


def examples_of_other_entries(folder):
    (folder / "run").mkdir()
    (folder / "run" / "record.jsonl").write_text(
        "\n".join(json.dumps(line | {"at": 0}) for line in inputs.RECORD)
    )
    picture = "data:image/png;base64,AAAA"
    content = {
        "epoch": 1,
        "examples": [{"query": "a cat", "target": picture, "top": {"now": [{"pixels": picture}]}}],
    }
    (folder / "run" / "examples.json").write_text(json.dumps(content))
    return KINDS["run"][1]["page"]


def test_a_finding_of_the_fuzzer_gives_a_sentence(tmp_path):
    damage = examples_of_other_entries(tmp_path)
    assert outcome_of(damage, tmp_path) == "sentence"
