"""Run the commands of docs/quickstart.md as they stand, and put their output into the page.

    python -m scripts.quickstart [--folder build/quickstart] [--write] [--instead "--epochs 10=--epochs 1"]

A line of the page that begins with `$ ` is a command. The lines below it, up to the next command or the end of the block, are
lines of its output: each must be printed, in this order, with any numbers; `...` stands for lines that the page leaves out.
`--write` puts the printed lines into the page, and draws the training's terminal in docs/figures/run.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import html
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "quickstart.md", ROOT / "docs" / "figures" / "run.svg"
COLUMNS = 110
WIDE = "\N{NO-BREAK SPACE}" * 2  # a picture would draw two spaces as one
# Lines of the training in the picture, by their beginning; of the progress line, which is drawn over, the last state.
DRAWN = (
    "model ",
    "data ",
    "batch ",
    "run ",
    "optimizer ",
    "epoch ",
    "Done",
    "Best",
    "Page",
    "Next",
)


@dataclass
class Command:
    """A command of the page, and the numbers of the page's lines that show its output."""

    words: str
    shown: list[int] = field(default_factory=list)


def commands_of(lines: Sequence[str]) -> list[Command]:
    """The page's commands in their order."""
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
    """Lines that a shell command prints on a terminal, without the log's times; each state of a progress line is one.

    Raises:
        SystemExit: it failed.
    """
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    child = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path, "PYTHONPATH": paths}, stdin=subprocess.DEVNULL,
        stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    content = b""
    with contextlib.suppress(
        OSError
    ):  # Linux reports a terminal that nobody writes to any more as an error
        while piece := os.read(ours, 1 << 16):
            content += piece
    os.close(ours)
    text = re.sub(r"\x1b\[\w|\d{4}-\d\d-\d\d,[\d:]+ \| \w+ \| ", "", content.decode())
    if child.wait():
        raise SystemExit(
            f"quickstart: this command ended with status {child.returncode}:\n{command}\n{text[-3000:]}"
        )
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def wordy(line: str) -> str:
    """A line without its numbers and the widths of its columns."""
    return re.sub(r"\s+", " ", re.sub(r"[+-]?\d[\d,.]*", "#", line)).strip()


def printed_again(shown: Iterable[str], printed: Sequence[str]) -> list[str]:
    """The printed line for each shown one.

    Raises:
        SystemExit: a shown line was not printed after the one before it.
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
            raise SystemExit(
                "\n".join(
                    [
                        f"quickstart: this line of the page was not printed: {line}",
                        "Printed:",
                        *printed,
                    ]
                )
            )
        found.append(f"{printed[place - 1][: len(line) - 4]} ..." if cut else printed[place - 1])
    return found


def terminal_svg(lines: Iterable[str]) -> str:
    """A picture of lines on a terminal; lines that are too long are wrapped."""
    rows = [row for line in lines for row in textwrap.wrap(line, COLUMNS, subsequent_indent="  ")]
    texts = [
        f'<text x="20" y="{28 + 18 * number}">{html.escape(row.replace("  ", WIDE))}</text>'
        for number, row in enumerate(rows)
    ]
    size = f'{7.3 * COLUMNS + 40:g}" height="{18 * len(rows) + 24}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{size} font-family="monospace" font-size="12">'
    return "\n".join(
        [
            head,
            f'<rect width="{size} rx="8" fill="#263238"/>',
            '<g fill="#eceff1">',
            *texts,
            "</g></svg>\n",
        ]
    )


def picture_of(command: str, printed: Sequence[str]) -> str:
    """The training's terminal: the command's first line, and the last of the printed lines with each beginning in `DRAWN`."""
    chosen = {max(n for n, line in enumerate(printed) if line.startswith(begin)) for begin in DRAWN}
    return terminal_svg([f"$ {command.splitlines()[0]}", *(printed[n] for n in sorted(chosen))])


def run(page: Path, folder: Path, instead: Mapping[str, str], picture: Path) -> str:
    """Run a page's commands in a folder, and draw its first training; returns the page with the printed output.

    Args:
        instead: texts of the page -> texts that replace them, in commands and outputs.

    Raises:
        SystemExit: a command failed, or its output differs from the page.
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
        if "zerovl train" in command.words and not picture.exists():
            picture.write_text(picture_of(command.words, printed), encoding="utf-8")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "quickstart",
        help="new or empty; default %(default)s",
    )
    parser.add_argument(
        "--instead",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="another text of the pages",
    )
    parser.add_argument(
        "--write", action="store_true", help="put the output into the page and its picture"
    )
    options = parser.parse_args(argv)
    if options.write and options.instead:
        parser.error("--write is for the page as it stands; leave --instead out")
    options.folder.mkdir(parents=True, exist_ok=True)
    if any(options.folder.iterdir()):
        raise SystemExit(f"quickstart: {options.folder} is not empty; give another --folder")
    picture = options.folder / "run.svg"
    page = run(PAGE, options.folder, dict(one.split("=", 1) for one in options.instead), picture)
    if options.write:
        PAGE.write_text(page, encoding="utf-8")
        PICTURE.write_bytes(picture.read_bytes())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"Every command printed the output that the page shows; {used.ru_utime + used.ru_stime:.0f} s of CPU time"
    )


if __name__ == "__main__":
    main()
