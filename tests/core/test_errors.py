"""The boundary: each end of a program is one sentence and a status. Text from data is made safe for a terminal."""

from __future__ import annotations

import errno
import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from open_clip.transform import image_transform

from open_clip_zerovl.core.errors import UserError, ended, printable
from open_clip_zerovl.prepare.check import check_shards
from support.tars import png, write_tar

KEY = "a\x1b[2J\x1b]0;title\x07\u202e"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a caf\u00e9, \u4e2d, 1F697", "a caf\u00e9, \u4e2d, 1F697"),
        ("a\x1b[2J", r"a\x1b[2J"),
        ("\udcff.jpg", r"\udcff.jpg"),
        ("left\u202eright", r"left\u202eright"),
    ],
)
def test_control_characters_are_escaped_for_a_terminal(text, shown):
    assert printable(text) == shown == str(UserError(text))
    shown.encode()  # bytes that are not text have become printable


def test_keys_of_tars_are_printed_escaped(tmp_path):
    write_tar(
        tmp_path / "s/0.tar",
        [(f"{KEY}.png", png((1, 2, 3))), (f"{KEY}.txt", b" "), ("b\udcff.txt", b"")],
    )
    report = check_shards(tmp_path / "s", progress=False).report
    assert r"caption is empty: 2 (a\x1b[2J\x1b]0;title\x07\u202e, b\udcff)" in report
    assert all(line.isprintable() for line in report.splitlines())


def raises(error: BaseException):
    def run() -> None:
        raise error

    return run


def interrupted_in_a_class() -> None:
    """An interrupt while Python 3.11 names the descriptors of a class."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        raise RuntimeError("Error calling __set_name__ on 'Field' instance") from interrupt


def missing(module: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {module!r}", name=module)


# How a program ends -> (exit status, words of its one sentence; "" for none)
ENDS = {
    "done": (lambda: None, 0, ""),
    "own status": (lambda: 1, 1, ""),
    "user's error": (raises(UserError("give --x")), 2, "zerovl: error: give --x"),
    "file": (raises(FileNotFoundError(errno.ENOENT, "No such file", "a.tar")), 2, "a.tar: No such file"),
    "network": (raises(ConnectionResetError(104, "reset by peer")), 2, "ConnectionResetError: [Errno 104] reset by peer"),
    "another pipe": (raises(BrokenPipeError(errno.EPIPE, "Broken pipe")), 2, "BrokenPipeError"),
    "required package": (raises(missing("torch.nn")), 2, "the package torch is not installed here; pip install torch ("),
    "package of another name": (raises(missing("open_clip_train")), 2, "pip install open_clip_torch"),
    "package of an extra": (raises(missing("sklearn.svm")), 2, "pip install scikit-learn"),
    "unknown package": (raises(missing("nosuch")), 2, "pip install nosuch"),
    "broken package": (raises(ImportError("libx.so: absent", name="torch")), 2, "(libx.so: absent); `zerovl doctor`"),
    "module of ours": (raises(missing("open_clip_zerovl.gone")), 1, "or of a package: ModuleNotFoundError"),
    "memory": (lambda: np.empty(1 << 60, dtype="u1"), 2, "the machine's memory is full (it asks for"),
    "memory without words": (raises(MemoryError()), 2, "the machine\'s memory is full (it asks for"),
    "memory of torch's kernels": (raises(RuntimeError("could not create a primitive")), 2, "memory is full (could not"),
    "memory of a GPU": (raises(torch.OutOfMemoryError("CUDA is full\nmore")), 2, "full (CUDA is full); lower"),
    "other weights": (
        lambda: torch.nn.Linear(2, 3).load_state_dict(torch.nn.Linear(3, 3).state_dict()), 2,
        "torch: Error(s) in loading state_dict for Linear: size mismatch for weight",
    ),
    "no weights": (lambda: torch.load(io.BytesIO(b"words"), weights_only=True), 2, "torch: UnpicklingError: "),
    "unknown setting": (
        lambda: image_transform(8, True, aug_cfg={"nope": 1}), 2, "open_clip: TypeError: AugmentationCfg",
    ),
    "shapes": (lambda: torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3)), 1, "package: RuntimeError: "),
    "defect": (lambda: 1 // 0, 1, "package: ZeroDivisionError: integer division or modulo by zero; --debug prints"),
    "defect in a loader worker": (
        raises(ValueError("Caught it.\nTraceback (most recent call last):\nKeyError: 'x'")), 1, "KeyError: 'x'; --debug",
    ),
    "Ctrl-C": (raises(KeyboardInterrupt()), 130, "zerovl: interrupted; repeat the command to continue"),
    "Ctrl-C in a class": (interrupted_in_a_class, 130, "zerovl: interrupted; repeat the command to continue"),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_in_at_most_one_sentence(end, capsys):
    run, status, words = ENDS[end]
    assert ended(run, "zerovl") == status
    said = capsys.readouterr().err
    assert said.count("\n") == bool(words) and words in said and "Traceback" not in said


def test_debug_shows_the_traceback_before_the_sentence(capsys, monkeypatch):
    for words, variable in ((["--debug"], ""), ([], "1")):
        monkeypatch.setenv("ZEROVL_DEBUG", variable)
        assert ended(raises(UserError("x")), "zerovl", words) == 2
        assert capsys.readouterr().err.splitlines()[-1] == "zerovl: error: x"


WITHOUT = """
import runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "open_clip", "open_clip_train", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "line", ["training.main --dga-steps 2", "open_clip_zerovl.cli retrieval m --data x"]
)
def test_a_program_without_its_packages_names_one(line):
    """As after `pip install --no-deps`; `zerovl train` and `plan` become the first of these programs."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *line.split()], capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (
        "the package open_clip_torch is not installed here; pip install open_clip_torch"
        in done.stderr
    )


@pytest.mark.parametrize(
    "line",
    ["open_clip_zerovl.cli --help", "open_clip_zerovl.cli export --help", "training.main --help"],
)
def test_a_reader_that_goes_away_is_not_an_error(line):
    """`zerovl --help | head -1`: the reader is gone before anything is written."""
    child = subprocess.Popen(
        [sys.executable, "-m", *line.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child.stdout.close()
    assert child.stderr.read() == "" and child.wait() in (0, 141)  # argparse ignores it
