"""Flags: the parameters of a command, or the fields of a dataclass; how a parser reads them, and how they are checked.

    dga_steps: int = flag(1, "K micro-batches make one effective batch", metavar="K", range=at_least(1))

--dga-steps K, an int, 1 if it is not given, refused below 1. A command is a function whose `Annotated` parameters have a help
text, a metavar and a range:

    @command
    def check(folder: Annotated[Path, "a folder of shards", "DIR"], /, *, threads: Annotated[int, "at once", at_least(1)] = 4):
        ...

    zerovl data check DIR --threads 4        check("DIR", threads=4)

A keyword parameter whose type is a dataclass with flags stands for these flags; its help text is the title of their group.
A call from Python is made into the words of the command line, and read by the same parser.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import keyword
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NoReturn, TypeVar

from open_clip_zerovl.core.errors import UserError, argparse_sentence

Result = TypeVar("Result")

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
FROM_0_TO_1 = Range("a share from 0 to 1", lambda value, _: 0 <= value <= 1)
NOT_NEGATIVE = Range("0 or more", lambda value, _: value >= 0)
POSITIVE = Range("a positive number", lambda value, _: value > 0)
SEED = Range("0 to 4294967295", lambda value, _: 0 <= value < 2**32)  # which every generator takes


@dataclass(frozen=True)
class Rule:
    """A combination of flags that is refused: "--mixup-alpha needs --coin-flip-mixup".

    Attributes:
        sentence: why; `{name}` is replaced by another flag's value, `{option}` by the flag that has the rule.
        broken: all flags' values -> whether they are such a combination.
    """

    sentence: str
    broken: Callable[[Any], bool]


@dataclass(frozen=True)
class Flag:
    """One flag, as declared by a field.

    Attributes:
        name: the field's name.
        kind: converts a word to the value; bool is a switch, which takes the value back where the default is True.
        several: the flag may be given several times; its value is a sorted tuple without repetition.
        option: its form on a command line.
        nargs: argparse's.
        rules: are checked where the flag is given.
        switch: an option that stands for one value, that value, and the option's help text.
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
    rules: tuple[Rule, ...] = ()
    switch: tuple[str, str, str] | None = None

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


def number_or(word: str) -> Callable[[str], int | str]:
    """Make the type of a flag whose value is a whole number, or a word."""

    def number(text: str) -> int | str:
        return text if text == word else int(text)

    number.__name__ = f"{word}-or-number"  # argparse says "invalid auto-or-number value"
    return number


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
# Parsers and checks
# ---------------------------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser, sections: Sequence[type]) -> None:
    """Add the flags of some sections, one group each."""
    for section in sections:
        group = parser.add_argument_group((section.__doc__ or "").strip())
        for each in flags_of(section):
            if each.switch is None:
                add_flag(group, each)
                continue
            option, value, text = each.switch
            one_of = group.add_mutually_exclusive_group()
            one_of.add_argument(
                option, action="store_const", const=value, dest=each.name, help=text
            )
            add_flag(one_of, each)


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


def out_of_range(flags: Iterable[Flag], given: Any) -> Iterator[str]:
    """Yield one sentence for each value that is out of its flag's range.

    Args:
        given: has the values of all flags as attributes. A default may lie out of its range.
    """
    for each in flags:
        value = getattr(given, each.name)
        if each.range is None or value is None or value == each.default:
            continue
        if not each.range.holds(value, given):
            wanted = each.range.wanted.format_map(vars(given))
            yield f"{each.option} {value} is out of range; give {wanted}"


def conflicts(given: Any, names: Iterable[str] | None = None) -> Iterator[str]:
    """Yield one sentence for each broken rule of a flag that was given.

    Args:
        given: all flags' values.
        names: names of the flags to check; None: all that `given` declares.
    """
    section: Any = type(given)
    for each in flags_of(section):
        value = getattr(given, each.name)
        if value == each.default or (names is not None and each.name not in names):
            continue
        words = {**vars(given), "option": each.option}
        for rule in each.rules:
            if rule.broken(given):
                yield rule.sentence.format_map(words)


# ---------------------------------------------------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """A parameter of a command.

    Attributes:
        kind: inspect's: positional or keyword.
        flags: the flags that it stands for; of a positional parameter the declaration of its words.
        section: the dataclass of the flags; None for a parameter that is one flag.
    """

    name: str
    kind: Any
    flags: tuple[Flag, ...]
    section: type | None = None
    title: str | None = None

    @property
    def positional(self) -> bool:
        """Return whether it stands for words without a flag."""
        return self.kind is not inspect.Parameter.KEYWORD_ONLY


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Describe the parameters of a command."""
    plain = inspect.unwrap(function)
    hints = inspect.get_annotations(plain, eval_str=True)
    return tuple(
        _parameter(each, hints[each.name]) for each in inspect.signature(plain).parameters.values()
    )


