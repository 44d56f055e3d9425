"""`UserError`, and the one boundary at which an error becomes a sentence: `ended`, of `zerovl` and of `training.main`.

Below the boundary functions raise: a `UserError` where silence would do harm or another message would mislead, else the
library's or the system's own error. The boundary prints one sentence. The traceback comes only with `--debug` or the
environment variable ZEROVL_DEBUG.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
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
    """Text from data, made safe for a terminal: control characters and bytes that are not text become escapes.

    A key in a tar may hold a terminal's escape sequence, which is shown as "a\\x1b[2J", or a byte that is not UTF-8, which is
    shown as "a\\udcff".
    """
    if text.isprintable():
        return text
    return "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text
    )


# Errors of files, folders and disks that a person can mend -> how.
_ADVICE = {
    errno.ENOSPC: "make room there or choose another place",
    errno.EDQUOT: "make room there or choose another place",
    errno.EFBIG: "the file system or a limit takes no larger file; choose another place",
    errno.EROFS: "choose another place",
    errno.EACCES: "change its permissions or choose another place",
    errno.EPERM: "change its permissions or choose another place",
    errno.EIO: "the disk, or the network to it, fails; choose another place",
    errno.ESTALE: "the network file system has lost it; call the command again",
    errno.ENOENT: "correct the path",
    errno.ENOTDIR: "correct the path",
    errno.EISDIR: "give a file in place of the folder",
    errno.EEXIST: "choose another place",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "a link leads to itself; correct the path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def place_sentence(error: BaseException) -> str | None:
    """The sentence for an error of a file, a folder or a disk: where, what, what to do. None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _ADVICE:
        return None
    where = "" if error.filename is None else f"{_short(str(error.filename))}: "
    return f"{where}{error.strerror}; {_ADVICE[error.errno]}"


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
    if sentence is not None:
        say(f"{name}: error: {sentence}")
        return 2
    say(
        f"{name}: error: {DEFECT}: {_short(kind_and_message(error))}; {DEBUG} prints the "
        "traceback, please report it"
    )
    return 1


def _is_interrupt(error: BaseException | None) -> bool:
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__cause__)
    )


