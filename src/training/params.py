"""The command line: our flags and open_clip's in one validated record, open_clip's also in its own namespace.

`parse` passes every argument that is not ours to `open_clip_train.params.parse_args`, unchanged and in order. Nothing here
imports torch, so that `--help` and errors are printed at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import open_clip_train.params as host_params

from open_clip_zerovl.core.errors import UserError, argparse_sentence, say
from open_clip_zerovl.core.files import check_writable
from open_clip_zerovl.core.flags import add_flags, flags_of
from open_clip_zerovl.core.launch import rank_here
from open_clip_zerovl.core.lazy import load_open_clip
from open_clip_zerovl.data.names import check_paths, is_named
from open_clip_zerovl.recipe.flags import SECTIONS, AllFlags, RecipeConfig, values_of
from training.refusals import check

# open_clip's namespace, and the same flags with ours; both are made by `parse` alone.
Command = tuple[argparse.Namespace, AllFlags]

# ---------------------------------------------------------------------------------------------------------------------
# Parsing
# ---------------------------------------------------------------------------------------------------------------------


class TrainingParser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, with the nearest flag for an unknown one."""

    def parse_args(self, args=None, namespace=None):
        """Parse as argparse does, with a sentence for a word that open_clip's KEY=VALUE flags cannot parse."""
        try:
            arguments = super().parse_args(args, namespace)
        except UserError:
            raise
        except (ValueError, SyntaxError) as error:
            raise UserError(
                f"--aug-cfg or --opt-kwargs is not understood ({error}); write KEY=VALUE, as in scale='(0.6,1.0)'"
            ) from error
        values = {
            action.dest: getattr(arguments, action.dest, action.default) for action in self._actions
        }
        self.typed = {
            action.dest: values[action.dest]
            for action in self._actions
            if values[action.dest] != action.default
        }
        return arguments

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """Split a line of `@FILE` into words as a shell does, without its comment."""
        return shlex.split(arg_line, comments=True)

    def error(self, message: str) -> NoReturn:
        known = [*self._option_string_actions, *build_parser()._option_string_actions]
        raise UserError(argparse_sentence(message, known, "python -m training.main --help"))


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of our flags.

    It allows no abbreviations: `--lr` must stay open_clip's.
    """
    parser = TrainingParser(
        prog="python -m training.main",
        description="open_clip's training program with the ZeroVL recipe. All flags of this page are off by default; "
        "without them the program is open_clip's own, bit for bit. open_clip's flags follow below. "
        "@FILE stands for the words of a file.",
        allow_abbrev=False,
        add_help=False,
        fromfile_prefix_chars="@",
    )
    add_flags(parser, SECTIONS)
    return parser


def open_clip_parser() -> TrainingParser:
    """Return open_clip's own parser, which its `parse_args` makes in each call."""
    with _made_by_open_clip() as made:
        host_params.parse_args([])
    return made[0]


@contextmanager
def _made_by_open_clip() -> Iterator[list[TrainingParser]]:
    """Make open_clip's `parse_args` use a `TrainingParser` within the block.

    Those made are in the list.
    """
    made: list[TrainingParser] = []

    def make() -> TrainingParser:
        made.append(TrainingParser(prog="python -m training.main"))
        return made[-1]

    host_params.argparse = SimpleNamespace(ArgumentParser=make)
    try:
        yield made
    finally:
        host_params.argparse = argparse


def _parse_open_clip(words: Sequence[str]) -> tuple[argparse.Namespace, TrainingParser]:
    with _made_by_open_clip() as made:
        return host_params.parse_args(list(words)), made[0]


def parse(argv: Sequence[str]) -> Command:
    """Parse and check a command line.

    open_clip's namespace also holds our flags if any was given, so that open_clip writes them to params.txt.

    Raises:
        UserError: values out of range, or flags that contradict each other, named in one sentence.
    """
    parser = build_parser()
    if any(argument in ("-h", "--help") for argument in argv):
        parser.print_help()
        print(
            "\nopen_clip's own flags (--train-data also takes named sources and folders, see above):\n"
        )
        _parse_open_clip(["--help"])  # prints and exits
    words = list(argv)[list(argv)[:1] == ["--"] :]  # as under torchrun
    ours, rest = parser.parse_known_args(words)
    args, stock_parser = _parse_open_clip(rest)
    values = values_of(ours)
    if values["sampling"] is None and is_named(args.train_data):
        values["sampling"] = "random"
    if values["text_model"] and os.path.isdir(values["text_model"]):
        # params.txt is read from other folders, too
        values["text_model"] = os.path.abspath(values["text_model"])
    if values["model_config"]:
        values["model_config"] = os.path.abspath(values["model_config"])
        args.model = _own_model(
            values["model_config"], args.model, stock_parser.get_default("model")
        )
        _default_betas(args, values["model_config"], stock_parser.typed)
    config = AllFlags.of(values, args, stock_parser.typed)
    check(config, args, stock_parser)
    if config.token_drop is not None:
        args.force_patch_dropout = config.token_drop
    if config.active:
        vars(args).update(
            {each.name: getattr(config, each.name) for each in flags_of(RecipeConfig)}
        )
    return args, config


