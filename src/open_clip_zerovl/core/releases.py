"""The releases of open_clip on which this package runs.

A line is the releases whose training program has the same names. One release of each line was read and tested; another of the
same line is taken when its names are as expected (`training.hooks` looks), with a warning.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from open_clip_zerovl.core.errors import UserError

INSTALL = "pip install 'open_clip_torch>=3.3,<3.4'"


@dataclass(frozen=True)
class ReleaseLine:
    """A line of open_clip releases.

    Attributes:
        name: "3.3.x".
        versions: the beginning of its releases' versions.
        read: the release that was read, and on which the tests run.
        released: whether the registry has it; if not, `read` is a state of open_clip's main branch.
        precision: the default of `--precision`.
        optimizers: values of `--opt` besides timm/NAME.
        reports: values of `--report-to`.
    """

    name: str
    versions: str
    read: str
    released: bool
    precision: str
    optimizers: tuple[str, ...]
    reports: tuple[str, ...]

    def untested(self, version: str) -> str | None:
        """The warning for a release of this line with another minor number than the tested one; None if it is the same."""
        if version.split(".")[:2] == self.read.split(".")[:2]:
            return None
        return (
            f"this package was not tested with open_clip_torch {version}, but with {self.read}; {INSTALL}, or run the tests "
            "on it (docs/open_clip.md)"
        )


OPENCLIP_V3 = ReleaseLine(
    "3.3.x", "3.3.", "3.3.0", released=True, precision="amp", optimizers=("adamw",),
    reports=("tensorboard", "wandb", "all"),
)  # fmt: skip
OPENCLIP_V4 = ReleaseLine(
    "4.x", "4.", "4.2.0.dev0", released=False, precision="amp_bf16", optimizers=("adamw", "nadamw"),
    reports=("tensorboard", "wandb", "trackio", "all"),
)  # fmt: skip
LINES = (OPENCLIP_V3, OPENCLIP_V4)


def supported() -> str:
    """The lines in words: "3.3.x; 4.x, tested at 4.2.0.dev0 of its main branch"."""
    return "; ".join(
        line.name if line.released else f"{line.name}, tested at {line.read} of its main branch"
        for line in LINES
    )


def line_of(version: str) -> ReleaseLine:
    """The line that a release belongs to.

    Raises:
        UserError: a release of no line.
    """
    for line in LINES:
        if version.startswith(line.versions):
            return line
    names = " and ".join(line.name for line in LINES)
    raise UserError(f"open_clip_torch {version} is not supported, {names} are; {INSTALL}")


def version_here() -> str | None:
    """The version of the open_clip that would be imported, read from its file, since its import takes seconds; or None."""
    spec = importlib.util.find_spec("open_clip")
    file = (
        Path(spec.origin).with_name("version.py")
        if spec is not None and spec.origin is not None
        else None
    )
    if file is None or not file.is_file():
        return None
    version = re.search(r"""__version__\s*=\s*["'](.+?)["']""", file.read_text(encoding="utf-8"))
    return None if version is None else version[1]


@cache
def line_here() -> ReleaseLine:
    """The line of the open_clip that would be imported; 3.3 if it is of none, which is refused at its import."""
    version = version_here() or ""
    return next((line for line in LINES if version.startswith(line.versions)), OPENCLIP_V3)
