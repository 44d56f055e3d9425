"""`support/warm.py`: programs that it runs start, print and end as Python's own do; one server for pytest-xdist's workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from support import warm

SHOW = """
import json, os, sys
print(json.dumps([sys.argv, sys.path, os.getcwd(), os.environ["SAID"], __name__, "torch" in sys.modules]))
print("to the other stream", file=sys.stderr)
"""


def run(python: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, timeout=60, **options
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", SHOW, "a b"),
        ("-m", "shown.it", "a b"),
        pytest.param(("shown/it.py", "a b", "--c"), marks=pytest.mark.slow),
    ],
)  # slow: Python itself is started beside each
def test_a_program_sees_what_python_would_show_it(tmp_path, arguments):
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "it.py").write_text(SHOW)
    (tmp_path / "more").mkdir()
    options = {
        "cwd": tmp_path,
        "env": {**os.environ, "SAID": "ä", "PYTHONPATH": str(tmp_path / "more")},
    }
    ours, pythons = (
        run(python, *arguments, **options) for python in (warm.python(), sys.executable)
    )
    assert (
        (ours.returncode, ours.stderr)
        == (pythons.returncode, pythons.stderr)
        == (0, "to the other stream\n")
    )
    *seen, has_torch = json.loads(ours.stdout)
    *wanted, _ = json.loads(pythons.stdout)
    assert seen == wanted and has_torch


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("1 / 0", 1),
        ("import sys; sys.exit('words')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import atexit, os; atexit.register(os._exit, 9)", 9),
        (
            "import sys; assert not any(name.startswith(('open_clip_zerovl', 'training')) for name in sys.modules)",
            0,
        ),
    ],
)
def test_it_ends_as_the_program_ends(program, status):
    done = run(warm.python(), "-c", program)
    assert done.returncode == status and ("ZeroDivisionError" in done.stderr) == (
        program == "1 / 0"
    )


OPENED = """
import os, stat
for fd in os.listdir("/proc/self/fd"):
    try:
        mode = os.fstat(int(fd)).st_mode
    except OSError:  # of the listing itself
        continue
    if int(fd) > 2 and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        print(os.readlink(f"/proc/self/fd/{fd}"))
"""


def test_a_program_has_no_stream_of_another():
    waits = [warm.python(), "-c", "print('begun', flush=True); input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "begun\n"
        done = run(warm.python(), "-c", OPENED)
        other.communicate("\n")
    assert (done.returncode, done.stdout, done.stderr, other.returncode) == (0, "", "", 0)
