"""scripts/gpu.py: results are written at once, a second call goes on behind them, and failures are results."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scripts import gpu
from support import ROOT, warm

# A program whose parts are the functions of PARTS; each call of a measurement leaves a line in the file `calls`.
PROGRAM = """
import os, sys, time, types
from scripts import gpu

def measured(name):
    open("calls", "a").write(name + "\\n")
    return {"value": 1.5}

def first(session):
    session.measure("a", lambda: measured("a"))
    session.measure("b", lambda: 1 / 0)

def second(session):
    session.measure("c", lambda: measured("c") and ENDING, limit=LIMIT)
    session.measure("d", lambda: measured("d"))

sys.modules["scripts.bench.gpu_parts"] = types.SimpleNamespace(first=first, second=second)
gpu.PARTS = {"first": (1, "two values"), "second": (1, "what ends the process")}
sys.exit(gpu.main(["--rehearse", "--work", "work", *sys.argv[1:]]))
"""


def call(folder, ending: str, *words: str) -> int:
    program = PROGRAM.replace("ENDING", ending).replace("LIMIT", "60" if words else "0.05")
    command = [warm.python(), "-c", program, "--out", "out", *words]
    return subprocess.run(command, cwd=folder, timeout=120).returncode


def results(folder) -> dict:
    parts = json.loads((folder / "out" / "gpu-rehearsal.json").read_text())["parts"]
    return {key: values for part in parts.values() for key, values in part["results"].items()}


@pytest.mark.parametrize(
    ("ending", "words", "statuses", "value"),
    [
        ("time.sleep(60)", (), [75, 1], {"error": "hung"}),
        ("os._exit(134)", (), [134] * 3 + [1], {"error": "ended the process 3 times"}),
        ("time.sleep(60)", ("--seconds", "2"), [3] * 4, None),  # its time was over, so it may be tried again
        ("1 / 0", (), [1], {"error": "ZeroDivisionError: division by zero"}),
    ],
    ids=["hangs", "crashes", "time over", "fails"],
)  # fmt: skip
def test_the_next_call_goes_on_behind_what_is_written(tmp_path, ending, words, statuses, value):
    assert [call(tmp_path, ending, *words) for _ in statuses] == statuses
    after = results(tmp_path)
    assert after["a"] == {"value": 1.5} and after["b"]["error"].startswith("ZeroDivisionError")
    assert after.get("c") == value and ("d" in after) == (value is not None)
    calls = (tmp_path / "calls").read_text().split()
    assert calls.count("a") == 1 and calls.count("d") == (value is not None)
    for file in (tmp_path / "work").glob("gpu-*"):  # another machine has OUT alone
        file.unlink()
    assert call(tmp_path, "{}", "--only", "second") == 1
    assert results(tmp_path)["c"] == {} and results(tmp_path)["a"] == after["a"]


def test_a_record_of_other_programs_is_measured_anew(tmp_path):
    """As that of docs/results in a clone of a later commit, on the same card; the next call takes that of the same programs."""
    stale = {"results": {"a": {"value": 2}}, "seconds": 1.0, "done": True}
    state = {"programs": "others", "parts": {"first": stale, "whole": stale}, "attempts": {}}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gpu-rehearsal.json").write_text(json.dumps(state))
    assert [call(tmp_path, "{}") for _ in range(2)] == [1, 1]  # for the failed b
    assert (tmp_path / "calls").read_text().split() == ["a", "c", "d"]
    assert results(tmp_path)["a"] == {"value": 1.5}


@pytest.mark.slow(reason="every part on the CPU, four minutes")
@pytest.mark.timeout(1800)
def test_rehearsal(tmp_path):
    command = ["make", "gpu", "REHEARSE=1", f"ARGS=--out {tmp_path} --work {tmp_path / 'work'}"]
    done = subprocess.run(
        [*command, f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    parts = json.loads((tmp_path / "gpu-rehearsal.json").read_text())["parts"]
    assert list(parts) == list(gpu.PARTS) and all(record["results"] for record in parts.values())
    training = parts["training"]["results"]["training"]
    assert training["steps_twice"] == 5 and training["largest_loss_difference"] == 0
    errors = {key: values["towers"] for key, values in parts["gradients"]["results"].items()}
    assert errors["fp32, ours, R=1"] < 1e-5 and errors["fp32, one graph under other masks"] > 0.1
    assert "Not done" not in (tmp_path / "gpu-rehearsal.md").read_text()
