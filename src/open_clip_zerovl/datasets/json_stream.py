"""The elements of a long JSON array, one at a time: annotation files are too large to be parsed as a whole."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from open_clip_zerovl.errors import UserError

_PIECE_BYTES = 1 << 20
#: No element of an annotation file comes near this; a file that is broken near its start is not read to its end.
_LONGEST_ELEMENT = 64 << 20


def json_array(stream: IO[bytes], name: str, *, key: str | None = None) -> Iterator[Any]:
    """Elements of the array that a JSON document is, or has under a key of its outermost object.

    Memory is bounded by the longest element (not by a value under another key, unless that is no array).

    Args:
        stream: the document, UTF-8.
        name: what to call it in messages.
        key: of the outermost object; None where the document itself is the array.

    Raises:
        UserError: the document is not JSON, ends early, is of another form, or lacks the key.
    """
    reader = _Reader(stream, name)
    if key is None:
        reader.expect("[", "a list")
        yield from reader.elements()
        return
    reader.expect("{", "an object")
    while reader.peek() != "}":
        found = reader.value()
        reader.expect(":", "an object")
        if found == key:
            reader.expect("[", f"a list under {key!r}")
            yield from reader.elements()
            return
        if reader.peek() == "[":
            reader.expect("[", "a list")
            for _ in reader.elements():
                pass
        else:
            reader.value()
        if reader.peek() == ",":
            reader.expect(",", "an object")
    raise UserError(f"{name} has no list under {key!r}: give the official file.")


class _Reader:
    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream, self._name = stream, name
        self._decoder = json.JSONDecoder()
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._ended, self._before = "", 0, False, 0

    def peek(self) -> str:
        """The next character that is no white space."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise self._broken("it ends early")

    def expect(self, character: str, what: str) -> None:
        seen = self.peek()
        if seen != character:
            raise self._broken(f"expected {what}, found {self._text[self._at : self._at + 20]!r}")
        self._at += 1

    def elements(self) -> Iterator[Any]:
        """The elements of an array whose bracket has been read, and its closing bracket."""
        while self.peek() != "]":
            yield self.value()
            if self.peek() == ",":
                self._at += 1
            elif self.peek() != "]":
                self.expect("]", "a comma or the list's end")
        self._at += 1

    def value(self) -> Any:
        """One whole value; reads on until there is one."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Not whole yet, or broken: more text tells. Doubled each time, so that a long element is not parsed often.
                if len(self._text) - self._at > _LONGEST_ELEMENT or not self._more(len(self._text) - self._at):
                    raise self._broken(error.msg) from error
                continue
            # A number at the very end of what has been read may have further digits.
            if end == len(self._text) and self._more():
                continue
            self._at = end
            return value

    def _more(self, at_least: int = 0) -> bool:
        if self._ended:
            return False
        content = self._stream.read(max(_PIECE_BYTES, at_least))
        self._ended = not content
        try:
            text = self._utf8.decode(content, final=self._ended)
        except UnicodeDecodeError as error:
            raise self._broken(str(error)) from error
        self._before += self._at
        self._text, self._at = self._text[self._at :] + text, 0
        return not self._ended or bool(text)

    def _broken(self, why: str) -> UserError:
        return UserError(
            f"{self._name} cannot be read near character {self._before + self._at} ({why}): give the official file, whole."
        )
