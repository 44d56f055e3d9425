"""The command line: our flags and open_clip's in one validated record, open_clip's also in its own namespace.

`parse` passes every argument that is not ours to `open_clip_train.params.parse_args`, unchanged and in order. Nothing here
imports torch, so that `--help` and errors are printed at once.

The first part holds the flags of open_clip that do not work with the recipe, by theme. The requirements and contradictions of a
single flag of ours are declared with that flag (`recipe.flags`); so are ranges. Mistakes that open_clip's main reports in a
sentence of its own are left to it (`run.TrainingRun`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import open_clip_train.params as host_params

from open_clip_zerovl.core.errors import UserError, argparse_sentence, say
from open_clip_zerovl.core.flags import (
    Rule,
    add_flags,
    conflicts,
    flags_of,
    out_of_range,
)
from open_clip_zerovl.core.processes import rank_here
from open_clip_zerovl.core.releases import line_here, load_open_clip
from open_clip_zerovl.data.names import check_paths, is_named
from open_clip_zerovl.recipe.flags import SECTIONS, AllFlags, RecipeConfig, values_of

# ---------------------------------------------------------------------------------------------------------------------
# Flags of open_clip that do not work with the recipe
# ---------------------------------------------------------------------------------------------------------------------


THE_RECIPE = "the recipe's flags"
THE_STEP = "the recipe's step (--sampling, --dga-steps, --loss-chunk ...)"
OF_OUR_LOSS = "--siglip, --sort-text, --loss-chunk, --positives, --coin-flip-mixup or --ablate detached-gather"
OTHER_MODELS = ("genlip", "genlap", "clap")


def _scripted_and_changed(f: AllFlags) -> bool:
    changes = (
        "freeze", "coin_flip_mixup", "temperature_constant", "lora", "token_drop", "init_from", "init_image", "init_text",
        "sort_text", "channels_last", "freeze_norm_statistics",
    )  # fmt: skip
    return f.torchscript and (f.lock_image or f.lock_text or f.changes(*changes))


def _needs_our_loss(f: AllFlags) -> bool:
    """Return whether a flag needs `ContrastiveLoss`, in a run with our step."""
    ours = f.changes("loss_chunk", "coin_flip_mixup", "sort_text") or f.positives in (
        "caption",
        "image",
        "both",
    )
    return f.own_step and (ours or "detached-gather" in f.ablate or f.siglip)


def _refusal(flag: str, recipe: str, when: Callable[[AllFlags], bool], advice: str) -> Rule:
    return Rule(f"{flag} does not work with {recipe}: {advice}", when)


RULES = (
    # the program
    _refusal("--horovod", THE_RECIPE, lambda f: f.horovod and f.active, "use torchrun"),
    _refusal(
        "--copy-codebase", THE_RECIPE, lambda f: bool(f.given.get("copy_codebase")) and f.active,
        "open_clip copies the folder above the package, which is a whole environment; note the commit instead",
    ),
    _refusal("--trace", THE_RECIPE, lambda f: f.trace and f.active, "a traced model cannot be trained"),
    # the step
    _refusal(
        "--accum-freq {accum_freq}", THE_STEP, lambda f: f.accum_freq > 1 and (f.own_step or f.mixture),
        "its gradients of the temperature and with dropout are wrong; give --dga-steps instead",
    ),
    _refusal(
        "--local-loss without --gather-with-grad", THE_STEP,
        lambda f: f.local_loss and not f.gather_with_grad and f.own_step and "detached-gather" not in f.ablate,
        "it loses the other ranks' gradients (paper section 4.1); leave both out, the recipe's loss is local and exact, or ask "
        "for the ablation with --ablate detached-gather",
    ),
    _refusal(
        "--ddp-static-graph", THE_STEP, lambda f: f.ddp_static_graph and f.own_step,
        "a static graph counts on one backward pass a step, and the recipe's step takes one a micro-batch",
    ),
    # the loss
    _refusal(
        "--model {model}", THE_RECIPE, lambda f: f.active and any(kind in f.model.lower() for kind in OTHER_MODELS),
        "it is for models with an image tower and a text tower",
    ),
    _refusal(
        "--model {model}", "--sort-text", lambda f: f.captions_images and f.sort_text,
        "it writes the caption of each picture, from that picture's tokens",
    ),
    _refusal(
        "--distill-model", "--model {model}", lambda f: f.distill_model is not None and f.captions_images and f.own_step,
        "open_clip does not distil captioners",
    ),
    _refusal(
        "--distill-model", OF_OUR_LOSS, lambda f: f.distill_model is not None and _needs_our_loss(f),
        "the loss then is open_clip's DistillClipLoss; leave one of them out",
    ),
    _refusal(
        "--siglip", "--ablate or --coin-flip-mixup", lambda f: f.siglip and bool(f.coin_flip_mixup or f.ablate),
        "they belong to the softmax loss",
    ),
    # the model
    _refusal(
        "--torchscript", "--torchcompile", lambda f: f.torchscript and f.torchcompile,
        "torch.compile takes no scripted model; give one of them",
    ),
    _refusal(
        "--torchscript",
        "--lock-*, --freeze, --freeze-norm-statistics, --coin-flip-mixup, --temperature-constant, --lora, --token-drop, "
        "--init-*, --sort-text or --channels-last",
        _scripted_and_changed,
        "they change the model after it is made, and a scripted one can no longer be changed; --torchcompile can",
    ),
    # the data
    _refusal(
        "--dataset-type {dataset_type}", THE_RECIPE, lambda f: f.dataset_type.endswith("-audio") and f.active,
        "it is for pairs of an image and a text",
    ),
    _refusal(
        "--dataset-type {dataset_type}", "named sources or --sampling",
        lambda f: f.dataset_type not in ("auto", "webdataset") and f.mixture, "sources are webdataset shards",
    ),
    # what open_clip needs, and says too late or not at all
    Rule(
        "--opt {opt} needs --lr and --eps: open_clip has defaults for adamw only",
        lambda f: "timm" in f.opt and None in (f.lr, f.eps),
    ),
    Rule(
        "--distill-model needs --distill-pretrained, the teacher's weights: without it open_clip does not distil",
        lambda f: f.distill_model is not None and f.distill_pretrained is None,
    ),
    Rule(
        "--distill-pretrained needs --distill-model, the teacher's name: without it open_clip does not distil",
        lambda f: f.distill_pretrained is not None and f.distill_model is None,
    ),
    Rule(
        "--report-to {report_to} needs one of wandb and trackio: open_clip reports to one of them",
        lambda f: "trackio" in line_here().reports and {"trackio", "wandb"} <= _reports(f),
    ),
    Rule(
        f"--report-to {{report_to}} needs one of the names {', '.join(line_here().reports)}",
        lambda f: bool(f.report_to) and not _reports(f),
    ),
)  # fmt: skip
# Of open_clip 4 alone: one of these flags, if it is not at its default, would be ignored by a part of the recipe.
LATER = (
    (
        "--pretrained-audio --audio-zeroshot-dataset", THE_RECIPE, lambda f: f.active,
        "it is for models of sounds; leave it out",
    ),
    (
        "--fsdp --use-naflex --force-naflex-vision --force-naflex-patch-interp", THE_STEP, lambda f: f.own_step,
        "it takes a model as it is, in DistributedDataParallel; leave it out",
    ),
    (
        "--caption-z-loss-weight --caption-loss-compute-dtype --caption-loss-chunk-size --text-attention-mask", THE_STEP,
        lambda f: f.own_step, "it is a setting of open_clip's own caption loss; leave it out",
    ),
    ("--fsdp", "--lora", lambda f: f.lora is not None, "it shards a model of one precision; leave it out"),
    (
        "--image-key --text-key --json-text-key --json-text-key-probs --max-image-pixels --length-bucketing "
        "--naflex-max-text-tokens", "named sources", lambda f: f.mixture,
        "they read shards in their own way (docs/data.md); leave it out, or give --train-data without names",
    ),
    (
        "--opt-kwargs --opt-fallback-list --text-layer-decay --image-layer-decay --audio-layer-decay --wd-exclude",
        "--no-embedding-decay, --lr-image, --lr-text, --lr-head or --layer-decay",
        lambda f: f.no_embedding_decay or f.own_rates, "each makes its own groups of parameters; give one of them",
    ),
)  # fmt: skip


def _reports(f: AllFlags) -> set[str]:
    return {name for name in line_here().reports if name in f.report_to}


def check(given: AllFlags, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse flags that contradict each other and values out of range.

    Args:
        parser: open_clip's, which made `args`.

    Raises:
        UserError: the first of them, both flags named.
    """
    words = vars(given)
    for rule in RULES:
        if rule.broken(given):
            raise UserError(rule.sentence.format_map(words))
    for options, recipe, when, advice in LATER:
        for option in options.split() if when(given) else ():
            # None: this release has no such flag
            action = parser._option_string_actions.get(option)
            if action is not None and getattr(args, action.dest) != action.default:
                raise UserError(f"{option} does not work with {recipe}: {advice}")
    strategy = getattr(args, "torchcompile_strategy", "model")
    if given.own_step and args.torchcompile and strategy not in ("model", "blocks"):
        raise UserError(
            f"--torchcompile-strategy {strategy} compiles open_clip's own step, which the recipe's replaces; give "
            "--torchcompile-strategy model or blocks"
        )
    for sentence in conflicts(given):
        raise UserError(sentence)
    for sentence in out_of_range(flags_of(AllFlags), given):
        raise UserError(sentence)


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
    return _parse_open_clip([])[1]


