"""A run's output on standard error: open_clip's log, with flags of the recipe a short form of it.

The log file has everything in either case. The short form has the run's own lines, open_clip's lines of steps and evaluations,
and all warnings. `--verbose` shows everything.
"""

from __future__ import annotations

import logging
import os
import sys

import open_clip_zerovl

_OURS = tuple(
    os.path.join(os.path.dirname(file), "")
    for file in (__file__, open_clip_zerovl.__file__)
    if file is not None
)
# of open_clip: its lines of steps and metrics
_TRAINING_AND_EVALUATION = os.path.join("open_clip_train", "train.py")
# open_clip sets them all to INFO
_LIBRARIES = ("torch", "transformers", "timm", "PIL", "fsspec", "matplotlib")


class EarlyHandler(logging.StreamHandler):
    """Shows messages in the form of open_clip's log until its main has set that up.

    Without it the first message would make `logging` add a handler of its own, and each later line would come twice.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(
            logging.Formatter("%(asctime)s | %(levelname)s | %(message)s", "%Y-%m-%d,%H:%M:%S")
        )
        if not logging.root.handlers:
            logging.root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message if no other handler does."""
        if logging.root.handlers == [self]:
            super().emit(record)

    def close(self) -> None:
        """Take the handler away."""
        logging.root.removeHandler(self)
        super().close()


def shorten(rank: int) -> None:
    """Set the short form from now on.

    Call it when open_clip's main has set up its log.
    """
    for handler in logging.root.handlers:
        if type(handler) is logging.StreamHandler:
            handler.addFilter(lambda record: _is_shown(record, rank))
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in _LIBRARIES:
            logging.getLogger(name).setLevel(logging.WARNING)


def _is_shown(record: logging.LogRecord, rank: int) -> bool:
    ours = record.pathname.startswith(_OURS)
    if record.levelno >= logging.WARNING:
        return ours or rank == 0
    return ours or record.pathname.endswith(_TRAINING_AND_EVALUATION)
