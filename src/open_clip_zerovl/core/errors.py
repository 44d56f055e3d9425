"""`UserError`, the one error that is shown to a person as a sentence, and sentences for errors of the operating system."""

from __future__ import annotations

import errno
from collections.abc import Iterable


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


def sentence_of(error: BaseException) -> str | None:
    """The sentence for an error that needs no traceback: a `UserError`, a file, full memory. None for a bug in the program."""
    if isinstance(error, UserError):
        return str(error)
    first_line = _short((str(error).splitlines() or [""])[0])
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for it
        return f"the device's memory is full ({first_line}); lower the batch size"
    if isinstance(error, MemoryError) or any(words in first_line for words in _NO_MEMORY):
        return f"the machine's memory is full{f' ({first_line})' if first_line else ''}; lower the batch size or --workers"
    if isinstance(error, OSError):
        return place_sentence(error) or f"{type(error).__name__}: {first_line}"
    return None


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that a misspelt word most likely means; None if none is as similar as `cutoff` (0 to 1)."""
    import difflib  # not at the top: only mistakes need it

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def argparse_sentence(
    message: str, flags: Iterable[str], help_command: str, *, lists: str = "flags"
) -> str:
    """One sentence for argparse's message: for an unknown flag with the nearest known one.

    Args:
        message: the argument of `ArgumentParser.error`.
        flags: the known flags.
        help_command: the command that lists the flags, or the commands.
    """
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown == message:
        return f"{message}; `{help_command}` lists the {lists}"
    words = unknown.split()
    word = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; write it as --flag value"
    near = nearest(word, flags)
    return f"there is no flag {word}; " + (
        f"did you mean {near}?" if near else f"`{help_command}` lists the {lists}"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's kind if the message is empty."""
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."
