"""`zerovl <command>`. In the library only this room reads a command line.

A command's flags are those that its settings declare, and its words and folders, which are declared where it is defined. Only
the parser of the command that is called is made, and its modules are imported when it runs: `--help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn, TypeVar

from open_clip_zerovl import __version__
from open_clip_zerovl.core.errors import DEBUG, DEBUG_HELP, argparse_sentence, ended, nearest
from open_clip_zerovl.core.lazy import load_open_clip

#: Runs a parsed command. An int is its exit status; anything else is the result for the Python function of the same name.
RunCommand = Callable[[argparse.Namespace], Any]
ParserKind = TypeVar("ParserKind", bound=argparse.ArgumentParser)

# Group -> command -> (module of this room and function that defines it, its line in the list).
COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "every day": {
        "data pack": (
            "data:pack",
            "your own pairs: a folder, CSV, JSON lines, parquet, tars or addresses, as shards",
        ),
        "train": (
            "train:become_training",
            "train a model: the flags of python -m training.main, a process a GPU",
        ),
        "align": (
            "models:align",
            "a retrieval model from two frozen encoders: heads on stored features",
        ),
        "finetune": (
            "models:finetune",
            "fine-tune a model on your own pairs without losing its earlier abilities",
        ),
        "retrieval": (
            "evaluate:retrieval",
            "recall@1/5/10 and RSUM on retrieval sets: of a model, or of several side by side",
        ),
        "zero-shot": (
            "evaluate:zero_shot",
            "accuracy of a model that classifies pictures by the names of their classes",
        ),
        "search": (
            "evaluate:search",
            "the pictures of a folder that are nearest to a text or to a picture",
        ),
        "export": (
            "models:export",
            "a training checkpoint as a folder that stock open_clip or transformers loads",
        ),
    },
    "understand": {
        "plan": (
            "train:become_plan",
            "time, memory and disk of a training run, by its first two steps",
        ),
        "doctor": (
            "doctor:doctor",
            "whether versions, devices and limits here are fit for training",
        ),
        "trial": (
            "trial:trial",
            "whether a larger batch, debiased batches or the recipe help on your data",
        ),
        "linear-probe": (
            "evaluate:linear_probe",
            "accuracy of a linear classifier on the frozen image tower",
        ),
    },
    "research": {
        "data sbu": ("data:sbu", "SBU Captioned Photos, from its list of addresses"),
        "data cc3m": (
            "data:cc3m",
            "Conceptual Captions 3M, from Train_GCC-training.tsv (--source)",
        ),
        "data cc12m": ("data:cc12m", "Conceptual 12M, from cc12m.tsv"),
        "data vg": ("data:vg", "Visual Genome: five largest regions' phrases an image"),
        "data coco": ("data:coco", "MS-COCO with Karpathy's splits"),
        "data f30k": ("data:f30k", "Flickr30K with Karpathy's splits (--source)"),
        "data check": ("data:check", "read every sample of shards, or count them into sizes.json"),
        "data near": (
            "data:near",
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
# their flags are those of training, for which they have parsers of their own
TAKE_WORDS = ("train", "plan")
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
    if name in TAKE_WORDS and DEBUG in words:
        rest.append(DEBUG)  # of open_clip's training program, too
    return function_of(name)(rest) if name in TAKE_WORDS else run_parsed(name, rest)


def function_of(name: str) -> Callable[..., Any]:
    """The function that runs a command with its words (TAKE_WORDS), or that defines the flags of any other one."""
    module, _, function = ALL[name][0].partition(":")
    return getattr(import_module(f"open_clip_zerovl.cli.{module}"), function)


def run_parsed(name: str, words: Sequence[str]) -> Any:
    """Make a command's parser, and run it with these words."""
    parser, run = define(name, Parser)
    parser.add_argument(DEBUG, action="store_true", default=argparse.SUPPRESS, help=DEBUG_HELP)
    arguments = parser.parse_args(words)
    if name in SILENT and "torch" not in sys.modules:
        print(f"zerovl {name}: loading torch and open_clip ...", file=sys.stderr, flush=True)
        load_open_clip()
    return run(arguments)


def define(name: str, kind: type[ParserKind]) -> tuple[ParserKind, RunCommand]:
    """A command's parser, and the function that runs it with the parsed words."""
    line = ALL[name][1]
    parser = kind(prog=f"zerovl {name}", description=f"{line[:1].upper()}{line[1:]}.")
    return parser, function_of(name)(parser)


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
            function_of(name)(parser)
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

    typed = True  # its words come from a shell, where commands to type next are of use

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
