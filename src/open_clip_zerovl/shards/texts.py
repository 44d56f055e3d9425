"""The text of a caption: one rule for the bytes of a file, of a member of a tar, and for the cells of a table.

A byte-order mark names the encoding, without one it is UTF-8. A file has a caption a line; within a caption white space of any
kind, also a quoted line break, is one blank. What follows 4,096 characters is cut off.
"""

from __future__ import annotations

import codecs

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