def _parse_open_clip(words: Sequence[str]) -> tuple[argparse.Namespace, TrainingParser]:
    """Parse as open_clip does, by a `TrainingParser`, which is returned with its flags."""
    parser = TrainingParser(prog="python -m training.main")
    host_params.argparse = SimpleNamespace(ArgumentParser=lambda: parser)
    try:
        return host_params.parse_args(list(words)), parser
    finally:
        host_params.argparse = argparse


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
    values = values_of(ours)
    file = values["model_config"]
    name = None if file is None else _own_model(file)
    args, stock_parser = _parse_open_clip(rest if name is None else ["--model", name, *rest])
    if name not in (None, args.model):
        raise UserError(
            f"--model {args.model} and --model-config {file} are two models: give one of them"
        )
    if values["sampling"] is None and is_named(args.train_data):
        values["sampling"] = "random"
    # params.txt is read from other folders, too
    if values["text_model"] and os.path.isdir(values["text_model"]):
        values["text_model"] = os.path.abspath(values["text_model"])
    if file is not None:
        values["model_config"] = os.path.abspath(file)
    config = AllFlags.of(values, args, stock_parser.typed)
    check(config, args, stock_parser)
    if config.token_drop is not None:
        args.force_patch_dropout = config.token_drop
    if config.active:
        vars(args).update(
            {each.name: getattr(config, each.name) for each in flags_of(RecipeConfig)}
        )
    return args, config


def _own_model(file: str) -> str:
    """Register a model config's file and return its name."""
    say_loading()
    from open_clip_zerovl.models.configs import register_model_file

    return register_model_file(file)


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
    """Parse a command line, and check that it names data, the name of its run and the paths of its data.

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
    sets = (args.val_data, args.imagenet_val, args.imagenet_v2)
    given = (args.train_data, config.retrieval_data, config.zero_shot_data, *sets)
    if not any(given) and not args.dataset_type.startswith("synthetic"):
        # open_clip's own sentence comes after the model is built, and perhaps fetched.
        raise UserError(
            "there is nothing to do: give --train-data, or data to evaluate on (--retrieval-data ...)"
        )
    if config.sampling is not None:
        check_paths(args.train_data)
    return args, config


def without_a_trace(args: argparse.Namespace) -> argparse.Namespace:
    """Change the namespace so that its run begins anew and keeps nothing, and return the former one."""
    before = argparse.Namespace(**vars(args))
    args.logs, args.name, args.resume, args.report_to = "none", None, None, ""
    args.save_frequency, args.save_most_recent, args.delete_previous_checkpoint = 0, False, False
    return before


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
