"""A run's output on standard error: its whole log, or with flags of the recipe a short form.

The log file has everything in either case. The short form has the run's own lines, all warnings, and in a terminal one line
that shows where training is, in place of a line for each logged step. `--verbose` shows everything.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from typing import Any, TextIO

import open_clip_zerovl

#: For `extra=` of a logging call: only the log file and `--verbose` have the line; a terminal's progress line shows the same.
DETAIL, PROGRESS = {"shown": "detail"}, {"shown": "progress"}
_OURS = tuple(
    os.path.join(os.path.dirname(file), "")
    for file in (__file__, open_clip_zerovl.__file__)
    if file is not None
)
# of open_clip: its lines of steps and metrics
_TRAINING_AND_EVALUATION = os.path.join("open_clip_train", "train.py")
# open_clip sets them all to INFO
_LIBRARIES = ("torch", "transformers", "timm", "PIL", "fsspec", "matplotlib")


class ProgressLine:
    """The last line of a terminal, overwritten in place; does nothing where the stream is not a terminal."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream, self._text = stream, ""
        asks = getattr(stream, "isatty", None)
        self.possible = bool(asks and asks()) and os.environ.get("TERM") != "dumb"

    def show(self, text: str) -> None:
        """Put a text in place of the one shown before."""
        self._text = text
        self.draw()

    def draw(self) -> None:
        """Show the text again, after something else was printed."""
        if self.possible and self._text:
            self._write(f"\r\x1b[K{self._text[: shutil.get_terminal_size().columns - 1]}")

    def clear(self) -> None:
        """Make room for something else; `draw` shows the text again."""
        if self.possible and self._text:
            self._write("\r\x1b[K")

    def end(self) -> None:
        """Remove the line."""
        self.clear()
        self._text = ""

    def _write(self, text: str) -> None:
        try:
            assert self._stream is not None
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone; training continues
            self.possible = False


class Console(logging.StreamHandler):
    """Shows messages before open_clip's main sets up its log, in that log's form, and after that in place of its handler.

    Without it the first message would make `logging` add a handler of its own, and each later line would come twice.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(
            logging.Formatter("%(asctime)s | %(levelname)s | %(message)s", "%Y-%m-%d,%H:%M:%S")
        )
        self.progress = ProgressLine(sys.stderr)
        self.short = False
        self._rank, self._weights_follow = 0, False
        self._earlier = list(logging.root.handlers)
        if not self._earlier:
            logging.root.addHandler(self)

    def shorten(self, rank: int, *, weights_follow: bool = False) -> None:
        """Show the short form from now on.

        Args:
            weights_follow: a checkpoint comes into the model that open_clip makes: its warning of random weights is wrong.
        """
        self.short = True
        self._rank = rank
        self._weights_follow = weights_follow
        # torch prints this twice, in four lines; the summary has it in its line of the device.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        if self not in logging.root.handlers:
            logging.root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a message if it belongs here."""
        if self.short:
            self._mute_open_clips()
        if self._shows(record):
            self.progress.clear()
            super().emit(record)
            self.progress.draw()

    def close(self) -> None:
        """Take the handler away; the progress line with it."""
        self.progress.end()
        logging.root.removeHandler(self)
        super().close()

    def _shows(self, record: logging.LogRecord) -> bool:
        if not self.short:
            return logging.root.handlers == [self]
        ours = record.pathname.startswith(_OURS)
        if self._weights_follow and record.msg.startswith("No pretrained weights loaded"):
            return False
        if record.levelno >= logging.WARNING:
            return ours or self._rank == 0
        kind = getattr(record, "shown", None)
        if kind == "detail" or (kind == "progress" and self.progress.possible):
            return False
        return ours or record.pathname.endswith(_TRAINING_AND_EVALUATION)

    def _mute_open_clips(self) -> None:
        """Silence the console handler that open_clip's main has added since the run began."""
        for handler in logging.root.handlers:
            if (
                type(handler) is logging.StreamHandler
                and handler not in self._earlier
                and _nothing not in handler.filters
            ):
                handler.addFilter(_nothing)
                quieten_libraries()


def quieten_libraries() -> None:
    """Have libraries log warnings only, which open_clip's main has set to log everything."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in _LIBRARIES:
            logging.getLogger(name).setLevel(logging.WARNING)


def _nothing(record: Any) -> bool:
    return False
