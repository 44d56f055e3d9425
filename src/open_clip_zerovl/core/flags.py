"""Flags declared as fields of dataclasses: how they are added to a parser, and checked.

dga_steps: int = flag(1, "K micro-batches make one effective batch", metavar="K", range=at_least(1))
# --dga-steps K, an int, 1 if it is not given, refused below 1
"""

from __future__ import annotations

import argparse
import dataclasses
import keyword
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar

from open_clip_zerovl.core.errors import UserError

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
    """Make the range of `low` or more, with a unit for its words."""
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
        kind: converts a word to the value; bool is a switch, which takes the value back where the default is True.
        several: the flag may be given several times; its value is a sorted tuple without repetition.
        option: its form on a command line.
        nargs: argparse's.
    """

    name: str
    default: Any
    kind: Callable[[str], Any]
    several: bool
    option: str
    help: str = ""
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    nargs: str | None = None
    range: Range | None = None
    needs: tuple[Requirement, ...] = ()
    contradicts: tuple[Contradiction, ...] = ()
    switch: Switch | None = None

    @property
    def keyword(self) -> str:
        """Name it as an argument of a Python function: `--test-share` is `test_share`, `--from` is `from_`."""
        name = self.option.removeprefix("--").replace("-", "_")
        return f"{name}_" if keyword.iskeyword(name) else name


def flag(default: Any, help: str = "", **declared: Any) -> Any:
    """Declare a flag as a field of a dataclass.

    Args:
        default: the field's.
        declared: further attributes of `Flag` in place of those that follow from the field's name and type.
    """
    return field(default=default, metadata={"flag": {"help": help, **declared}})


def redeclared(section: type, name: str, default: Any) -> Any:
    """Declare the flag `name` of a section as a field of a subclass with another default."""
    return field(default=default, metadata=section.__dataclass_fields__[name].metadata)  # type: ignore[attr-defined]


@cache
def flags_of(section: type) -> tuple[Flag, ...]:
    """List the flags that a dataclass declares or inherits, in order."""
    hints = typing.get_type_hints(section)
    return tuple(
        flag_of(
            each.name,
            hints[each.name],
            each.default,
            each.metadata["flag"],
        )
        for each in fields(section)
        if "flag" in each.metadata
    )


def flag_of(name: str, hint: Any, default: Any, declared: Mapping[str, Any]) -> Flag:
    """Make a flag of a name, a type, a default and the options of `flag`."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = typing.get_args(hint) if union else (hint,)
    kind = next(kind for kind in kinds if kind is not type(None))
    words, origin = typing.get_args(kind), typing.get_origin(kind)
    inferred: dict[str, Any] = {
        "several": origin is tuple and words[-1] is ... and "nargs" not in declared,
        "option": "--" + name.rstrip("_").replace("_", "-"),
        "choices": words if origin is typing.Literal else None,
        "kind": {tuple: words[0] if words else str, typing.Literal: str}.get(origin, kind),
    }
    return Flag(name, default, **{**inferred, **declared})


# ---------------------------------------------------------------------------------------------------------------------
# Types of values
# ---------------------------------------------------------------------------------------------------------------------


def whole(least: int, most: int = 10**18, word: str | None = None) -> Callable[[str], Any]:
    """Make the type of a flag whose value is a whole number from `least` to `most`, or a word that stands for another one."""
    wanted = f"from {least} on" if most == 10**18 else f"from {least} to {most}"

    def convert(text: str) -> Any:
        if text == word:
            return text
        # Python itself refuses to convert thousands of digits.
        number = int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not {word + ' or ' if word else ''}a whole number {wanted}"
            )
        return number

    return convert


positive, natural = whole(1), whole(0)
seed = whole(0, 2**32 - 1)  # which every generator takes


def share(text: str) -> float:
    """Convert a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 0 to 1")
    return value


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
    """Add a flag, a required one if it has no default (`dataclasses.MISSING`)."""
    required = each.default is dataclasses.MISSING
    help_text = each.help.replace("%(default)s", str(each.default))
    shown = isinstance(each.default, (int, float, str)) and each.kind is not bool
    if help_text and "default" not in help_text and shown:
        help_text += f" (default {each.default})"
    options: dict[str, Any] = {"help": help_text or None, "dest": each.name, "required": required}
    options["default"] = None if required else each.default
    if each.kind is bool:
        action = "store_false" if each.default else "store_true"
        group.add_argument(each.option, action=action, **options)
        return
    if each.several:
        options |= {"action": "append", "default": [] if each.default == () else options["default"]}
    metavar = each.metavar
    if metavar is None and not each.choices:
        metavar = each.option.strip("-").replace("-", "_").upper()
    options |= {"type": each.kind, "choices": each.choices, "metavar": metavar, "nargs": each.nargs}
    group.add_argument(each.option, **options)


def settings_from(section: type[Settings], parsed: argparse.Namespace) -> Settings:
    """Make the settings whose flags a parser has read.

    Raises:
        UserError: a value out of its flag's range.
    """
    declared: Any = section
    values = {each.name: getattr(parsed, each.name) for each in flags_of(declared)}
    settings = section(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
    )
    for sentence in out_of_range(settings):
        raise UserError(sentence)
    return settings


def out_of_range(given: Any) -> Iterator[str]:
    """Yield one sentence for each value that is out of its flag's range."""
    section: Any = type(given)
    for each in flags_of(section):
        value = getattr(given, each.name)
        if value is not None and each.range is not None and not each.range.holds(value, given):
            yield f"{each.option} {value} is out of range; give {each.range.wanted.format_map(Values(given))}"


def conflicts(given: Any, names: Iterable[str] | None = None) -> Iterator[str]:
    """Yield one sentence for each flag that was given without one that it needs, or with one that it contradicts.

    Args:
        given: all flags' values.
        names: names of the flags to check; None: all that `given` declares.
    """
    section: Any = type(given)
    for each in flags_of(section):
        value = getattr(given, each.name)
        if value == each.default or (names is not None and each.name not in names):
            continue
        option = each.option
        if each.switch is not None and each.switch.value == value:
            option = each.switch.option
        for need in each.needs:
            if not need.met(given):
                yield f"{need.flag or option} needs {need.other}"
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
