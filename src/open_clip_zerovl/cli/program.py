"""`zerovl <command>`. In the library only this room reads a command line.

A command is a function of `open_clip_zerovl.api`: its parameters are the flags, the text of its result is printed. Only the
parser of the command that is called is made, and its modules are imported when it runs: `--help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from open_clip_zerovl import __version__
from open_clip_zerovl.core.command import add_parameters, run
from open_clip_zerovl.core.errors import DEBUG, DEBUG_HELP, argparse_sentence, ended, nearest
from open_clip_zerovl.core.launch import take_gpus, training_command
from open_clip_zerovl.core.releases import load_open_clip

# Group -> command -> (its function, "" for one that becomes a training; its line in the list).
COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "every day": {
        "data pack": (
            "pack",
            "your own pairs: a folder, CSV, JSON lines, parquet, tars or addresses, as shards",
        ),
        "train": ("", "train a model: the flags of python -m training.main, a process a GPU"),
        "align": ("align", "a retrieval model from two frozen encoders: heads on stored features"),
        "finetune": (
            "finetune",
            "fine-tune a model on your own pairs without losing its earlier abilities",
        ),
        "retrieval": (
            "retrieval",
            "recall@1/5/10 and RSUM on retrieval sets: of a model, or of several side by side",
        ),
        "zero-shot": (
            "zero_shot",
            "accuracy of a model that classifies pictures by the names of their classes",
        ),
        "search": (
            "search_words",
            "the pictures of a folder that are nearest to a text or to a picture",
        ),
        "export": (
            "export",
            "a training checkpoint as a folder that stock open_clip or transformers loads",
        ),
    },
    "understand": {
        "plan": ("", "time, memory and disk of a training run, by its first two steps"),
        "doctor": ("doctor", "whether versions, devices and limits here are fit for training"),
        "trial": (
            "trial",
            "whether a larger batch, debiased batches or the recipe help on your data",
        ),
        "linear-probe": (
            "linear_probe",
            "accuracy of a linear classifier on the frozen image tower",
        ),
    },
    "research": {
        "data sbu": ("sbu", "SBU Captioned Photos, from its list of addresses"),
        "data cc3m": ("cc3m", "Conceptual Captions 3M, from Train_GCC-training.tsv (--source)"),
        "data cc12m": ("cc12m", "Conceptual 12M, from cc12m.tsv"),
        "data vg": ("vg", "Visual Genome: five largest regions' phrases an image"),
        "data coco": ("coco", "MS-COCO with Karpathy's splits"),
        "data f30k": ("f30k", "Flickr30K with Karpathy's splits (--source)"),
        "data check": ("check", "read every sample of shards, or count them into sizes.json"),
        "data near": (
            "near",
            "training pictures that are in a test set, found by perceptual hashes",
        ),
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


def become_plan(words: Sequence[str]) -> NoReturn:
    """Put a training in this process's place that takes two steps and prints what the whole run takes.

    Args:
        words: those of `zerovl train`.
    """
    become_training(["--plan", *(word for word in words if word != "--")])


# their flags are those of training, for which they have parsers of their own
TAKE_WORDS: dict[str, Callable[[Sequence[str]], Any]] = {
    "train": become_training,
    "plan": become_plan,
}
ALL = {name: command for group in COMMANDS.values() for name, command in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status, see `errors.explain` (`doctor` also has 1)."""
    if "_ARGCOMPLETE" in os.environ:  # set by the shell function of argcomplete
        complete(os.environ["COMP_LINE"])
    words = list(sys.argv[1:] if argv is None else argv)
    return ended(lambda: run_command(words), "zerovl", words)


def run_command(words: Sequence[str]) -> Any:
    """Run the command that a line begins with; returns its exit status, or its result."""
    name, rest = find_command([word for word in words if word != DEBUG])
    if name in TAKE_WORDS:
        # --debug is a flag of open_clip's training program, too.
        return TAKE_WORDS[name](rest + [DEBUG] * (DEBUG in words))
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
    """The function of a command, of which the parser is made."""
    from open_clip_zerovl import api
    from open_clip_zerovl.cli.doctor import doctor

    return doctor if name == "doctor" else getattr(api, ALL[name][0])


def parser_of(name: str) -> Parser:
    """Make the parser of a command."""
    function = function_of(name)
    text = re.split(r"\n\n(?=\w+:\n)", inspect.getdoc(function) or "")[0]
    parser = Parser(prog=f"zerovl {name}", description=text)
    add_parameters(parser, function)
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
        parser = groups[group].add_parser(word)
        words = name.split()
        if line.split()[1 : 1 + len(words)] != words:
            continue
        if name in TAKE_WORDS:
            add_flags(parser, (*SECTIONS, OpenClipFlags))
        else:
            add_parameters(parser, function_of(name))
    argcomplete.autocomplete(root)


def find_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that a line begins with, and its other words.

    Raises:
        SystemExit: there is none: after the list of commands or the version if these were asked for, else after a sentence.
    """
    first, second = [*words[:2], "", ""][:2]
    if first == "--version":
        print(f"open_clip_zerovl {__version__}")
        raise SystemExit(0)
    prefix = "data " if first == "data" else ""
    word = second if prefix else first
    if word in ("-h", "--help"):
        print(command_list(prefix))
        raise SystemExit(0)
    name = prefix + word
    if name in ALL:
        return name, list(words[2 if prefix else 1 :])
    program = f"zerovl {prefix}".strip()
    if not word or word.startswith("-"):
        clause = f", and {word} is not one" if word else ""
        sentence = f"`{program}` needs a command{clause}; `{program} --help` lists the commands"
    else:
        # 'pack' means 'data pack', although their letters differ.
        known = [command.removeprefix(prefix) for command in ALL if command.startswith(prefix)]
        similar = next(
            (command for command in known if command.split()[-1] == word), None
        ) or nearest(word, known)
        sentence = f"there is no command '{word}'; "
        sentence += (
            f"did you mean `zerovl {prefix}{similar}`?"
            if similar
            else f"`{program} --help` lists the commands"
        )
    print(f"zerovl: error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def command_list(prefix: str = "") -> str:
    """The text of `zerovl --help`, or of the commands that begin with a prefix."""
    lines = [
        f"usage: zerovl {prefix}COMMAND ... | zerovl {prefix}COMMAND --help | zerovl --version",
        "",
    ]
    lines += [
        "open_clip training with the ZeroVL recipe, and data, evaluation and export around it."
    ]
    for title, group in COMMANDS.items():
        shown = {name: line for name, (_, line) in group.items() if name.startswith(prefix)}
        lines += (
            ["", f"{title}:", *(f"  {name:14}{line}" for name, line in shown.items())]
            if shown
            else []
        )
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, with the nearest flag for an unknown one.

    It takes no abbreviations of flags: a shortened flag may come to mean another one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(self, args=None, namespace=None):
        """As argparse's; a misspelt flag is named before a required one that it may stand for."""
        self._words = list(args or ())
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with status 2 after one sentence."""
        self.exit(2, f"zerovl: error: {self.sentence(message)}\n")

    def sentence(self, message: str) -> str:
        """The sentence for argparse's message."""
        if "are required: " in message:
            flags = [word.partition("=")[0] for word in self._words if word.startswith("--")]
            unknown = [flag for flag in flags if flag not in self._option_string_actions]
            if unknown:
                message = f"unrecognized arguments: {unknown[0]}"
        return argparse_sentence(message, self._option_string_actions, f"{self.prog} --help")
