"""The console of a run: which messages the short form has, and each message once."""

from __future__ import annotations

import io
import logging

import pytest

from training import run_log
from training.run_log import EarlyHandler, shorten

OURS, HOST = run_log.__file__, "/site-packages/open_clip/factory.py"


@pytest.mark.parametrize(
    ("path", "level", "rank", "is_shown"),
    [
        (OURS, logging.INFO, 0, True),
        (HOST, logging.INFO, 0, False),
        ("/site-packages/open_clip_train/train.py", logging.INFO, 0, True),
        (HOST, logging.WARNING, 0, True),
        (HOST, logging.WARNING, 1, False),
        (OURS, logging.WARNING, 1, True),
    ],
)
def test_which_messages_the_short_form_has(monkeypatch, path, level, rank, is_shown):
    """On the console; a log file has them all."""
    root, shown, file = logging.root, io.StringIO(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    root.addHandler(logging.StreamHandler(shown))
    root.addHandler(handler := type("File", (logging.StreamHandler,), {})(file))
    shorten(rank)
    root.handle(logging.LogRecord("root", level, path, 1, "words", None, None))
    assert (shown.getvalue() == "words\n") is is_shown
    assert file.getvalue() == "words\n" and not handler.filters


def test_a_message_comes_once_before_and_after_the_log_is_set_up(monkeypatch):
    root, early, theirs = logging.root, io.StringIO(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(run_log.sys, "stderr", early)
    handler = EarlyHandler()
    try:
        logging.warning("before")
        root.addHandler(logging.StreamHandler(theirs))
        logging.warning("after")
    finally:
        handler.close()
    assert early.getvalue().endswith("| WARNING | before\n") and theirs.getvalue() == "after\n"
    assert handler not in root.handlers
