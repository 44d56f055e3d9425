"""`zerovl <command>`. In the library only this module reads a command line.

A command is a function of `open_clip_zerovl.api`: its parameters are the flags, the text of its result is printed. Only the
parser of the command that is called is made, and its modules are imported when it runs: `--help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from open_clip_zerovl import __version__
from open_clip_zerovl.core.errors import DEBUG, DEBUG_HELP, UserError, ended, nearest
from open_clip_zerovl.core.flags import Parser, make_parser, run
from open_clip_zerovl.core.processes import take_gpus, training_command
from open_clip_zerovl.core.releases import load_open_clip

# Group -> command -> its line in the list.
COMMANDS = {
    "every day": {
        "data pack": "your own pairs: a folder, CSV, JSON lines, parquet, tars or addresses, as shards",
        "train": "train a model: the flags of python -m training.main, a process a GPU",
        "align": "a retrieval model from two frozen encoders: heads on stored features",
        "finetune": "fine-tune a model on your own pairs without losing its earlier abilities",
        "retrieval": "recall@1/5/10 and RSUM on retrieval sets: of a model, or of several side by side",
        "zero-shot": "accuracy of a model that classifies pictures by the names of their classes",
        "search": "the pictures of a folder that are nearest to a text or to a picture",
        "export": "a training checkpoint as a folder that stock open_clip or transformers loads",
    },
    "understand": {
        "plan": "time, memory and disk of a training run, by its first two steps",
        "doctor": "whether versions, devices and limits here are fit for training",
        "trial": "whether a larger batch, debiased batches or the recipe help on your data",
        "linear-probe": "accuracy of a linear classifier on the frozen image tower",
    },
    "research": {
        "data public": "SBU, CC3M, CC12M, Visual Genome, MS-COCO or Flickr30K, from their lists",
        "data check": "read every sample of shards, or count them into sizes.json",
        "data near": "training pictures that are in a test set, found by perceptual hashes",
    },
}
#: Commands that show nothing of their own before they have imported torch and open_clip, which takes some seconds.
SILENT = (
    "align",
    "data near",
    "finetune",
    "linear-probe",
    "retrieval",
    "search",
    "zero-shot",
)


def become_training(words: Sequence[str]) -> NoReturn:
    """Put the training program in this process's place, with its signals, terminal and exit status.

    Args:
        words: those of `python -m training.main`, and `--gpus N`.

    Raises:
        UserError: `--gpus` without a number, or a training program that is not whole.
    """
    gpus, arguments = take_gpus(words)
    asks_help = any(word in ("-h", "--help") for word in arguments)
    command = training_command(arguments, 1 if asks_help else gpus)
    if asks_help:
        print(
            "zerovl train [--gpus N] FLAGS: one process for each GPU that CUDA_VISIBLE_DEVICES leaves visible, or N; with "
            "--device cpu one, or N.\nThe flags are those of python -m training.main:\n",
            flush=True,
        )
    os.execv(command[0], command)


# their flags are those of training, which has a parser of its own
TAKE_WORDS = ("train", "plan")
ALL = [name for group in COMMANDS.values() for name in group]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status, see `errors.explain` (`doctor` also has 1)."""
    if "_ARGCOMPLETE" in os.environ:  # set by the shell function of argcomplete
        complete(os.environ["COMP_LINE"])
    words = list(sys.argv[1:] if argv is None else argv)
    return ended(lambda: run_command(words), "zerovl", words)


def run_command(words: Sequence[str]) -> Any:
    """Run the command that a line begins with, and return its exit status or its result."""
    name, rest = find_command([word for word in words if word != DEBUG])
    if name in TAKE_WORDS:
        rest += [DEBUG] * (DEBUG in words)  # a flag of open_clip's training program, too
        plan = ["--plan", *(word for word in rest if word != "--")]
        become_training(plan if name == "plan" else rest)
    parser = parser_of(name)
    parsed = parser.parse_args(rest)
    if name in SILENT and "torch" not in sys.modules:
        print(f"zerovl {name}: loading torch and open_clip ...", file=sys.stderr, flush=True)
        load_open_clip()
    result = run(function_of(name), parsed)
    text = result if isinstance(result, str) else getattr(result, "text", "")
    if text:
        print(text)
    return result


def function_of(name: str) -> Callable[..., Any]:
    """Import the function of a command."""
    from open_clip_zerovl import api

    return getattr(api, name.split()[-1].replace("-", "_"))


def parser_of(name: str) -> Parser:
    """Make the parser of a command."""
    parser = make_parser(function_of(name), f"zerovl {name}")
    parser.add_argument(DEBUG, action="store_true", default=argparse.SUPPRESS, help=DEBUG_HELP)
    return parser


def complete(line: str) -> None:
    """Print the words that may follow a command line, and end: `eval "$(register-python-argcomplete zerovl)"` in ~/.bashrc.

    Only the flags of the line's own command are defined.
    """
    import argcomplete

    from open_clip_zerovl.core.flags import add_flags
    from open_clip_zerovl.recipe.flags import SECTIONS, OpenClipFlags

    root = Parser(prog="zerovl")
    commands = root.add_subparsers()
    groups = {"": commands, "data": commands.add_parser("data").add_subparsers()}
    for name in ALL:
        group, _, word = name.rpartition(" ")
        words = name.split()
        own = line.split()[1 : 1 + len(words)] == words
        parents = [parser_of(name)] if own and name not in TAKE_WORDS else []
        parser = groups[group].add_parser(word, parents=parents, add_help=not parents)
        if own and not parents:
            add_flags(parser, (*SECTIONS, OpenClipFlags))
    argcomplete.autocomplete(root)


def find_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split a line into the command with which it begins and its other words.

    Raises:
        SystemExit: after the list of commands or the version, where these were asked for.
        UserError: there is no such command.
    """
    if words[:1] == ["--version"]:
        print(f"open_clip_zerovl {__version__}")
        raise SystemExit(0)
    prefix = "data " if words[:1] == ["data"] else ""
    rest = list(words[1:] if prefix else words)
    word = rest.pop(0) if rest else ""
    if word in ("-h", "--help"):
        print(command_list(prefix))
        raise SystemExit(0)
    if prefix + word in ALL:
        return prefix + word, rest
    listed = f"`{f'zerovl {prefix}'.strip()} --help` lists the commands"
    if not word or word.startswith("-"):
        clause = f", and {word} is not one" if word else ""
        raise UserError(f"`{f'zerovl {prefix}'.strip()}` needs a command{clause}; {listed}")
    # 'pack' means 'data pack', although their letters differ.
    known = [each.removeprefix(prefix) for each in ALL if each.startswith(prefix)]
    similar = next((each for each in known if each.split()[-1] == word), None)
    similar = similar or nearest(word, known)
    advice = f"did you mean `zerovl {prefix}{similar}`?" if similar else listed
    raise UserError(f"there is no command '{word}'; {advice}")


def command_list(prefix: str = "") -> str:
    """Write the text of `zerovl --help`, or of the commands that begin with a prefix."""
    command = f"zerovl {prefix}COMMAND"
    lines = [
        f"usage: {command} ... | {command} --help | zerovl --version",
        "",
        "open_clip training with the ZeroVL recipe, and data, evaluation and export around it.",
    ]
    for title, group in COMMANDS.items():
        shown = {name: line for name, line in group.items() if name.startswith(prefix)}
        if shown:
            lines += ["", f"{title}:", *(f"  {name:14}{line}" for name, line in shown.items())]
    return "\n".join(lines)


if __name__ == "__main__":  # torchrun starts it so
    sys.exit(main())
