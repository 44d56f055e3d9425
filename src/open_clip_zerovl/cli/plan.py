"""The part of `zerovl`'s command line that plans a run: `zerovl plan` (see cli.py).

It takes the training program's own flags. Those that neither time nor memory nor data depend on are passed over by name, so
that a whole `python -m training.main` command line can be handed on.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from open_clip_zerovl.errors import UserError

# Flags of training that change the time or the memory of a step in a way that is not planned.
_NOT_PLANNED = {
    "--accum-freq": "give --dga-steps in its place",
    "--cache-frozen": "the plan is for an epoch that fills the cache",
    "--torchcompile": "steps are timed without it",
    "--opt": "AdamW is planned",
    "--distill-model": "its teacher's passes are not in the plan",
    "--lock-image-unlocked-groups": "the whole tower counts as locked",
    "--lock-text-unlocked-layers": "the whole tower counts as locked",
}
_SWITCHES = (
    "dataset-resampled", "siglip", "lock-image", "lock-text", "grad-checkpointing", "no-embedding-decay",
    "temperature-constant", "coin-flip-mixup", "pretrained-image", "save-most-recent", "delete-previous-checkpoint",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"zerovl plan: {message}; `zerovl plan --help` lists the flags")


def add_plan(commands) -> None:
    """Add `zerovl plan`. Its flags are read by `parse_plan`: argparse cannot pass over unknown ones in a subcommand."""
    plan = commands.add_parser(
        "plan", help="what a training run needs and takes, before it starts", add_help=False, prefix_chars="+"
    )
    plan.add_argument("arguments", nargs=argparse.REMAINDER)
    plan.set_defaults(run=_run_plan)


def _run_plan(arguments: argparse.Namespace) -> int:
    values = parse_plan(arguments.arguments)
    from open_clip_zerovl.plan.make import make_plan
    from open_clip_zerovl.plan.report import report
    from open_clip_zerovl.plan.settings import PlanSettings

    as_json = values.pop("json")
    settings = PlanSettings(**values)
    plan = make_plan(settings, say=lambda line: print(f"zerovl plan: {line} ...", file=sys.stderr, flush=True))
    print(json.dumps(plan.as_dict(), indent=1) if as_json else report(plan))
    return 1 if plan.missing else 0


def parse_plan(argv: Sequence[str]) -> dict[str, Any]:
    """The values of `PlanSettings`, and `json`.

    Raises:
        UserError: a flag without a value, a value of the wrong kind, a word that belongs to no flag.
    """
    words = [word for word in argv if word != "--"]
    known, rest = _parser().parse_known_args(words)
    if rest and not _is_flag(rest[0]):
        raise UserError(f"zerovl plan: {rest[0]!r} belongs to no flag; write it as --flag value")
    values = {name: value for name, value in vars(known).items() if value is not None}
    passed_over = [word.partition("=")[0] for word in rest if _is_flag(word)]
    values["passed_over"] = tuple(
        f"{flag} ({_NOT_PLANNED[flag]})" if flag in _NOT_PLANNED else flag for flag in dict.fromkeys(passed_over)
    )
    if values.pop("debiased_sampling"):
        if values.get("sampling", "debiased") != "debiased":
            raise UserError(f"--debiased-sampling and --sampling {values['sampling']} contradict each other; give one")
        values["sampling"] = "debiased"
    patch_dropout = values.pop("force_patch_dropout", None)
    values.setdefault("token_drop", patch_dropout)
    values["freeze"] = tuple(sorted(set(values.get("freeze", ()))))
    for name in ("image_mean", "image_std"):
        if name in values:
            values[name] = tuple(values[name])
    size = values.get("force_image_size")
    if size is not None:
        values["force_image_size"] = size[0] if len(size) == 1 else tuple(size)
    return values


def _is_flag(word: str) -> bool:
    return word.startswith("--") and not re.fullmatch(r"-+[\d.].*", word)


def _parser() -> argparse.ArgumentParser:
    from open_clip_zerovl.data.schedule import DRAWS, STRATEGIES
    from open_clip_zerovl.data.sources import CAPTIONS
    from open_clip_zerovl.plan.settings import PRECISIONS

    parser = _Parser(
        prog="zerovl plan",
        usage="zerovl plan [--effective-batch N] [--assume GPU[:COUNT]] [--json] [--] TRAINING ARGUMENTS",
        description="Check a run before it starts: data, memory, time, disk. Takes the arguments of python -m training.main; "
        "those not listed here change none of it. Exit status: 0, 1 if something is missing, 2 for bad input.",
        allow_abbrev=False,
        argument_default=None,
    )
    own = parser.add_argument_group("of the plan alone")
    own.add_argument("--effective-batch", type=int, metavar="N", help="choose --batch-size and --dga-steps for it")
    own.add_argument(
        "--assume", metavar="GPU[:COUNT]", help="estimate for hardware that is not here: v100, a100-80, h200, ..."
    )
    own.add_argument("--gpus", type=int, metavar="N", help="of the GPUs here (default: all)")
    own.add_argument("--json", action="store_true", help="all figures as JSON")
    training = parser.add_argument_group("training flags that matter, as python -m training.main takes them")
    training.add_argument("--model", required=True, metavar="NAME")
    for name in (
        "text-model", "train-data", "train-data-upsampling-factors", "retrieval-data", "source-order", "device",
        "image-interpolation", "init-from", "init-image", "init-text", "logs", "auto-augment",
    ):  # fmt: skip
        training.add_argument(f"--{name}", metavar="TEXT")
    for name in (
        "train-num-samples", "batch-size", "dga-steps", "loss-chunk", "epochs", "workers", "seed", "save-frequency",
        "save-every-steps", "keep-checkpoints", "force-context-length",
    ):  # fmt: skip
        training.add_argument(f"--{name}", type=int, metavar="N")
    for name in ("wd", "grad-clip-norm", "token-drop", "force-patch-dropout", "mixup-alpha", "text-augment"):
        training.add_argument(f"--{name}", type=float, metavar="X")
    for name in _SWITCHES:
        training.add_argument(f"--{name}", action="store_true")
    training.add_argument("--debiased-sampling", action="store_true")
    training.add_argument("--sampling", choices=STRATEGIES)
    training.add_argument("--debiased-draw", choices=DRAWS)
    training.add_argument("--captions", choices=CAPTIONS)
    training.add_argument("--on-bad-sample", choices=("replace", "fail"))
    training.add_argument("--precision", choices=PRECISIONS)
    training.add_argument("--freeze", action="append", choices=("image", "text"))
    training.add_argument("--dga-retain", type=_retain, metavar="R|auto")
    training.add_argument("--force-image-size", type=int, nargs="+", metavar="PX")
    training.add_argument("--image-mean", type=float, nargs="+", metavar="X")
    training.add_argument("--image-std", type=float, nargs="+", metavar="X")
    training.add_argument("--aug-cfg", nargs="*", action=_KeyValues, metavar="KEY=VALUE")
    return parser


def _retain(text: str) -> int | str:
    from open_clip_zerovl.dga.retain import parse_retain

    try:
        return parse_retain(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class _KeyValues(argparse.Action):
    """open_clip's `--aug-cfg key=value ...`."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        pairs: dict[str, Any] = {}
        for word in values or ():
            key, separator, value = str(word).partition("=")
            if not separator:
                parser.error(f"--aug-cfg {word} is no key=value")
            try:
                pairs[key] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                pairs[key] = value
        setattr(namespace, self.dest, pairs)
