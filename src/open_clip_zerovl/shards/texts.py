"""Texts of other people: captions, names and templates, annotation files, also within archives.

A byte-order mark names the encoding, without one it is UTF-8. A file has a caption a line; within a caption white space of any
kind, also a quoted line break, is one blank. What follows 4,096 characters is cut off.

Annotation files are read as they are published, plain, gzipped, or in a zip or tar, as streams, so that nothing is unpacked.
`json_array` reads the elements of a long JSON array one at a time. (ijson, the library for this, keeps the path to each element
as a text: a file of 100,000 brackets took all memory. Python's own decoder is faster, too.)
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

_DECODER = json.JSONDecoder()
_PIECE_BYTES = 1 << 20  # of JSON that are read at a time
#: Characters that no element of an annotation file has. So a file that is broken near its start is not read to its end.
_LONGEST_ELEMENT = 64 << 20


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
        except BROKEN_ARCHIVE as error:
            raise UserError(f"{path} is broken or encrypted ({error}): fetch it again.") from error
        except OSError as error:  # EINVAL: a zip whose directory points before its beginning
            raise UserError(
                f"{path} cannot be read ({error.strerror or error}): check the path, or fetch it again"
            ) from error


def json_array(stream: IO[bytes], name: str, *, key: str | None = None) -> Iterator[Any]:
    """Yield the elements of a JSON document that is an array, or of the array under a key of its outermost object.

    Memory is bounded by the longest element, of this array or of another one, and by the values of other keys.

    Args:
        stream: the document, UTF-8.
        name: its name in messages.
        key: the key of the outermost object; None if the document itself is the array.

    Raises:
        UserError: the document is not JSON, ends early, is of another form, or lacks the key.
    """
    text = _JsonText(stream, name)
    if key is not None:
        text.take("{", "an object")
        while text.value() != key:
            text.take(":", "an object")
            if text.next() == "[":
                for _ in text.elements():
                    pass
            else:
                text.value()
            text.take(",", f"the key {key!r}")
        text.take(":", "an object")
    yield from text.elements()


class _JsonText:
    """The text of a JSON document, of which no more is in memory than a value needs."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream, self._name = stream, name
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._before = "", 0, 0

    def next(self) -> str:
        """Return the next character that is not white space without consuming it, "" at the end."""
        while True:
            while self._text[self._at : self._at + 1] in (" ", "\t", "\r", "\n"):
                self._at += 1
            if self._at < len(self._text) or not self._read_on():
                return self._text[self._at : self._at + 1]

    def take(self, character: str, what: str) -> None:
        """Consume a character. UserError if another one comes."""
        if self.next() != character:
            raise self._broken(f"expected {what}, found {self._text[self._at : self._at + 20]!r}")
        self._at += 1

    def elements(self) -> Iterator[Any]:
        """Yield the elements of an array."""
        self.take("[", "a list")
        while self.next() != "]":
            yield self.value()
            if self.next() != "]":
                self.take(",", "a comma or the list's end")
        self._at += 1

    def value(self) -> Any:
        """Read the next whole value. The text is doubled where it ends within, so that a long value is parsed few times."""
        self.next()
        while True:
            length = len(self._text) - self._at
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                # a number at the end of the text may have more digits
                if end < len(self._text) or not self._read_on(length):
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                if length > _LONGEST_ELEMENT or not self._read_on(length):
                    raise self._broken(error.msg) from error

    def _read_on(self, at_least: int = 0) -> bool:
        """Read more text, and return whether there was any."""
        content = self._stream.read(max(_PIECE_BYTES, at_least))
        try:
            text = self._utf8.decode(content, final=not content)
        except UnicodeDecodeError as error:
            raise self._broken(str(error)) from error
        if content:
            self._before += self._at
            self._text, self._at = self._text[self._at :] + text, 0
        return bool(content)

    def _broken(self, why: str) -> UserError:
        return UserError(
            f"{self._name} cannot be read near character {self._before + self._at} ({why}): give the official file, whole."
        )