def _default_betas(args: argparse.Namespace, file: str, typed: Mapping[str, Any]) -> None:
    """Choose open_clip's defaults of AdamW for a model config's file, by its image tower.

    open_clip itself goes by "vit" in a name.
    """
    vision = json.loads(Path(file).read_text(encoding="utf-8"))["vision_cfg"]
    timm_name = vision.get("timm_model_name")
    has_vit = "vit" in timm_name if timm_name else not isinstance(vision.get("layers", 12), list)
    for name, value in (
        host_params.get_default_params("vit" if has_vit else "resnet").items()
        if "timm" not in args.opt
        else ()
    ):
        if name not in typed:
            setattr(args, name, value)


def _own_model(file: str, given: str, default: str) -> str:
    """Register a model config's file and return its name.

    Raises:
        UserError: `--model` names another.
    """
    say_loading()
    from open_clip_zerovl.models.configs import register_model_file

    name = register_model_file(file)
    if given not in (default, name):
        raise UserError(
            f"--model {given} and --model-config {file} are two models: give one of them"
        )
    return name


# ---------------------------------------------------------------------------------------------------------------------
# Named by flags
# ---------------------------------------------------------------------------------------------------------------------


def say_loading() -> None:
    """Load torch and open_clip, which takes seconds, after a line about it from the first rank.

    Once in a process.
    """
    if "open_clip" not in sys.modules:
        if rank_here() in ("", "0"):
            say("training.main: loading torch and open_clip")
        load_open_clip()


def read_command(argv: Sequence[str]) -> Command:
    """Parse a command line, and check that its run can be made: folder, name, data and checkpoints.

    open_clip's main first makes the run's folder, then refuses to use its name again, and ends several errors with status 0.

    Raises:
        UserError: the first error.
    """
    args, config = parse(argv)
    if config.plan:
        args.whole_run = without_a_trace(args)
    rank = int(rank_here() or 0)
    if rank == 0:  # rank 0 makes the run's folder, which another rank could take for an older run's
        require_new_name(args)
    if rank == 0 and args.logs.lower() != "none":
        check_writable(args.logs, folder=True)
    sets = (args.val_data, args.imagenet_val, args.imagenet_v2)
    given = (args.train_data, config.retrieval_data, config.zero_shot_data, *sets)
    if not any(given) and not args.dataset_type.startswith("synthetic"):
        # open_clip's own sentence comes after the model is built, and perhaps fetched.
        raise UserError(
            "there is nothing to do: give --train-data, or data to evaluate on (--retrieval-data ...)"
        )
    if config.sampling is not None:
        check_paths(args.train_data)
    _check_checkpoint("--resume", None if args.resume == "latest" else args.resume)
    _check_checkpoint("--init-from", config.init_from)
    return args, config


def without_a_trace(args: argparse.Namespace) -> argparse.Namespace:
    """Change the namespace so that its run begins anew and keeps nothing, and return the former one."""
    before = argparse.Namespace(**vars(args))
    args.logs, args.name, args.resume, args.report_to = "none", None, None, ""
    args.save_frequency, args.save_most_recent, args.delete_previous_checkpoint = 0, False, False
    return before


def _check_checkpoint(flag: str, path: str | None) -> None:
    """Refuse a file of this machine that does not exist.

    Data and model are opened before it is read.
    """
    if path is None or "://" in path or os.path.isdir(path):  # a folder is checked when it is read
        return
    if not os.path.isfile(path):
        raise UserError(
            f"{flag} {path} does not exist; give the path of a checkpoint"
            + ", or 'latest'" * (flag == "--resume")
        )


def require_new_name(args: argparse.Namespace) -> None:
    """Refuse the name of an earlier run, except with `--resume latest`.

    Raises:
        UserError: a run of this name has a log, and `--resume latest` is not given or would find none of its checkpoints.
    """
    if args.name is None:
        return
    if args.resume == "latest":
        checkpoints = sorted(Path(args.logs, args.name, "checkpoints").glob("*_*.pt"))
        if (
            args.save_most_recent
            and checkpoints
            and not checkpoints[0].with_name("epoch_latest.pt").exists()
        ):
            raise UserError(
                f"with --save-most-recent, --resume latest goes on from epoch_latest.pt, which is not beside "
                f"{checkpoints[-1]}: the run would begin anew and write over it; leave --save-most-recent out"
            )
        return
    log = os.path.join(args.logs, args.name, "out-0" if args.log_local else "out.log")
    if os.path.exists(log):
        raise UserError(
            f"a run called {args.name!r} exists in {args.logs}; choose another --name, or continue it with --resume latest"
        )
