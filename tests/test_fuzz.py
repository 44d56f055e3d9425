"""The fuzzer of `scripts/fuzz`: each drawn file works, or ends in one sentence or a bad sample."""

from __future__ import annotations

import contextlib
import time

import pytest

from open_clip_zerovl.core.errors import UserError
from scripts.fuzz.readers import KINDS
from scripts.fuzz.run import Failed, Tally, fuzz, outcome_of, prepare, run
from scripts.program import program
from scripts.soak import soak


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
    assert all(readings) and any(tally[kind, name, "works"] for name in KINDS[kind][1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_of_each_kind(kind):
    fuzz(kind, Tally(), examples=3, seconds=20)


@pytest.mark.parametrize("function", [run, soak])
def test_an_unknown_kind_is_refused_by_name(function, capsys):
    assert program(function, ["tarr"]) == 2
    assert "'tarr'; give some of t" in capsys.readouterr().err


def raising(error):
    def read(folder):
        raise error

    return read


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (lambda folder: None, "works"),
        (raising(UserError("it is bad")), "sentence"),
        (raising(OSError(5, "x")), "sentence"),  # the boundary's
        (raising(ZeroDivisionError("x")), None),
        (raising(UserError("")), None),
        (lambda folder: bytearray(6 << 30) and None, None),
        (lambda folder: time.sleep(60), None),
    ],
)
def test_an_error_without_a_sentence_is_a_failure(tmp_path, monkeypatch, read, outcome):
    """As are a hang, and memory without end."""
    monkeypatch.setattr("scripts.fuzz.run.LIMIT_SECONDS", 1)
    with contextlib.nullcontext() if outcome else pytest.raises(Failed):
        assert outcome_of(read, tmp_path) == outcome