def say(words: str) -> None:
    """Print on standard error. If that fails (it may be a file on a full disk), nothing is printed."""
    try:
        print(words.rstrip(), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def _reader_is_gone() -> bool:
    """True if standard output is a pipe that nobody reads any more; another pipe of this process may be the broken one."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # a notebook's
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def kind_and_message(error: BaseException) -> str:
    """An error's kind and the first line of its message; for an error in a loader worker those of the worker's error."""
    lines = str(error).splitlines() or [""]
    if "Traceback (most recent call last)" in str(error):
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")


def sentence_of(error: BaseException) -> str | None:
    """The sentence for an error that a person can mend: `UserError`, a package, a file, full memory. None for a defect."""
    if isinstance(error, UserError):
        return str(error)
    first_line = _short((str(error).splitlines() or [""])[0])
    if isinstance(error, ImportError):
        return _package_sentence(error, first_line)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for it
        return f"the device's memory is full ({first_line}); lower the batch size"
    if isinstance(error, MemoryError) or any(words in first_line for words in _NO_MEMORY):
        return f"the machine's memory is full{f' ({first_line})' if first_line else ''}; lower the batch size or --workers"
    if isinstance(error, OSError):
        return place_sentence(error) or _short(kind_and_message(error))
    return _library_sentence(error)


# Libraries whose errors are about a model, a file or a value that was given to them, and the modules of torch of which that
# is true. Their messages that need no kind of error.
_LIBRARIES = (
    "open_clip", "open_clip_train", "timm", "transformers", "tokenizers", "huggingface_hub", "safetensors", "peft", "yaml",
    "pandas", "braceexpand", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "fsspec", "torchvision",
)  # fmt: skip
_OF_TORCH = (
    "optim",
    "cuda",
    "distributed",
    "serialization.py",
    "_weights_only_unpickler.py",
    "sampler.py",
)
_PLAIN = (ValueError, RuntimeError, AssertionError)
OTHER_WEIGHTS = "Error(s) in loading state_dict"  # begins torch's error for weights that do not fit


def _library_sentence(error: BaseException) -> str | None:
    """The sentence for an error that a library raises about what was given to it: "timm: Unknown model (vit)"; else None."""
    frames = traceback.extract_tb(error.__traceback__)
    origin = Path(frames[-1].filename).parts if frames else ()
    library = next((name for name in _LIBRARIES if name in origin), None)
    # not of all of module.py, which also raises for an attribute that is not there
    told = str(error).startswith(OTHER_WEIGHTS) or any(name in origin for name in _OF_TORCH)
    if library is None and "torch" in origin and told:
        library = "torch"
    if library is None or origin[-2:] == ("open_clip_train", "train.py") or not str(error):
        return None
    kind = "" if isinstance(error, _PLAIN) else f"{type(error).__name__}: "
    return f"{library}: {kind}{_short(first_line(error))}; {DEBUG} prints the traceback"


# Modules whose package has another name.
_PACKAGES = {
    "PIL": "pillow",
    "open_clip": "open_clip_torch",
    "open_clip_train": "open_clip_torch",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
_DEVELOPERS_EXTRAS = ("demo", "test", "trainers", "dev", "docs")


def _package_sentence(error: ImportError, first_line: str) -> str | None:
    """The sentence for a package that is missing or broken here; None for a module of this project."""
    module = str(error.name).partition(".")[0]
    if module in ("open_clip_zerovl", "training"):
        return None
    if not isinstance(error, ModuleNotFoundError):
        return (
            f"a package cannot be imported ({first_line}); `zerovl doctor` checks the installation"
        )
    package = _PACKAGES.get(module, module)
    return f"the package {package} is not installed here; pip install '{_wanted(package)}'"


def _wanted(package: str) -> str:
    """The argument of `pip install` for a package: the extra of this project that brings it, or its supported versions."""
    from importlib import metadata  # not at the top: only a missing package needs it

    try:
        requirements = metadata.requires("open_clip_zerovl") or ()
    except metadata.PackageNotFoundError:
        return package
    for requirement in requirements:
        wanted, _, marker = requirement.partition(";")
        name = re.split(r"[^\w.-]", wanted, maxsplit=1)[0]
        if name.replace("_", "-").lower() != package.replace("_", "-").lower():
            continue
        extra = re.search(r"extra == ['\"](\w+)", marker)
        if extra is None:
            return wanted.strip()
        if extra[1] not in _DEVELOPERS_EXTRAS:
            return f"open_clip_zerovl[{extra[1]}]"
    return package


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that a misspelt word most likely means; None if none is as similar as `cutoff` (0 to 1)."""
    import difflib  # not at the top: only mistakes need it

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def argparse_sentence(message: str, flags: Iterable[str], help_command: str) -> str:
    """One sentence for argparse's message: for an unknown flag with the nearest known one.

    Args:
        message: the argument of `ArgumentParser.error`.
        flags: the known flags.
        help_command: the command that lists the flags.
    """
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown == message:
        return f"{message}; `{help_command}` lists the flags"
    words = unknown.split()
    word = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; write it as --flag value"
    similar = nearest(word, flags)
    return f"there is no flag {word}; " + (
        f"did you mean {similar}?" if similar else f"`{help_command}` lists the flags"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's kind if the message is empty.

    Of a pickle that torch refuses, the reason in place of the advice to load it unchecked; of a state dict that does not fit,
    the differences.
    """
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, KeyError):  # a number comes of a file that is no pickle
        return f"it lacks {error}" if str(error).startswith("'") else "KeyError"
    message = str(error).strip()
    if message.startswith(OTHER_WEIGHTS):
        return _short(" ".join(message.split()))
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if isinstance(error, pickle.UnpicklingError):
        advice = ("Please file", "Check the documentation", "(1)", "(2)")
        reasons = [line for line in lines[1:] if not line.startswith(advice)]
        lines = reasons or lines
    return lines[0].partition(" In PyTorch 2.6")[0] if lines else type(error).__name__


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."
