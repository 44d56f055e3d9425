"""Texts of other people: captions, names and templates, annotation files, also within archives.

A byte-order mark names the encoding, without one it is UTF-8. A file has a caption a line; within a caption white space of any
kind, also a quoted line break, is one blank. What follows 4,096 characters is cut off.

Annotation files are read as they are published, plain, gzipped, or in a zip or tar, so that nothing is unpacked.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import json
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, cast

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import reading

MAX_CAPTION_CHARACTERS = (
    4096  # longer captions are cut to it: contexts hold 25 to 77 tokens, and tokenizing takes time
)
# reasons of captions that cannot be shown
EMPTY, NOT_UTF8 = "empty caption", "caption not UTF-8"
UNMARKED = "NULs in the caption (UTF-16 without its mark?)"
#: What programs write for an empty cell, in lower case; counted in the report of `zerovl data pack`.
WORDS_FOR_NOTHING = ("nan", "none", "null", "nil", "n/a", "#n/a", "<na>", "-", ".")

#: Byte-order marks; UTF-32 before UTF-16, whose mark begins with the same bytes.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

#: Errors of reading a broken archive: corrupt data, and entries that are encrypted or packed in a way that Python does not know
#: (RuntimeError).
BROKEN_ARCHIVE = (
    EOFError,
    RuntimeError,
    gzip.BadGzipFile,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
)


class Fault(Exception):
    """The reason why a file, a picture, a caption or a shard cannot be used, which is raised or handed on as a value.

    Attributes:
        reason: a few words to count by ("empty caption").
        detail: words for messages, a verb phrase for those of samples ("has an empty caption").
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.detail = detail


class BadCaption(Fault):
    """A caption that cannot be shown."""


def encoding_of(beginning: bytes) -> str:
    """Return the encoding of a text by its byte-order mark, UTF-8 without one."""
    return next((encoding for mark, encoding in _MARKS if beginning.startswith(mark)), "utf-8")


def text_of(file: Path) -> str:
    """Read the text of a file that people write: a byte-order mark names its encoding, without one it is UTF-8.

    Raises:
        UserError: bytes of another encoding.
        OSError: no such file.
    """
    content = file.read_bytes()
    with reading(file, "save it as UTF-8"):
        return content.decode(encoding_of(content))


def check_open_files(error: OSError) -> None:
    """Raise UserError if this process has as many files open as it may, which is not the fault of the file."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise UserError(
            "this process has as many files open as it may, and a loader process keeps one or two open for each source; raise "
            "the limit (ulimit -n), or take fewer sources"
        ) from error


def caption_lines(content: bytes) -> list[bytes]:
    """Return the captions of a text, one a line that is not empty, in UTF-8 as far as they can be decoded."""
    encoding = encoding_of(content)
    if encoding != "utf-8":
        try:
            content = content.decode(encoding).encode()
        except UnicodeError:
            return [content]  # which `caption_of` refuses
    lines = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return [line for line in lines if line.decode("utf-8", "replace").strip("\ufeff \t\f\v")]


def caption_of(text: str | bytes) -> str:
    """Return a caption as every command sees it.

    Raises:
        BadCaption: an empty one, one that is not UTF-8, or one that holds NULs.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    caption = " ".join(text.split()).strip("\ufeff ")
    if not caption:
        raise BadCaption(EMPTY, "has an empty caption")
    if "\0" in caption:
        raise BadCaption(UNMARKED, "has NULs in a caption (UTF-16 without its mark?)")
    try:
        caption.encode()
    except UnicodeEncodeError as error:
        raise BadCaption(NOT_UTF8, f"has a caption that is not UTF-8 ({error.reason})") from error
    return caption[:MAX_CAPTION_CHARACTERS]


# ---------------------------------------------------------------------------------------------------------------------
# Archives and JSON
# ---------------------------------------------------------------------------------------------------------------------


def members(path: Path) -> list[str]:
    """List the names of the files in a zip or tar, of any other file its own name without `.gz`.

    Raises:
        UserError: a broken archive.
    """
    with reading(path, "fetch it again"):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return [name for name in archive.namelist() if not name.endswith("/")]
        if _is_tar(path):
            with tarfile.open(path) as tar:
                return [member.name for member in tar if member.isfile()]
    return [path.name.removesuffix(".gz")]


def _is_tar(path: Path) -> bool:
    return ".tar" in path.name or path.suffix == ".tgz"


def find_member(paths: Iterable[Path], *endings: str) -> tuple[Path, str] | None:
    """Find the first file, or member of an archive, whose name has one of the endings, and return its path and name."""
    for path in paths:
        if path.is_file():
            for name in members(path):
                if name.lower().endswith(endings) and "__MACOSX" not in name:
                    return path, name
    return None


@contextmanager
def open_member(path: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file, or one member of an archive, as a stream of its plain bytes.

    Raises:
        UserError: the file cannot be read, or the archive is broken; also raised while it is read.
    """
    with ExitStack() as stack:
        try:
            if zipfile.is_zipfile(path):
                yield stack.enter_context(stack.enter_context(zipfile.ZipFile(path)).open(name))
            elif _is_tar(path):
                handle = stack.enter_context(tarfile.open(path)).extractfile(name)
                assert handle is not None  # `members` lists files only
                yield stack.enter_context(handle)
            elif path.suffix == ".gz":
                yield stack.enter_context(cast(IO[bytes], gzip.GzipFile(path)))
            else:
                yield stack.enter_context(open(path, "rb"))
        except (*BROKEN_ARCHIVE, OSError) as error:
            raise UserError(
                f"{path} cannot be read ({error}): check the path, or fetch it again"
            ) from error


def json_array(stream: IO[bytes], name: str, *, key: str | None = None) -> list[Any]:
    """Read a JSON document that is an array, or the array under a key of its outermost object.

    Args:
        name: the document's name in messages.
        key: the key of the outermost object; None if the document itself is the array.

    Raises:
        UserError: the document is not JSON, ends early, is of another form, or lacks the key.
    """
    with reading(name, "give the official file, whole"):
        array = json.load(stream)
        if key is not None:
            array = array[key]
        if not isinstance(array, list):
            raise ValueError("expected a list")
    return array
