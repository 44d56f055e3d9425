"""Lines of open_clip's releases on which this package runs.

A line is the releases whose training program has the same names. One version of each line was read and tested; another of the
same line is taken when its names are as expected (`training.hooks` looks), with a warning.
"""

from __future__ import annotations

import gc
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.version import Version

from open_clip_zerovl.core.errors import UserError

INSTALL = "pip install 'open_clip_torch>=3.3,<3.4'"


@dataclass(frozen=True)
class ReleaseLine:
    """A line of open_clip releases.

    Attributes:
        name: "3.3.x", the beginning of its releases' versions.
        read: the version that was read, and on which the tests run.
        tested: `read` in words: "3.3.0", "main of 27 June 2026 (4.2.0.dev0)".
        optimizers: values of `--opt` besides timm/NAME.
        reports: values of `--report-to`.
    """

    name: str
    read: str
    tested: str
    optimizers: tuple[str, ...]
    reports: tuple[str, ...]

    def holds(self, version: str) -> bool:
        """Return whether a version belongs to the line."""
        return version.startswith(self.name.removesuffix("x"))

    def untested(self, version: str) -> str | None:
        """Warn of a version that the tests were not run on.

        Returns:
            None for the tested version. A development version is not the release of its number.
        """
        if Version(version) == Version(self.read):
            return None
        return (
            f"not tested with open_clip_torch {version}: tested with {' and '.join(line.tested for line in LINES)}; "
            "docs/open_clip.md lists what changed since, and runs the tests on another version"
        )


OPENCLIP_V3 = ReleaseLine(
    "3.3.x", "3.3.0", "3.3.0", optimizers=("adamw",), reports=("tensorboard", "wandb", "all"),
)  # fmt: skip
OPENCLIP_V4 = ReleaseLine(
    "4.x", "4.2.0.dev0", "main of 27 June 2026 (4.2.0.dev0)", optimizers=("adamw", "nadamw"),
    reports=("tensorboard", "wandb", "trackio", "all"),
)  # fmt: skip
LINES = (OPENCLIP_V3, OPENCLIP_V4)


def supported() -> str:
    """Describe the lines with the versions that they were tested with."""
    return "; ".join(f"{line.name}, tested with {line.tested}" for line in LINES)


def line_of(version: str) -> ReleaseLine:
    """Return the line that a version belongs to.

    Raises:
        UserError: a version of no line.
    """
    for line in LINES:
        if line.holds(version):
            return line
    names = " and ".join(line.name for line in LINES)
    raise UserError(f"open_clip_torch {version} is not supported, {names} are; {INSTALL}")


def version_here() -> str | None:
    """Read the version of the open_clip that would be imported from its file, since its import takes seconds.

    Returns:
        None where there is no open_clip.
    """
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
    """Return the line of the open_clip that would be imported.

    Returns:
        3.3 for a version of no line, which is refused at its import.
    """
    version = version_here() or ""
    return next((line for line in LINES if line.holds(version)), OPENCLIP_V3)


def load_open_clip() -> None:
    """Import torch and open_clip in a program that has not done so, without searching for garbage (see `uncollected`)."""
    if "open_clip" not in sys.modules:
        with uncollected():
            importlib.import_module("open_clip")


@contextmanager
def uncollected() -> Iterator[None]:
    """Import large packages in the block without garbage collection, which takes a fifth of the CPU time of `import open_clip`.

    The collector would search the 400,000 objects of the modules again and again. Those stay until the process ends, so that
    later collections leave them out, too. For programs: memory that the caller made before is not collected either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
