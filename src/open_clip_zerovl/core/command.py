"""A function as a command: its parameters are the flags, and `Annotated` adds a help text, a metavar and a converter.

    @command
    def check(folder: Annotated[Path, "a folder of shards", "DIR"], /, *, threads: Annotated[int, "at once", positive] = 4):
        ...

    zerovl data check DIR --threads 4        check("DIR", threads=4)

A keyword parameter whose type is a dataclass with flags stands for these flags; its help text is the title of their group.
Values from Python are converted and refused as words of a command line are.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import os
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from open_clip_zerovl.core.errors import UserError, argparse_sentence
from open_clip_zerovl.core.flags import Flag, add_flag, flag, flag_of, flags_of, settings_from

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
        """True for words without a flag."""
        return self.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Describe the parameters of a command."""
    plain = inspect.unwrap(function)
    hints = typing.get_type_hints(plain, include_extras=True)
    return tuple(
        _parameter(each, hints[each.name]) for each in inspect.signature(plain).parameters.values()
    )


def _parameter(each: inspect.Parameter, hint: Any) -> Parameter:
    hint, *notes = typing.get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    texts = [note for note in notes if isinstance(note, str)]
    if dataclasses.is_dataclass(hint):
        return Parameter(each.name, each.kind, flags_of(hint), hint, *texts)  # type: ignore[arg-type]
    options: dict[str, Any] = dict(zip(("help", "metavar"), texts, strict=False))
    options["kind"] = next((note for note in notes if callable(note)), None)
    default = dataclasses.MISSING if each.default is each.empty else each.default
    declared = flag(default, **options).metadata["flag"]
    return Parameter(each.name, each.kind, (flag_of(each.name, hint, default, declared),))


def add_parameters(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Add the parameters of a command to a parser."""
    groups: dict[str | None, Any] = {None: parser}
    for each in parameters_of(function):
        if each.positional:
            (words,) = each.flags
            optional = words.default is not dataclasses.MISSING
            count: str | None = "*" if optional else "+"
            if not words.several and each.kind is inspect.Parameter.POSITIONAL_ONLY:
                count = "?" if optional else None
            options: dict[str, Any] = {
                "nargs": count,
                "default": words.default if optional else None,
            }
            parser.add_argument(
                each.name, type=words.kind, metavar=words.metavar, help=words.help, **options
            )
            continue
        if each.title not in groups:
            groups[each.title] = parser.add_argument_group(each.title)
        for declared in each.flags:
            add_flag(groups[each.title], declared)


def run(function: Callable[..., Any], parsed: argparse.Namespace) -> Any:
    """Call a command with the words that its parser has read."""
    words: list[Any] = []
    for each in parameters_of(function):
        if each.kind is inspect.Parameter.VAR_POSITIONAL:
            words += getattr(parsed, each.name)
        elif each.positional:
            words.append(getattr(parsed, each.name))
    return _call(function, words, parsed)


def _call(function: Callable[..., Any], words: list[Any], values: argparse.Namespace) -> Any:
    keywords: dict[str, Any] = {}
    for each in parameters_of(function):
        if each.section is not None:
            keywords[each.name] = settings_from(each.section, values)
        elif not each.positional and hasattr(values, each.name):
            value = getattr(values, each.name)
            keywords[each.name] = tuple(value) if isinstance(value, list) else value
    return inspect.unwrap(function)(*words, **keywords)


def command(function: Callable[..., Result]) -> Callable[..., Result]:
    """Let a function be called with its flags as keywords.

    Raises:
        UserError: an unknown flag, or a value that the flag refuses.
    """
    flags = {
        each.keyword: each
        for parameter in parameters_of(function)
        if not parameter.positional
        for each in parameter.flags
    }

    @functools.wraps(function)
    def call(*words: Any, **given: Any) -> Any:
        values = argparse.Namespace()
        for name, value in given.items():
            if name not in flags:
                option = "--" + name.removesuffix("_").replace("_", "-")
                message = f"unrecognized arguments: {option}"
                known = [each.option for each in flags.values()]
                raise UserError(argparse_sentence(message, known, f"help({function.__name__})"))
            if value is not None and value is not False:
                setattr(values, flags[name].name, converted(flags[name], value))
        return _call(function, _positional(function, words), values)

    call.__signature__ = _flat_signature(function, flags)  # type: ignore[attr-defined]
    return call


def _flat_signature(function: Callable[..., Any], flags: Mapping[str, Flag]) -> inspect.Signature:
    """The signature that a person calls, with each flag by its keyword."""
    signature = inspect.signature(function)
    words = [signature.parameters[each.name] for each in parameters_of(function) if each.positional]
    keywords = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty
            if each.default is dataclasses.MISSING
            else each.default,
        )
        for name, each in flags.items()
    ]
    return signature.replace(parameters=[*words, *keywords])


def _positional(function: Callable[..., Any], words: tuple[Any, ...]) -> list[Any]:
    declared = [each.flags[0] for each in parameters_of(function) if each.positional]
    last = len(declared) - 1
    return (
        [converted(declared[min(number, last)], word) for number, word in enumerate(words)]
        if declared
        else [*words]
    )


def converted(each: Flag, value: Any) -> Any:
    """Convert a value from Python as a word of the command line is.

    Raises:
        UserError: the flag refuses it.
    """
    if each.kind is bool:
        return not each.default
    if isinstance(value, Mapping):
        value = as_words(value)
    if each.several or each.nargs is not None:
        many = value if isinstance(value, (list, tuple)) else [value]
        return tuple(
            converted(dataclasses.replace(each, several=False, nargs=None), item) for item in many
        )
    if not isinstance(value, (str, int, float, os.PathLike)):
        return value
    text = as_word(value)
    try:
        result = each.kind(text)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UserError(f"argument {each.option}: {error}") from error
    if each.choices is not None and result not in each.choices:
        raise UserError(
            f"argument {each.option}: invalid choice: {text!r} (choose from {', '.join(each.choices)})"
        )
    return result


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """Write a mapping as KEY=VALUE words, and KEY alone for True."""
    return [key if value is True else f"{key}={as_word(value)}" for key, value in settings.items()]


def as_word(value: Any) -> str:
    """Write a value as a word of a command line."""
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
