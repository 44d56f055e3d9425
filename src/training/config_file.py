"""`--config FILE`: flags of training from a YAML file, or from the params.txt of an earlier run.

    lr: 1e-4                  # run.yaml: the flags' names; a switch is true, several values are a list
    debiased-sampling: true

Its flags come before those of the command line, which therefore win.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import reading

FLAG = "--config"
# Entries of params.txt that are a run's state, or that other entries bring.
_OF_A_RUN = ("resume", "force_patch_dropout", "device")


def with_config(words: Sequence[str], parsers: Sequence[argparse.ArgumentParser]) -> list[str]:
    """A command line with the flags of its `--config FILE` in front; without that flag the line as it is.

    Raises:
        UserError: a file that is no table of flags.
    """
    given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument(FLAG, type=Path)
    config_arguments, rest = given.parse_known_args(list(words))
    if config_arguments.config is None:
        return list(words)
    of_a_run = config_arguments.config.suffix == ".txt"
    settings = _params(config_arguments.config) if of_a_run else _yaml(config_arguments.config)
    actions = {}
    for action in chain.from_iterable(parser._actions for parser in parsers):
        for name in (*action.option_strings, action.dest):
            actions[name.removeprefix("--").replace("-", "_")] = action
    front: list[str] = []
    for key, value in settings.items():
        name = key.removeprefix("--").replace("-", "_")
        if name in actions:
            front += _words_of(actions[name], value)
        elif not of_a_run:  # the parser refuses it
            front.append(f"--{name.replace('_', '-')}")
    return [*front, *rest]


def _yaml(file: Path) -> Mapping[str, Any]:
    import yaml

    with reading(f"{FLAG} {file}", "write lines such as `lr: 1e-4`"):
        settings = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader)  # "1e-4" stays text
    if not isinstance(settings, dict):
        raise UserError(f"{FLAG} {file} is not a table of flags; write lines such as `lr: 1e-4`")
    return settings


def _params(file: Path) -> Mapping[str, Any]:
    """The entries of a params.txt that are not None; values are Python literals, else text."""
    lines = (line.partition(": ") for line in file.read_text(encoding="utf-8").splitlines())
    settings = {name: _literal(text) for name, colon, text in lines if colon}
    return {
        name: value
        for name, value in settings.items()
        if value is not None and name not in _OF_A_RUN
    }


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _words_of(action: argparse.Action, value: Any) -> list[str]:
    """The command line's words for a flag and its value."""
    option = action.option_strings[-1]
    if action.nargs == 0:
        is_on = str(value).lower() == "true"
        return [option] if is_on != action.default else []
    if isinstance(value, Mapping):  # --aug-cfg
        value = [f"{key}={part}" for key, part in value.items()]
    if not isinstance(value, list | tuple):
        return [f"{option}={value}"]
    if isinstance(action, argparse._AppendAction):
        return [f"{option}={part}" for part in value]
    return [option, *map(str, value)] if value else []
