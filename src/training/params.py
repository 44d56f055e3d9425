"""The recipe's flags: open_clip's stay open_clip's, ours are parsed beside them into one validated dataclass.

`parse` hands every argument that is not ours on to `open_clip_train.params.parse_args`, unchanged and in order.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, fields

from open_clip_train.params import parse_args as parse_open_clip_args

from open_clip_zerovl.data.mixture import POLICIES
from open_clip_zerovl.data.schedule import DRAWS, STRATEGIES
from open_clip_zerovl.data.sources import CAPTIONS, is_named
from open_clip_zerovl.dga.retain import parse_retain
from open_clip_zerovl.errors import UserError
from training.config import ABLATIONS, RecipeConfig
from training.refusals import check


def build_parser() -> argparse.ArgumentParser:
    """The parser of our flags alone. No abbreviations: `--lr` must stay open_clip's."""
    parser = argparse.ArgumentParser(
        prog="python -m training.main",
        description="open_clip's training program with the ZeroVL recipe. All flags of this page are off by default; "
        "without them the program is open_clip's own, bit for bit. open_clip's flags follow below.",
        allow_abbrev=False,
        add_help=False,
    )
    group = parser.add_argument_group("ZeroVL recipe")
    group.add_argument(
        "--debiased-sampling",
        action="store_true",
        help="every optimizer step draws from one source, over all ranks and micro-batches (paper section 3.1); "
        "the same as --sampling debiased. Name the sources: --train-data sbu=SHARDS::vg=SHARDS",
    )
    group.add_argument("--sampling", choices=STRATEGIES, help="how the sources of --train-data make batches")
    group.add_argument(
        "--debiased-draw",
        choices=DRAWS,
        default="exact",
        help="exact: every source in exact proportion each epoch; iid: a source drawn for each step, as the paper's "
        "released code does (default %(default)s)",
    )
    group.add_argument(
        "--source-order", metavar="NAME::NAME", help="order of the sources in --sampling sequential (default: as given)"
    )
    group.add_argument(
        "--captions",
        choices=CAPTIONS,
        help="several captions of an image (lines of a txt, rows of a table): show one an epoch, or make each a sample",
    )
    group.add_argument(
        "--on-bad-sample",
        choices=POLICIES,
        default="replace",
        help="replace a sample that cannot be used by a neighbour of its source and count it, or fail (default %(default)s)",
    )
    group.add_argument(
        "--max-bad-share",
        type=float,
        default=0.10,
        metavar="SHARE",
        help="stop when a source has lost more of its samples (default %(default)s)",
    )
    group.add_argument(
        "--loader-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="stop when no batch comes for so long, and name what is being read; 0 waits forever (default %(default)s)",
    )
    group.add_argument(
        "--dga-steps",
        type=int,
        default=1,
        metavar="K",
        help="decoupled gradient accumulation (section 4.1): K micro-batches of --batch-size per rank make one exact "
        "effective batch, in the memory of one",
    )
    group.add_argument(
        "--dga-retain",
        type=_retain,
        default=1,
        metavar="R|auto",
        help="micro-batches whose graph is kept instead of forwarded twice; auto: as many as free memory allows",
    )
    group.add_argument(
        "--dga-check",
        choices=("first", "always", "never"),
        default="first",
        help="when to compare the replayed forward pass with the first one",
    )
    group.add_argument(
        "--loss-chunk", type=int, metavar="ROWS", help="rows of the logit matrix alive at once (default: all)"
    )
    group.add_argument(
        "--ablate",
        action="append",
        choices=ABLATIONS,
        default=[],
        help="for the paper's ablations only, wrong on purpose: gather without gradient (Table 4), other dropout masks "
        "in the second pass (Table 6)",
    )
    group.add_argument(
        "--coin-flip-mixup",
        action="store_true",
        help="mix either the images or the texts of each effective batch, by a coin (section 3.2)",
    )
    group.add_argument(
        "--mixup-alpha", type=float, default=0.1, metavar="A", help="lambda ~ Beta(A, A) (default %(default)s)"
    )
    group.add_argument(
        "--text-augment",
        type=float,
        metavar="SHARE",
        help="share of words processed: half masked, a tenth replaced, the rest deleted (section 2.2: 0.2)",
    )
    group.add_argument(
        "--auto-augment",
        choices=("imagenet",),
        help="AutoAugment policy, after the crop (A.9); crop: --aug-cfg scale=(0.6,1.0)",
    )
    group.add_argument(
        "--token-drop",
        type=float,
        metavar="SHARE",
        help="share of ViT patch tokens dropped in training (section 4.2: 0.25); the paper's name for --force-patch-dropout",
    )
    group.add_argument(
        "--init-from",
        metavar="CKPT",
        help="start from a checkpoint's towers, each where all its shapes fit (section 4.3)",
    )
    group.add_argument("--init-image", metavar="FILE", help="start the image tower from raw timm weights")
    group.add_argument("--init-text", metavar="FILE|DIR", help="start the text tower from raw HF weights")
    group.add_argument(
        "--freeze",
        action="append",
        choices=("image", "text"),
        default=[],
        help="do not train this tower and its projection (auxiliary encoder, section 4.3)",
    )
    group.add_argument(
        "--cache-frozen", metavar="DIR", help="keep the frozen tower's features of each sample in DIR and reuse them"
    )
    group.add_argument("--temperature-constant", action="store_true", help="keep the temperature at its initial value")
    group.add_argument(
        "--no-embedding-decay",
        action="store_true",
        help="exempt class tokens, position and token embeddings from weight decay, which open_clip decays",
    )
    group.add_argument(
        "--warmup-share",
        type=float,
        metavar="SHARE",
        help="warm up over this share of all steps (released code: 0.025)",
    )
    group.add_argument(
        "--lr-min", type=float, metavar="LR", help="floor of the cosine learning rate (the paper's: 1e-5)"
    )
    group.add_argument(
        "--save-every-steps",
        type=int,
        metavar="STEPS",
        help="write a checkpoint every so many optimizer steps; --resume latest goes on from the newest, exactly",
    )
    group.add_argument(
        "--keep-checkpoints", type=int, default=2, metavar="N", help="step checkpoints kept (default %(default)s)"
    )
    group.add_argument(
        "--retrieval-data",
        metavar="NAME=DIR::...",
        help="retrieval sets (CLIP_benchmark's layout, Karpathy's JSON@PICTURES, ZeroVL's CSV@PICTURES); recall@1/5/10 and "
        "RSUM are logged while training",
    )
    group.add_argument(
        "--retrieval-frequency", type=int, default=1, metavar="EPOCHS", help="epochs between retrieval evaluations"
    )
    group.add_argument(
        "--text-model",
        metavar="DIR",
        help="folder (or hub name) of the HF text tower and its tokenizer, in place of the model config's own",
    )
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, RecipeConfig]:
    """Parse a command line into open_clip's namespace and our config.

    The namespace also carries our flags when any was given, so that open_clip writes them to params.txt.

    Raises:
        UserError: values out of range, or flags that contradict each other, named in one sentence.
    """
    parser = build_parser()
    if any(argument in ("-h", "--help") for argument in argv):
        parser.print_help()
        print("\nopen_clip's own flags (--train-data also takes named sources and folders, see above):\n")
        parse_open_clip_args(["--help"])  # prints and exits
    ours, rest = parser.parse_known_args(list(argv))
    args = parse_open_clip_args(rest)
    sampling = _sampling(ours, args)
    values = {field.name: getattr(ours, field.name) for field in fields(RecipeConfig) if field.name != "sampling"}
    if values["text_model"] and os.path.isdir(values["text_model"]):
        values["text_model"] = os.path.abspath(values["text_model"])  # params.txt is read from other folders, too
    config = RecipeConfig(
        sampling=sampling, **{**values, "ablate": _once(values["ablate"]), "freeze": _once(values["freeze"])}
    )
    check(config, args)
    if config.token_drop is not None:
        args.force_patch_dropout = config.token_drop
    if config.active:
        vars(args).update(asdict(config))
    return args, config


def _once(values: list[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


def _retain(text: str) -> int | str:
    try:
        return parse_retain(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _sampling(ours: argparse.Namespace, args: argparse.Namespace) -> str | None:
    if ours.debiased_sampling and ours.sampling not in (None, "debiased"):
        raise UserError(f"--debiased-sampling and --sampling {ours.sampling} contradict each other; give one of them")
    sampling = "debiased" if ours.debiased_sampling else ours.sampling
    if sampling is None and is_named(args.train_data):
        return "random"
    return sampling
