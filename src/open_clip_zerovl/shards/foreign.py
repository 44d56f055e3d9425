"""Files of other people, read within bounds: pictures, captions, tables. A fault is that of one row, with words to count by."""

from __future__ import annotations

import os
from pathlib import Path

from open_clip_zerovl.core.files import reading, regular_file
from open_clip_zerovl.shards.tar import unreadable
from open_clip_zerovl.shards.texts import Fault, encoding_of

LARGEST_PICTURE_BYTES = 1 << 30


class BadFile(Fault):
    """A file that cannot be used."""


def read_foreign(path: str | os.PathLike[str], most_bytes: int = LARGEST_PICTURE_BYTES) -> bytes:
    """Read a regular file. A pipe, a device, a folder and a file beyond the limit are refused before they are read.

    Raises:
        BadFile: any fault of the file or of its name.
        UserError: the process has as many files open as it may, which is not the file's fault.
    """
    try:
        with regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(most_bytes + 1) if size <= most_bytes else b""
    except FileNotFoundError as error:
        raise BadFile("file missing", f"{path} does not exist") from error
    except OSError as error:
        unreadable(error)
        raise BadFile(
            "file cannot be read", f"{path} cannot be read ({error.strerror or error})"
        ) from error
    except ValueError as error:  # a NUL in the path
        raise BadFile("file missing", f"{path!r} cannot be the name of a file") from error
    if size > most_bytes or len(content) > most_bytes:
        raise BadFile("file too large", f"{path} has more than {most_bytes >> 20} MiB")
    return content


def text_of(file: Path) -> str:
    """Read the text of a file that people write: a byte-order mark names its encoding, without one it is UTF-8.

    Raises:
        UserError: bytes of another encoding.
        OSError: no such file.
    """
    content = file.read_bytes()
    with reading(file, "save it as UTF-8"):
        return content.decode(encoding_of(content))
