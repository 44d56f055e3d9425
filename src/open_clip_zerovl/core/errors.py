"""`UserError`, and the one boundary at which an error becomes a sentence: `ended`, of `zerovl` and of `training.main`.

Below the boundary functions raise: a `UserError` where silence would do harm or another message would mislead, else the
library's or the system's own error. The boundary prints one sentence. The traceback comes only with `--debug` or the
environment variable ZEROVL_DEBUG.
"""

from __future__ import annotations

import os
import pickle
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

DEBUG = "--debug"
DEBUG_HELP = "also print the traceback of an error (or set ZEROVL_DEBUG=1)"
DEFECT = "a defect of this program or of a package"  # begins the sentence of an unexpected error
INTERRUPTED_STATUS = 130
BROKEN_PIPE_STATUS = 141

Say = Callable[[str], None]  # takes a line for the user, as `print` does


class UserError(ValueError):
    """Something the user can mend: bad input, a missing file, flags that contradict each other.

    The message is one clear sentence: what is wrong, the value seen, what to do. The command-line programs print it and exit
    with status 2; library callers may catch it as a `ValueError`. Line breaks, as quoted messages of other libraries have,
    become spaces; control characters are escaped, see `printable`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(str(message).splitlines())))


def printable(text: str) -> str:
    """Make text from data safe for a terminal: control characters and bytes that are not text become escapes.

    A key in a tar may hold a terminal's escape sequence, which is shown as "a\\x1b[2J", or a byte that is not UTF-8, which is
    shown as "a\\udcff".
    """
    if text.isprintable():
        return text
    return "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text
    )


# Words of RuntimeErrors for want of memory: of torch's CPU kernels, and of a thread that has no room for its stack.
_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory", "could not create a primitive", "could not create a memory object",
    "can't start new thread",
)  # fmt: skip


def ended(
    program: Callable[[], Any],
    name: str,
    words: Sequence[str] = (),
    *,
    interrupted: str = "repeat the command to continue",
) -> int:
    """Call a program and return its exit status: an int that it returns, 0, or that of the error that ended it, see `explain`.

    Args:
        name: the program in its sentences, such as `zerovl`.
        words: its command line, which may hold `--debug`.
        interrupted: advice after Ctrl-C.
    """
    try:
        try:
            status = program()
        except SystemExit:  # after a help text, whose reader may be gone: `zerovl --help | head -1`
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return explain(error, name, words, interrupted=interrupted)
    return status if isinstance(status, int) else 0


def explain(
    error: BaseException,
    name: str,
    words: Sequence[str] = (),
    *,
    interrupted: str = "repeat the command to continue",
    sentence: str | None = None,
) -> int:
    """Print the sentence of the error that ends a program, and return the exit status.

    2    an error with a sentence of its own (`sentence`, or `sentence_of`)
    1    any other error, a defect: its kind and its message
    130  Ctrl-C, also if Python or a package raised another error from it, as Python 3.11 does in a class of descriptors
    141  the reader of standard output is gone (`zerovl ... | head`); nothing is printed, as other programs do
    """
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS
    if _is_interrupt(error):
        say(f"{name}: interrupted; {interrupted}")
        return INTERRUPTED_STATUS
    if DEBUG in words or os.environ.get("ZEROVL_DEBUG"):
        say("".join(traceback.format_exception(error)))
    sentence = sentence or sentence_of(error)
    defect = f"{DEFECT}: {_short(kind_and_message(error))}; {DEBUG} prints the traceback, please report it"
    say(f"{name}: error: {sentence or defect}")
    return 2 if sentence else 1


def _is_interrupt(error: BaseException | None) -> bool:
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__cause__)
    )


def say(words: str) -> None:
    """Print on standard error, if that is possible: it may be a file on a full disk."""
    try:
        print(words.rstrip(), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def _reader_is_gone() -> bool:
    """Return whether standard output, and no other pipe, is the one that nobody reads any more."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # a notebook's
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


