"""scripts/gpu.py: results are kept as they come, a second call goes on, and the page names measured and missing parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from scripts import gpu
from support import ROOT

FIRST, SECOND = {"key": "one", "value": 1.5}, {"key": "two", "value": 2.5}


def program(*lines: str) -> gpu.Part:
    """A part whose process runs these lines of Python; the keys measured before are in `have`."""
    return gpu.Part(
        "part", ("-c", "\n".join(["import json, sys", "have = sys.argv[1:]", *lines]), "{have}")
    )


def result_line(values: dict) -> str:
    return f"print('RESULT ' + {json.dumps(values)!r}, flush=True)"


def run(part: gpu.Part, file, seconds: float = 60.0) -> gpu.Results:
    results = gpu.Results.read(file)
    gpu.run_part(part, results, seconds, dict(os.environ), file.parent / "log")
    return gpu.Results.read(file)


@pytest.mark.slow  # two processes of a benchmark
def test_what_a_stopped_part_measured_is_kept_and_not_measured_again(tmp_path):
    file = tmp_path / "gpu-x.json"
    stopped = run(
        program(result_line(FIRST), "import time; time.sleep(60)"), file, seconds=3.0
    ).parts["part"]
    assert stopped["status"].startswith("stopped at its limit")
    assert stopped["results"] == {"one": {"value": 1.5}}
    done = run(program("assert have == ['one'], have", result_line(SECOND)), file).parts["part"]
    assert done["status"] == "done" and list(done["results"]) == ["one", "two"]
    assert done["seconds"] >= stopped["seconds"]  # both calls' time, rounded


def test_failed_tests_alone_are_run_again():
    lines = [
        "tests/gpu/test_a.py::test_b[x y] PASSED  [ 10%]",
        "tests/gpu/test_a.py::test_c FAILED [ 20%]",
        "tests: 2",
    ]
    found = dict(result for line in lines if (result := gpu.result_in(line, "pytest")))
    assert list(found) == ["tests/gpu/test_a.py::test_b[x y]", "tests/gpu/test_a.py::test_c"]
    part = gpu.Part("tests", ("-m", "pytest", "{have}"), "pytest")
    have = gpu.measured_before(part, {"results": found})
    assert gpu.command_of(part, have)[1:] == [
        "-m",
        "pytest",
        "--deselect=tests/gpu/test_a.py::test_b[x y]",
    ]


def test_the_page():
    row = {
        "seconds": 1.0,
        "seconds_range": [1.0, 1.25],
        "samples_per_second": 2048.3,
        "retained": None,
    }
    parts = {
        "machine": {
            "status": "done",
            "results": {"machine": {"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}}},
        },
        "tests": {
            "status": "done",
            "results": {"a": {"outcome": "passed"}, "b": {"outcome": "failed"}},
        },
        "steps": {
            "status": "done",
            "results": {"K=4, ours": row, "K=8, ours": {"error": "out of memory"}},
        },
        "plan": {"status": "stopped at its limit; a second call goes on", "results": {}},
    }
    text = gpu.page(parts)
    assert "# On NVIDIA H200" in text and "| torch 2.11.0 |" in text
    assert "1 passed, 1 failed" in text and "| b | failed |" in text and "| a |" not in text
    assert "| seconds | seconds range | samples per second | retained | error |" in text
    assert (
        "| K=4, ours | 1 | 1 to 1.25 | 2,048 |  |  |" in text
        and "| K=8, ours |  |  |  |  | out of memory |" in text
    )
    assert "- plan: stopped at its limit" in text


@pytest.mark.slow  # every part on the CPU: the compiler alone takes minutes
@pytest.mark.timeout(1800)
def test_rehearsal(tmp_path):
    command = [
        "make",
        "gpu",
        "REHEARSE=1",
        f"ARGS=--out {tmp_path} --work {tmp_path / 'work'} --minutes 28",
    ]
    done = subprocess.run(
        [*command, f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    parts = json.loads((tmp_path / "gpu-rehearsal.json").read_text())["parts"]
    left_out = {name for name, record in parts.items() if record["status"].startswith("left out")}
    assert left_out <= {"demo"}  # where the emoji data is not there
    assert all(record["status"] == "done" for name, record in parts.items() if name not in left_out)
    assert len(parts["tests"]["results"]) > 20
    assert len(parts["steps"]["results"]) == len(parts["steps-compiled"]["results"]) == 8
    assert "## Not done" not in (tmp_path / "gpu-rehearsal.md").read_text() or left_out
