"""Training flags as a table, and the command line that they make. Imports nothing heavy.

{"lr": "1e-4", "pretrained-image": "", "wd": None}     --lr 1e-4 --pretrained-image
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from open_clip_zerovl.core.errors import UserError

# Name without dashes -> value; "" is a switch, None takes the flag away.
Settings = dict[str, "str | None"]

SEVERAL_VALUES = ("aug-cfg", "image-mean", "image-std")


def parse_settings(texts: Sequence[str]) -> Settings:
    """`--set` as flags: "a=1" sets a flag, "a" a switch, "a=" removes a flag."""
    settings: Settings = {}
    for text in texts:
        flag, separator, value = text.partition("=")
        settings[flag.removeprefix("--")] = value if value or not separator else None
    return settings


def settings_of(words: Sequence[str]) -> Settings:
    """A command line as flags: `--lr 1e-4 --aug-cfg a=1 b=2` is {"lr": "1e-4", "aug-cfg": "a=1 b=2"}.

    Raises:
        UserError: it does not begin with a flag.
    """
    values: dict[str, list[str]] = {}
    last: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.removeprefix("--").partition("=")
            last = values[flag] = [value] if equals else []
        elif last is None:
            raise UserError(f"{word!r} belongs to no flag; training flags begin with --")
        else:
            last.append(word)
    return {flag: shlex.join(own) if len(own) > 1 else "".join(own) for flag, own in values.items()}


def as_arguments(flags: Mapping[str, str | None]) -> list[str]:
    """The command line of flags."""
    arguments: list[str] = []
    for flag, value in flags.items():
        if value is not None:
            arguments += [f"--{flag}", *(shlex.split(value) if flag in SEVERAL_VALUES else [value] * bool(value))]
    return arguments