# Modules whose package has another name.
_PACKAGES = {
    "PIL": "pillow",
    "open_clip": "open_clip_torch",
    "open_clip_train": "open_clip_torch",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def kind_and_message(error: BaseException) -> str:
    """Write an error's kind and the first line of its message, those of the worker's error for one in a loader worker."""
    lines = str(error).splitlines() or [""]
    if "Traceback (most recent call last)" in str(error):
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")


def sentence_of(error: BaseException) -> str | None:
    """Word an error that a person can mend: a UserError, a file, a package, full memory, what a library refuses.

    Returns:
        None for a defect.
    """
    if isinstance(error, UserError):
        return str(error)
    line = _short(first_line(error))
    if isinstance(error, ImportError):
        module = str(error.name).partition(".")[0]
        if module in ("open_clip_zerovl", "training"):
            return None
        if not isinstance(error, ModuleNotFoundError):
            return f"a package cannot be imported ({line}); `zerovl doctor` checks the installation"
        package = _PACKAGES.get(module, module)
        return f"the package {package} is not installed here; pip install {package} (`zerovl doctor` compares versions)"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for it
        return f"the device's memory is full ({line}); lower the batch size"
    if isinstance(error, MemoryError) or any(words in line for words in _NO_MEMORY):
        return f"the machine's memory is full ({line}); lower the batch size or --workers"
    if isinstance(error, OSError):
        if error.strerror is None or error.filename is None:
            return _short(kind_and_message(error))
        return f"{_short(str(error.filename))}: {error.strerror}"
    frames = traceback.extract_tb(error.__traceback__)
    file = frames[-1].filename if frames else ""
    _, installed, module = file.rpartition("/site-packages/")
    if not installed and (checkout := re.search(r"/(open_clip(?:_train)?/.*)", file)):
        installed, module = file, checkout[1]
    kind = "" if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: "
    # open_clip's loop runs our step, and torch hands on what was raised in a loader worker: what fails there is a defect.
    ours = module.endswith("open_clip_train/train.py") or " in DataLoader worker process" in line
    if not installed or ours:
        return None
    return f"{module.split('/')[0].removesuffix('.py')}: {kind}{line}; {DEBUG} prints the traceback"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Find the known name that a misspelt word most likely means.

    Returns:
        None if none is as similar as `cutoff` (0 to 1).
    """
    import difflib  # not at the top: only mistakes need it

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def argparse_sentence(message: str, flags: Iterable[str], help_command: str) -> str:
    """Word argparse's message as one sentence, with the nearest known flag for an unknown one.

    Args:
        message: the argument of `ArgumentParser.error`.
        flags: the known flags.
        help_command: the command that lists the flags.
    """
    unknown = message.removeprefix("unrecognized arguments: ")
    word = next((word for word in unknown.split() if word.startswith("-")), None)
    if unknown == message or word is None:
        return f"{_short(message)}; `{help_command}` lists the flags"
    word = word.partition("=")[0]
    similar = nearest(word, flags)
    return f"there is no flag {word}; " + (
        f"did you mean {similar}?" if similar else f"`{help_command}` lists the flags"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's kind if the message is empty.

    Of a pickle that torch refuses, the reason in place of the advice to load it unchecked; of a state dict that does not fit,
    the differences.
    """
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, KeyError):  # a number comes of a file that is no pickle
        return f"it lacks {error}" if str(error).startswith("'") else "KeyError"
    message = str(error).strip()
    if message.startswith("Error(s) in loading state_dict"):
        return _short(" ".join(message.split()))
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if isinstance(error, pickle.UnpicklingError):
        advice = ("Please file", "Check the documentation", "(1)", "(2)")
        reasons = [line for line in lines[1:] if not line.startswith(advice)]
        lines = reasons or lines
    return lines[0].partition(" In PyTorch 2.6")[0] if lines else type(error).__name__


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."
