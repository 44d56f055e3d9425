"""The command lines of the pages: each flag is one of its command."""

from __future__ import annotations

import re
import shlex

import open_clip_train.params
import pytest

from open_clip_zerovl.cli import TAKE_WORDS, find_command, parser_of
from open_clip_zerovl.core.flags import flags_of
from open_clip_zerovl.recipe.flags import SECTIONS
from support import ROOT

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]


def option_strings(name: str) -> set[str]:
    """Return the flags of a command; of training its own, open_clip's by their declaration."""
    if name not in TAKE_WORDS:
        return {option for action in parser_of(name)._actions for option in action.option_strings}
    ours = {
        option
        for section in SECTIONS
        for flag in flags_of(section)
        for option in (flag.option, flag.switch and flag.switch[0])
    }
    source = open_clip_train.params.__file__
    with open(source, encoding="utf-8") as file:
        return ours | set(re.findall(r"[\"'](--[\w-]+)[\"']", file.read()))


def command_lines(text: str) -> list[list[str]]:
    """Return the words of each `zerovl` and `training.main` line of a page's blocks, after the program's name."""
    lines = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(
                r"(?:\$ )?(?:\w+=\S+ )*(?:zerovl|torchrun .*open_clip_zerovl\.cli) (.*)", line
            )
            if match is None and (
                match := re.match(r"(?:\$ )?python -m training\.main (.*)", line)
            ):
                lines.append(["train", *shlex.split(match[1], comments=True)])
            elif match is not None and "..." not in match[1].split()[0]:
                lines.append(shlex.split(match[1], comments=True))
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_flag_of_a_command_line_is_one_of_its_command(page):
    for words in command_lines(page.read_text(encoding="utf-8")):
        if words[0] in ("COMMAND", "error:"):
            continue
        name, rest = find_command(words)
        known = option_strings(name)
        own = rest[: rest.index("--")] if "--" in rest else rest
        given = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert given <= known | {"--debug", "--help"}, (name, given - known)
