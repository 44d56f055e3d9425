"""Training flags as a table, and the command line that they make. Imports nothing heavy.

{"lr": "1e-4", "pretrained-image": "", "wd": None}     --lr 1e-4 --pretrained-image
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from open_clip_zerovl.core.errors import UserError

# Name without dashes -> value; "" is a switch, None takes the flag away.
Settings = dict[str, "str | None"]

SEVERAL_VALUES = ("aug-cfg", "image-mean", "image-std")  # --image-mean 0.5 0.5 0.5
REPEATED = ("ablate", "freeze")  # --ablate NAME --ablate NAME


def parse_settings(texts: Sequence[str]) -> Settings:
    """Parse `--set` as flags: "a=1" sets a flag, "a" a switch, "a=" removes a flag."""
    settings: Settings = {}
    for text in texts:
        flag, separator, value = text.partition("=")
        settings[flag.removeprefix("--")] = value if value or not separator else None
    return settings


def settings_of(words: Sequence[str]) -> Settings:
    """Parse a command line as flags: `--lr 1e-4 --aug-cfg a=1 b=2` is {"lr": "1e-4", "aug-cfg": "a=1 b=2"}.

    Raises:
        UserError: it does not begin with a flag.
    """
    values: dict[str, list[str]] = {}
    last: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.removeprefix("--").partition("=")
            last = values[flag] = values.get(flag, []) if flag in REPEATED else []
            last += [value] if equals else []
        elif last is None:
            raise UserError(f"unexpected argument {word!r}; training flags begin with --")
        else:
            last.append(word)
    return {
        flag: shlex.join(parts) if len(parts) > 1 else "".join(parts)
        for flag, parts in values.items()
    }


def as_arguments(flags: Mapping[str, str | None]) -> list[str]:
    """Convert flags to the words of a command line."""
    arguments: list[str] = []
    for flag, value in flags.items():
        if value is not None and flag in REPEATED:
            for part in shlex.split(value):
                arguments += [f"--{flag}", part]
        elif value is not None:
            arguments += [
                f"--{flag}",
                *(shlex.split(value) if flag in SEVERAL_VALUES else [value] * bool(value)),
            ]
    return arguments
