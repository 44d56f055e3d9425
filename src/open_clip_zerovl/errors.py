"""The one kind of error that is shown to a person as a sentence, and how the system's own errors become sentences."""

from __future__ import annotations

import errno


class UserError(ValueError):
    """Something the user can mend: bad input, a missing file, flags that contradict each other.

    The message is one clear sentence: what is wrong, the value seen, what to do. The command-line programs print it
    and exit with status 2; library callers catch it as the `ValueError` that it is. Line breaks, which messages of other
    libraries quoted in it may bring, become spaces; what no terminal should be sent is escaped, see `printable`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(str(message).splitlines())))


def printable(text: str) -> str:
    """A text that came out of data, fit for a terminal: control characters, and bytes that are no text, as escapes.

    A key in a tar may hold a terminal's commands, or bytes that cannot be printed at all; "a\\x1b[2J" and "a\\udcff" are how
    those are shown.
    """
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


# What a person can mend about a file, a folder or a disk, and how.
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
    """What to say about an error of a file, a folder or a disk: where, what, what to do. None for other errors."""
    if not isinstance(error, OSError) or error.errno not in _ADVICE:
        return None
    where = "" if error.filename is None else f"{_short(str(error.filename))}: "
    return f"{where}{error.strerror}; {_ADVICE[error.errno]}"


def sentence_of(error: BaseException) -> str | None:
    """What to say about an error that needs no traceback: a `UserError`, a file, the memory. None for a defect."""
    if isinstance(error, UserError):
        return str(error)
    first_line = _short((str(error).splitlines() or [""])[0])
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for it
        return f"the device's memory is full ({first_line}); lower the batch size"
    if isinstance(error, MemoryError):
        return (
            f"the machine's memory is full{f' ({first_line})' if first_line else ''}; lower the batch size or --workers"
        )
    if isinstance(error, OSError):
        return place_sentence(error) or f"{type(error).__name__}: {first_line}"
    return None


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."