def _parameter(each: inspect.Parameter, hint: Any) -> Parameter:
    hint, *notes = typing.get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    texts = [note for note in notes if isinstance(note, str)]
    if dataclasses.is_dataclass(hint):
        return Parameter(each.name, each.kind, flags_of(hint), hint, *texts)  # type: ignore[arg-type]
    declared: dict[str, Any] = dict(zip(("help", "metavar"), texts, strict=False))
    for note in notes:
        if isinstance(note, Range):
            declared["range"] = note
    default = dataclasses.MISSING if each.default is each.empty else each.default
    return Parameter(each.name, each.kind, (flag_of(each.name, hint, default, declared),))


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, with the nearest flag for an unknown one.

    It takes no abbreviations of flags: a shortened flag may come to mean another one.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.help_command = f"{self.prog} --help"
        self.flags: list[Flag] = []

    def parse_args(self, args=None, namespace=None):
        """Parse as argparse does, and check ranges.

        Raises:
            UserError: a value out of its flag's range.
        """
        parsed = super().parse_args(args, namespace)
        for sentence in out_of_range(self.flags, parsed):
            raise UserError(sentence)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Word argparse's message as one sentence.

        Raises:
            UserError: always.
        """
        raise UserError(argparse_sentence(message, self._option_string_actions, self.help_command))


def make_parser(function: Callable[..., Any], prog: str) -> Parser:
    """Make the parser of a command, whose help begins with the function's docstring."""
    # Without the sections of a docstring, which are for Python.
    text = re.split(r"\n\n(?=\w+:\n)", inspect.getdoc(function) or "")[0]
    parser = Parser(prog=prog, description=text)
    groups: dict[str | None, Any] = {None: parser}
    for each in parameters_of(function):
        if each.positional:
            _add_words(parser, each)
            continue
        if each.title not in groups:
            groups[each.title] = parser.add_argument_group(each.title)
        for declared in each.flags:
            add_flag(groups[each.title], declared)
        parser.flags += each.flags
    return parser


def _add_words(parser: argparse.ArgumentParser, each: Parameter) -> None:
    (words,) = each.flags
    optional = words.default is not dataclasses.MISSING
    count: str | None = "*" if optional else "+"
    if not words.several and each.kind is inspect.Parameter.POSITIONAL_ONLY:
        count = "?" if optional else None
    parser.add_argument(
        each.name,
        type=words.kind,
        metavar=words.metavar,
        help=words.help,
        choices=words.choices,
        nargs=count,
        default=words.default if optional else None,
    )


def run(function: Callable[..., Any], parsed: argparse.Namespace) -> Any:
    """Call a command with the words that its parser has read."""
    words: list[Any] = []
    keywords: dict[str, Any] = {}
    for each in parameters_of(function):
        values = {declared.name: getattr(parsed, declared.name) for declared in each.flags}
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        if each.section is not None:
            keywords[each.name] = each.section(**values)
        elif each.kind is inspect.Parameter.VAR_POSITIONAL:
            words += values[each.name]
        elif each.positional:
            words.append(values[each.name])
        else:
            keywords |= values
    return inspect.unwrap(function)(*words, **keywords)


def command(function: Callable[..., Result]) -> Callable[..., Result]:
    """Let a function be called with its flags as keywords.

    Raises:
        UserError: an unknown flag, or a value that the flag refuses.
    """
    flags = [
        each
        for parameter in parameters_of(function)
        if not parameter.positional
        for each in parameter.flags
    ]
    repeated = {each.option for each in flags if each.several}
    joined = repeated.union(each.option for each in flags if each.nargs is None)

    @functools.wraps(function)
    def call(*words: Any, **given: Any) -> Any:
        parser = make_parser(function, function.__name__)
        parser.help_command = f"help({function.__name__})"
        line = words_of(given, repeated, joined)
        line += ["--", *map(as_word, words)] if words else []
        return run(function, parser.parse_args(line))

    keywords = [
        inspect.Parameter(each.keyword, inspect.Parameter.KEYWORD_ONLY, default=each.default)
        for each in flags
    ]
    signature = inspect.signature(function)
    words = [signature.parameters[each.name] for each in parameters_of(function) if each.positional]
    call.__signature__ = signature.replace(parameters=[*words, *keywords])  # type: ignore[attr-defined]
    return call


def words_of(
    flags: Mapping[str, Any], repeated: Collection[str], joined: Collection[str] = ()
) -> list[str]:
    """Write keyword arguments as the words of a command line.

    Args:
        repeated: options that are given once for each of several values.
        joined: other options that take several values as one word, with commas. The rest take all values after one.
    """
    line: list[str] = []
    for name, value in flags.items():
        option = "--" + name.removesuffix("_").replace("_", "-")
        if isinstance(value, Mapping):
            value = [
                key if each is True else f"{key}={as_word(each)}" for key, each in value.items()
            ]
        if value is None or value is False:
            continue
        if value is True:
            line.append(option)
        elif not isinstance(value, (list, tuple)):
            line.append(f"{option}={as_word(value)}")
        elif option in repeated:
            line += [f"{option}={as_word(each)}" for each in value]
        elif option in joined:
            line.append(f"{option}={','.join(map(as_word, value))}")
        elif value:
            line += [option, *map(as_word, value)]
    return line


def as_word(value: Any) -> str:
    """Write a value as a word of a command line."""
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
