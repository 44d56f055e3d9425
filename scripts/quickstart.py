"""Run the commands of docs/quickstart.md as they stand, and put their output into the page.

    python -m scripts.quickstart [--folder build/quickstart] [--write]

A line of the page that begins with `$ ` is a command. The lines below it, up to the next command or the end of the block, are
lines of its output: each must be printed, in this order, with any numbers; `...` stands for lines that the page leaves out.
`--write` puts the printed lines into the page.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated as A

from open_clip_zerovl.core.errors import UserError
from scripts.program import program

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "quickstart.md"


@dataclass
class Command:
    """A command of the page, and the numbers of the page's lines that show its output."""

    words: str
    shown: list[int] = field(default_factory=list)


def commands_of(lines: Sequence[str]) -> list[Command]:
    """Find the page's commands in their order."""
    found: list[Command] = []
    in_block = in_command = False
    for number, line in enumerate(lines):
        if line.startswith("```"):
            in_block, in_command = not in_block, False
        elif in_block and line.startswith("$ "):
            found.append(Command(line[2:]))
            in_command = True
        elif in_command and found[-1].words.endswith("\\") and not found[-1].shown:
            found[-1].words += f"\n{line}"
        elif in_command and line != "...":
            found[-1].shown.append(number)
    return found


def output_of(command: str, folder: Path) -> list[str]:
    """Return the lines that a shell command prints, without the log's times.

    Raises:
        UserError: it failed.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path, "PYTHONPATH": paths}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    text = re.sub(r"\x1b\[\w|\d{4}-\d\d-\d\d,[\d:]+ \| \w+ \| ", "", done.stdout)
    if done.returncode:
        print(text)
        raise UserError(f"this command ended with status {done.returncode}: {command}")
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def wordy(line: str) -> str:
    """Return a line without its numbers and the widths of its columns."""
    return re.sub(r"\s+", " ", re.sub(r"[+-]?\d[\d,.]*", "#", line)).strip()


def printed_again(shown: Iterable[str], printed: Sequence[str]) -> list[str]:
    """Find the printed line for each shown one.

    Raises:
        UserError: a shown line was not printed after the one before it.
    """
    found, place = [], 0
    for line in shown:
        begin = wordy(line.removesuffix(" ..."))
        cut = line.endswith(" ...")
        fits = (
            n
            for n in range(place, len(printed))
            if wordy(printed[n])[: len(begin) if cut else None] == begin
        )
        place = next(fits, -1) + 1
        if not place:
            print("Printed:", *printed, sep="\n")
            raise UserError(f"this line of the page was not printed: {line}")
        found.append(f"{printed[place - 1][: len(line) - 4]} ..." if cut else printed[place - 1])
    return found


def run(page: Path, folder: Path, instead: Mapping[str, str]) -> str:
    """Run a page's commands in a folder, and return the page with the printed output.

    Args:
        instead: texts of the page -> texts that replace them, in commands and outputs.

    Raises:
        UserError: a command failed, or its output differs from the page.
    """
    text = page.read_text(encoding="utf-8")
    for old, new in instead.items():
        text = text.replace(old, new)
    lines = text.split("\n")
    for command in commands_of(lines):
        print(f"$ {command.words}", flush=True)
        printed = output_of(command.words, folder)
        again = printed_again([lines[n] for n in command.shown], printed)
        for number, line in zip(command.shown, again, strict=True):
            lines[number] = line
    return "\n".join(lines)


def quickstart(
    *,
    folder: A[Path, "new or empty"] = ROOT / "build" / "quickstart",
    write: A[bool, "put the output into the page"] = False,
) -> None:
    """Run the page's commands in a folder, and compare their output with the page."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; give another --folder")
    page = run(PAGE, folder, {})
    if write:
        PAGE.write_text(page, encoding="utf-8")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    print(f"Every command printed the output that the page shows; {seconds:.0f} s of CPU time")


if __name__ == "__main__":
    sys.exit(program(quickstart))
