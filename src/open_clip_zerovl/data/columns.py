"""The columns of captions in a table, by their names, and the captions in a cell."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from open_clip_zerovl.core.errors import UserError, nearest

CAPTION_NAMES = (
    *(
        "caption",
        "captions",
        "title",
        "text",
        "texts",
        "txt",
        "sentence",
        "sentences",
        "description",
        "descriptions",
    ),
    *("alt_text", "alttext", "alt", "prompt", "comment", "raw", "report"),
)
_NUMBERED = re.compile(r"(caption|title|text|sentence|description)s?_?\d+")
# reasons of refused rows
UNMARKED = "NULs in the caption (UTF-16 without its mark?)"
NOT_UTF8 = "caption not UTF-8"
_TEXT_KEYS = (
    "raw",
    "caption",
    "text",
    "sentence",
)  # of captions that are objects: {"raw": "a dog", "tokens": [...]}


def find(where: str, names: Sequence[str], name: str, flag: str) -> str:
    """The column of this name. UserError, which lists the existing columns, if it is missing."""
    if name in names:
        return name
    same = [known for known in names if plain(known) == plain(name)]
    if len(same) == 1:
        return same[0]
    known_as = {plain(known): known for known in names}
    near = nearest(plain(name), known_as)
    meant = f"; did you mean {flag} {known_as[near]!r}?" if near else ""
    raise UserError(
        f"{where} has no column {name!r}, given with {flag}; its columns are {listed(names)}{meant}"
    )


def caption_columns(names: Sequence[str]) -> list[str]:
    """The columns that are named like captions, the likelier first."""
    known = {plain(name): name for name in reversed(names)}
    return [known[name] for name in CAPTION_NAMES if name in known]


def guess_captions(names: Sequence[str], picture: str | None = None) -> tuple[str, ...]:
    """The column whose name is most likely that of captions; several if they are numbered."""
    if found := caption_columns([name for name in names if name != picture]):
        return (found[0],)
    return tuple(name for name in names if _NUMBERED.fullmatch(plain(name)) and name != picture)


def listed(names: Sequence[str]) -> str:
    """Names in a sentence; the first ones of many."""
    return ", ".join(map(repr, names[:12])) + (
        f" and {len(names) - 12} more" if len(names) > 12 else ""
    )


def plain(name: str) -> str:
    """The name of a column without case, blanks and dashes."""
    return re.sub(r"[\s\-.]+", "_", name.strip().lower())


def texts_of(values: Sequence[Any]) -> tuple[list[str], str]:
    """The captions in the cells of a row, each once, white space made single; and the reason if there are none.

    A cell holds a caption, a list of captions, an object with the caption, or the text of a JSON or Python list.
    """
    problem = "empty caption"
    texts: dict[str, None] = {}
    for value in _flat(values):
        if isinstance(value, bytes):
            value = value.decode("utf-8", "surrogateescape")
        if not isinstance(value, str):
            if value is not None and not (isinstance(value, float) and math.isnan(value)):
                problem = "caption not text"
            continue
        text = " ".join(value.split())
        if not text:
            continue
        if "\0" in text:
            return [], UNMARKED
        if not is_utf8(text):
            return [], NOT_UTF8
        texts[text] = None
    return list(texts), "" if texts else problem


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, str) and value[:1] == "[" and value.rstrip()[-1:] == "]":
            value = _listed(value)
        if isinstance(value, dict):
            value = next((value[key] for key in _TEXT_KEYS if key in value), 0)
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _listed(text: str) -> Any:
    """The list of texts that a cell spells out, as JSON or as Python prints one; else the cell."""
    for parse in (json.loads, ast.literal_eval):
        try:
            found = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list) and found and all(isinstance(item, str) for item in found):
            return found
    return text


def is_utf8(text: str) -> bool:
    """True for a text without bytes of another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
