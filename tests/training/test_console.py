"""The console of a run: the progress line of a terminal, which messages the short form has, and times in words."""

from __future__ import annotations

import argparse
import io
import logging
import warnings
from types import SimpleNamespace

import pytest

from training import console
from training.console import DETAIL, PROGRESS, Console, ProgressLine
from training.run_log import _device


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def quiet_root(monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setenv("TERM", "xterm")


def test_the_progress_line_makes_room_for_a_message_and_comes_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console.shutil, "get_terminal_size", lambda: SimpleNamespace(columns=10))
    terminal = Terminal()
    line = ProgressLine(terminal)
    line.clear()
    assert terminal.getvalue() == ""
    line.show("step 1 of 1000")
    assert terminal.getvalue() == "\r\x1b[Kstep 1 of"  # cut to the width, so that it stays one line
    line.end()
    line.draw()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_no_progress_line_in_a_file():
    line = ProgressLine(io.StringIO())
    line.show("step")
    assert not line.possible and line._stream.getvalue() == ""


def shown(record: logging.LogRecord, *, rank: int = 0, terminal: bool = False) -> bool:
    handler = Console()
    handler.shorten(rank)
    handler.progress.possible = terminal
    try:
        return handler._shows(record)
    finally:
        handler.close()


def record_of(path: str, level: int = logging.INFO, **extra: str) -> logging.LogRecord:
    record = logging.LogRecord("root", level, path, 1, "words", None, None)
    vars(record).update(extra)
    return record


OWN, HOST = console.__file__, "/site-packages/open_clip/factory.py"


@pytest.mark.parametrize(
    ("record", "where", "is_shown"),
    [
        (record_of(OWN), {}, True),
        (record_of(OWN, **DETAIL), {}, False),
        (record_of(OWN, **PROGRESS), {}, True),
        (record_of(OWN, **PROGRESS), {"terminal": True}, False),
        (record_of(HOST), {}, False),
        (record_of("/site-packages/open_clip_train/train.py"), {}, True),
        (record_of(HOST, logging.WARNING), {}, True),
        (record_of(HOST, logging.WARNING), {"rank": 1}, False),
        (record_of(OWN, logging.WARNING), {"rank": 1}, True),
    ],
)
def test_which_messages_the_short_form_has(quiet_root, record, where, is_shown):
    assert shown(record, **where) == is_shown


def test_weights_that_follow_are_not_called_random(quiet_root):
    """open_clip makes the model before a checkpoint is loaded, and warns of its weights."""
    made = record_of(HOST, logging.WARNING)
    made.msg = "No pretrained weights loaded for model 'tiny'. Model initialized randomly."
    handler = Console()
    try:
        handler.shorten(0)
        assert handler._shows(made)
        handler.shorten(0, weights_follow=True)
        assert not handler._shows(made) and handler._shows(record_of(HOST, logging.WARNING))
        with warnings.catch_warnings(record=True) as heard:
            handler.shorten(0)  # of torch, twice in four lines; the summary has it
            warnings.warn(
                "This DataLoader will create 4 worker processes in total", UserWarning, stacklevel=1
            )
            warnings.warn("another", UserWarning, stacklevel=1)
        assert [str(one.message) for one in heard] == ["another"]
    finally:
        handler.close()


def test_more_loader_processes_than_cores_are_reported_in_the_summary(monkeypatch):
    monkeypatch.setattr("training.run_log.usable_cores", lambda: 2)
    args = argparse.Namespace(device="cpu", precision="fp32", workers=4, world_size=1)
    assert (
        _device(args)
        == "1 x cpu, fp32, 4 loader processes a rank (on 2 CPU cores: --workers 2 is enough)"
    )
    args.workers = 2
    assert _device(args) == "1 x cpu, fp32, 2 loader processes a rank"


def test_in_the_short_form_open_clips_own_handler_is_silent(quiet_root, monkeypatch):
    """open_clip's main adds it later; one that was there before the run stays."""
    err, theirs, before = io.StringIO(), io.StringIO(), io.StringIO()
    logging.root.addHandler(logging.StreamHandler(before))
    monkeypatch.setattr(console.sys, "stderr", err)
    handler = Console()
    handler.shorten(0)
    try:
        logging.root.addHandler(logging.StreamHandler(theirs))
        logging.warning("once")
    finally:
        handler.close()
    assert (
        err.getvalue().count("once") == 1
        and theirs.getvalue() == ""
        and before.getvalue() == "once\n"
    )
