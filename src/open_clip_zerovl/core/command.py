"""A function as a command: its parameters are the flags, and `Annotated` adds a help text, a metavar and a converter.

    @command
    def check(folder: Annotated[Path, "a folder of shards", "DIR"], /, *, threads: Annotated[int, "at once", positive] = 4):
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
import os
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar

from open_clip_zerovl.core.errors import UserError, argparse_sentence
from open_clip_zerovl.core.flags import Flag, add_flag, flag_of, flags_of, settings_from

Result = TypeVar("Result")


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
        if callable(note):
            declared["kind"] = note
    default = dataclasses.MISSING if each.default is each.empty else each.default
    return Parameter(each.name, each.kind, (flag_of(each.name, hint, default, declared),))


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, with the nearest flag for an unknown one.

    It takes no abbreviations of flags: a shortened flag may come to mean another one.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.help_command = f"{self.prog} --help"

    def parse_args(self, args=None, namespace=None):
        """Parse as argparse does, and name a misspelt flag before a required one that it may stand for."""
        self._words = list(args or ())
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Word argparse's message as one sentence.

        Raises:
            UserError: always.
        """
        if "are required: " in message:
            flags = [word.partition("=")[0] for word in self._words if word.startswith("--")]
            unknown = [flag for flag in flags if flag not in self._option_string_actions]
            if unknown:
                message = f"unrecognized arguments: {unknown[0]}"
        raise UserError(argparse_sentence(message, self._option_string_actions, self.help_command))


def make_parser(function: Callable[..., Any], prog: str) -> Parser:
    """Make the parser of a command, whose help begins with the function's docstring."""
    # Without the sections of a docstring, which are for Python.
    text = re.split(r"\n\n(?=\w+:\n)", inspect.getdoc(function) or "")[0]
    parser = Parser(prog=prog, description=text)
    add_parameters(parser, function)
    return parser


def add_parameters(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Add the parameters of a command to a parser."""
    groups: dict[str | None, Any] = {None: parser}
    for each in parameters_of(function):
        if each.positional:
            _add_words(parser, each)
            continue
        if each.title not in groups:
            groups[each.title] = parser.add_argument_group(each.title)
        for declared in each.flags:
            add_flag(groups[each.title], declared)


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
        if each.section is not None:
            keywords[each.name] = settings_from(each.section, parsed)
            continue
        value = getattr(parsed, each.name)
        if each.kind is inspect.Parameter.VAR_POSITIONAL:
            words += value
        elif each.positional:
            words.append(value)
        else:
            keywords[each.name] = tuple(value) if isinstance(value, list) else value
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
