"""The command line: our flags in a validated dataclass, open_clip's in its namespace.

`parse` passes every argument that is not ours to `open_clip_train.params.parse_args`, unchanged and in order. Nothing here
imports torch, so that `--help` and errors are printed at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, NoReturn

import open_clip_train.params as host_params

from open_clip_zerovl.core.errors import UserError, argparse_sentence
from open_clip_zerovl.core.flags import add_flags, flags_of
from open_clip_zerovl.data.names import is_named
from open_clip_zerovl.recipe.flags import SECTIONS, values_of
from training.config import RecipeConfig
from training.refusals import check


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, with the nearest flag for an unknown one."""

    def parse_args(self, args=None, namespace=None):
        """As argparse's, but a word that open_clip's KEY=VALUE flags raise about is told in a sentence."""
        try:
            return super().parse_args(args, namespace)
        except UserError:
            raise
        except (ValueError, SyntaxError) as error:
            flag = next((word for word in reversed(args or ()) if word in ("--aug-cfg", "--opt-kwargs")), "--aug-cfg")
            example = "betas='(0.9,0.98)'" if flag == "--opt-kwargs" else "scale='(0.6,1.0)'"
            raise UserError(f"{flag} is not understood ({error}); its words are KEY=VALUE, as in {example}") from error

    def error(self, message: str) -> NoReturn:
        known = [*self._option_string_actions, *build_parser()._option_string_actions]
        raise UserError(argparse_sentence(message, known, "python -m training.main --help"))


def build_parser() -> argparse.ArgumentParser:
    """The parser of our flags. It allows no abbreviations: `--lr` must stay open_clip's."""
    parser = Parser(
        prog="python -m training.main",
        description="open_clip's training program with the ZeroVL recipe. All flags of this page are off by default; "
        "without them the program is open_clip's own, bit for bit. open_clip's flags follow below.",
        allow_abbrev=False,
        add_help=False,
    )
    add_flags(parser, SECTIONS)
    return parser


def open_clip_parser() -> argparse.ArgumentParser:
    """open_clip's own parser, which its `parse_args` makes in each call."""
    with _made_by_open_clip() as made:
        host_params.parse_args([])
    return made[0]


@contextmanager
def _made_by_open_clip() -> Iterator[list[argparse.ArgumentParser]]:
    """Within the block open_clip's `parse_args` makes a `Parser`; those made are in the list."""
    made: list[argparse.ArgumentParser] = []

    def make() -> argparse.ArgumentParser:
        made.append(Parser(prog="python -m training.main"))
        return made[-1]

    host_params.argparse = SimpleNamespace(ArgumentParser=make)
    try:
        yield made
    finally:
        host_params.argparse = argparse


def _parse_open_clip(words: Sequence[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    try:
        with _made_by_open_clip() as made:
            return host_params.parse_args(list(words)), made[0]
    except UserError:
        raise
    except ValueError as error:  # what open_clip 4 refuses once the words are read
        raise UserError(str(error).rstrip(".")) from error


def flags_given(args: argparse.Namespace, config: RecipeConfig) -> dict[str, Any]:
    """The flags that are not at their defaults: name -> value, open_clip's first."""
    stock = {
        action.dest: getattr(args, action.dest)
        for action in open_clip_parser()._actions
        if hasattr(args, action.dest) and getattr(args, action.dest) != action.default
    }
    ours = {each.name: getattr(config, each.name) for each in flags_of(RecipeConfig)}
    return stock | {each.name: ours[each.name] for each in flags_of(RecipeConfig) if ours[each.name] != each.default}


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, RecipeConfig]:
    """Parse a command line into open_clip's namespace and our config.

    The namespace also holds our flags if any was given, so that open_clip writes them to params.txt.

    Raises:
        UserError: values out of range, or flags that contradict each other, named in one sentence.
    """
    parser = build_parser()
    if any(argument in ("-h", "--help") for argument in argv):
        parser.print_help()
        print("\nopen_clip's own flags (--train-data also takes named sources and folders, see above):\n")
        _parse_open_clip(["--help"])  # prints and exits
    ours, rest = parser.parse_known_args(list(argv)[list(argv)[:1] == ["--"] :])  # as under torchrun
    args, stock_parser = _parse_open_clip(rest)
    values = values_of(ours)
    if values["sampling"] is None and is_named(args.train_data):
        values["sampling"] = "random"
    if values["text_model"] and os.path.isdir(values["text_model"]):
        values["text_model"] = os.path.abspath(values["text_model"])  # params.txt is read from other folders, too
    if values["model_config"]:
        values["model_config"] = os.path.abspath(values["model_config"])
        args.model = _own_model(values["model_config"], args.model, stock_parser.get_default("model"))
    config = RecipeConfig(**values)
    check(config, args, stock_parser)
    if config.token_drop is not None:
        args.force_patch_dropout = config.token_drop
    if config.active:
        vars(args).update(asdict(config))
    return args, config


def _own_model(file: str, given: str, default: str) -> str:
    """The name of a model config's file, which is registered. UserError where `--model` names another."""
    from open_clip_zerovl.models.model_file import register_model_file

    name = register_model_file(file)
    if given not in (default, name):
        raise UserError(f"--model {given} and --model-config {file} are two models: give one of them")
    return name
