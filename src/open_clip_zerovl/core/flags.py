"""Flags declared as fields of dataclasses: how they are added to a parser, and checked.

dga_steps: int = flag(1, "K micro-batches make one effective batch", metavar="K", range=at_least(1))
# --dga-steps K, an int, 1 if it is not given, refused below 1
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import keyword
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar

Settings = TypeVar("Settings")

# ---------------------------------------------------------------------------------------------------------------------
# Declarations
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """The values that a flag may have.

    Attributes:
        wanted: the range in words; `{name}` is replaced by another flag's value.
        holds: (value, all flags' values) -> whether the value is in the range.
    """

    wanted: str
    holds: Callable[[Any, Any], bool]


def at_least(low: float, unit: str = "") -> Range:
    """`low` or more; `unit` is for the words only."""
    return Range(f"at least {low}{unit and ' ' + unit}", lambda value, _: value >= low)


SHARE = Range("a share between 0 and 1", lambda value, _: 0 < value < 1)
NOT_NEGATIVE = Range("0 or more", lambda value, _: value >= 0)
POSITIVE = Range("a positive number", lambda value, _: value > 0)


@dataclass(frozen=True)
class Requirement:
    """A flag that another flag needs: "--mixup-alpha needs --coin-flip-mixup".

    Attributes:
        other: the flag that is needed, as the end of the sentence.
        met: all flags' values -> whether it is given.
        flag: name of the flag itself in the sentence, if its option is not precise enough.
    """

    other: str
    met: Callable[[Any], bool]
    flag: str | None = None


@dataclass(frozen=True)
class Contradiction:
    """A setting that a flag does not work with.

    Attributes:
        other: its name in the sentence; `{name}` is replaced by a flag's value.
        when: all flags' values -> whether it is given.
        advice: how to resolve it.
        flag: name of the flag itself in the sentence, if its option is not precise enough.
    """

    other: str
    when: Callable[[Any], bool]
    advice: str
    flag: str | None = None


@dataclass(frozen=True)
class Switch:
    """A switch for one value of a flag: `--debiased-sampling` is `--sampling debiased`."""

    option: str
    value: str
    help: str


@dataclass(frozen=True)
class Flag:
    """One flag, as declared by a field.

    Attributes:
        name: the field's name.
        option: its form on a command line.
        kind: converts a word to the value; bool is a switch, which takes the value back where the default is True.
        several: the flag may be given several times; its value is a sorted tuple without repetition.
        nargs: argparse's.
    """

    name: str
    option: str
    default: Any
    help: str
    kind: Callable[[str], Any]
    choices: tuple[str, ...] | None
    metavar: str | None
    several: bool
    nargs: str | None
    range: Range | None
    needs: tuple[Requirement, ...]
    contradicts: tuple[Contradiction, ...]
    switch: Switch | None

    def given_as(self, value: Any) -> str:
        """The option with which a person gives this value: the switch, if it is the switch's value."""
        return (
            self.option if self.switch is None or self.switch.value != value else self.switch.option
        )

    @property
    def keyword(self) -> str:
        """Its name as an argument of a Python function: `--test-share` is `test_share`, `--from` is `from_`."""
        name = self.option.removeprefix("--").replace("-", "_")
        return f"{name}_" if keyword.iskeyword(name) else name


def flag(
    default: Any,
    help: str = "",
    *,
    option: str | None = None,
    kind: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    nargs: str | None = None,
    range: Range | None = None,
    needs: tuple[Requirement, ...] = (),
    contradicts: tuple[Contradiction, ...] = (),
    switch: Switch | None = None,
) -> Any:
    """A dataclass field that declares a flag; see `Flag`. `kind` is the field's type unless given; default `dict` is {}."""
    declared = {
        "option": option,
        "help": help, "kind": kind, "choices": choices, "metavar": metavar, "nargs": nargs, "range": range,
        "needs": needs, "contradicts": contradicts, "switch": switch,
    }  # fmt: skip
    if default is dict:
        return field(default_factory=dict, metadata={"flag": declared})
    return field(default=default, metadata={"flag": declared})


def redeclared(section: type, name: str, default: Any) -> Any:
    """The flag `name` of a section, as a field of a subclass with another default."""
    return field(default=default, metadata=section.__dataclass_fields__[name].metadata)  # type: ignore[attr-defined]


@cache
def flags_of(section: type) -> tuple[Flag, ...]:
    """The flags that a dataclass declares or inherits, in order."""
    hints = typing.get_type_hints(section)
    return tuple(
        flag_of(each.name, hints[each.name], default_of(each), each.metadata["flag"])
        for each in fields(section)
        if "flag" in each.metadata
    )


def default_of(declared: dataclasses.Field) -> Any:
    """Return the default of a field, {} for `default_factory=dict`."""
    return {} if declared.default is dataclasses.MISSING else declared.default


def flag_of(name: str, hint: Any, default: Any, declared: Mapping[str, Any]) -> Flag:
    """Make a flag of a name, a type, a default and the options of `flag`."""
    kind = next(kind for kind in _alternatives(hint) if kind is not type(None))
    words, origin = typing.get_args(kind), typing.get_origin(kind)
    several = origin is tuple and words[-1] is ... and declared["nargs"] is None
    inferred = {
        "option": "--" + name.rstrip("_").replace("_", "-"),
        "choices": words if origin is typing.Literal else None,
        "kind": {tuple: words[0] if words else str, typing.Literal: str}.get(origin, kind),
    }
    given = {option: value for option, value in declared.items() if value is not None}
    return Flag(name, default=default, several=several, **{**declared, **inferred, **given})


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return (
        typing.get_args(hint)
        if typing.get_origin(hint) in (types.UnionType, typing.Union)
        else (hint,)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Types of values
# ---------------------------------------------------------------------------------------------------------------------


def number_or(word: str, least: int) -> Callable[[str], int | str]:
    """The type of a flag whose value is a whole number, `least` or more, or the word: `--retrieval-captions 5`, `all`."""

    def convert(text: str) -> int | str:
        if text != word and not (text.isdecimal() and len(text) < 10 and int(text) >= least):
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a value of this flag; give {word}, or a number of at least {least}"
            )
        return text if text == word else int(text)

    return convert


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number of 0 or more."""
    return _whole(text, 0)


def seed(text: str) -> int:
    """A seed that every generator takes: 0 to 2^32 - 1."""
    value = _whole(text, 0)
    if value >= 1 << 32:
        raise argparse.ArgumentTypeError(
            f"{text} is too large for a seed; give 0 to {(1 << 32) - 1}"
        )
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 0 to 1")
    return value


def _whole(text: str, least: int) -> int:
    # 18 digits are more than any count has; Python itself refuses to convert thousands of digits.
    if not text.removeprefix("-").isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number")
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is too small; give {least} or more")
    return int(text)


def key_value(text: str) -> tuple[str, Any]:
    """A word of open_clip's `--aug-cfg`: `scale=(0.6,1.0)` is ("scale", (0.6, 1.0)); a value that is not Python is a string."""
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


# ---------------------------------------------------------------------------------------------------------------------
# Parsers and checks
# ---------------------------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser, sections: Sequence[type]) -> None:
    """Add the flags of some sections, one group each."""
    for section in sections:
        group = parser.add_argument_group((section.__doc__ or "").strip())
        for each in flags_of(section):
            if each.switch is not None:
                group.add_argument(each.switch.option, action="store_true", help=each.switch.help)
            add_flag(group, each)


def add_flag(group: argparse._ActionsContainer, each: Flag) -> None:
    """Add a flag; one without a default (`dataclasses.MISSING`) is required."""
    default = each.default
    help_text = each.help.replace("%(default)s", str(each.default))
    if (
        help_text
        and "default" not in help_text
        and isinstance(each.default, (int, float, str))
        and each.kind is not bool
    ):
        help_text += f" (default {each.default})"
    options: dict[str, Any] = {"help": help_text or None, "default": default, "dest": each.name}
    if default is dataclasses.MISSING:
        options |= {"default": None, "required": True}
    if each.kind is bool:
        group.add_argument(
            each.option, action="store_false" if each.default else "store_true", **options
        )
        return
    if each.several:
        options |= {"action": "append", "default": [] if default == () else options["default"]}
    metavar = each.metavar or (
        None if each.choices else each.option.strip("-").replace("-", "_").upper()
    )
    group.add_argument(
        each.option,
        type=each.kind,
        choices=each.choices,
        metavar=metavar,
        nargs=each.nargs,
        **options,
    )


def settings_from(section: type[Settings], parsed: argparse.Namespace, **more: Any) -> Settings:
    """The settings whose flags a parser has read; `more` are further fields, by name."""
    declared: Any = section
    values = {
        each.name: getattr(parsed, each.name)
        for each in flags_of(declared)
        if hasattr(parsed, each.name)
    }
    for each in flags_of(declared):
        if each.kind is key_value and each.name in values:
            values[each.name] = dict(values[each.name])
        elif isinstance(values.get(each.name), list):
            values[each.name] = tuple(values[each.name])
    return section(**{**values, **more})


def out_of_range(given: Any) -> Iterator[str]:
    """One sentence for each value that is out of its flag's range."""
    section: Any = type(given)
    for each in flags_of(section):
        value = getattr(given, each.name)
        if value is not None and each.range is not None and not each.range.holds(value, given):
            yield f"{each.option} {value} is out of range; give {each.range.wanted.format_map(Values(given))}"


def conflicts(given: Any, names: Iterable[str] | None = None) -> Iterator[str]:
    """One sentence for each flag that was given without one that it needs, or with one that it contradicts.

    Args:
        given: all flags' values.
        names: names of the flags to check; None: all that `given` declares.
    """
    section: Any = type(given)
    for each in flags_of(section):
        value = getattr(given, each.name)
        if value == each.default or (names is not None and each.name not in names):
            continue
        for need in each.needs:
            if not need.met(given):
                yield f"{need.flag or each.given_as(value)} needs {need.other}"
        for contradiction in each.contradicts:
            if contradiction.when(given):
                other = contradiction.other.format_map(Values(given))
                yield f"{other} does not work with {contradiction.flag or each.option}: {contradiction.advice}"


class Values(dict):
    """Values of flags by name, for `str.format_map`."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self._given = given

    def __missing__(self, name: str) -> Any:
        return getattr(self._given, name)
