"""The recipe's flags: open_clip's stay open_clip's, ours are parsed beside them into one validated dataclass.

`parse` hands every argument that is not ours on to `open_clip_train.params.parse_args`, unchanged and in order.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from open_clip_train.params import parse_args as parse_open_clip_args

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.mixture import POLICIES
from open_clip_zerovl.sampling import DRAWS, STRATEGIES
from open_clip_zerovl.sources import CAPTIONS, is_named

ABLATIONS = ("detached-gather", "no-replay")


@dataclass(frozen=True)
class RecipeConfig:
    """Our flags, checked. Defaults mean: open_clip as it is.

    Attributes:
        sampling: how sources make batches, None = the stock data pipeline.
        debiased_draw: exact proportions an epoch, or a draw a step ("iid").
        source_order: `name::name`, the order of sequential sampling.
        captions: what becomes of several captions of an image.
        on_bad_sample: replace bad samples by neighbours and count them, or fail.
        max_bad_share: of a source's samples that may be replaced.
        loader_timeout: seconds without a batch after which the run ends; 0 waits forever.
        dga_steps: K micro-batches make one optimizer step (section 4.1).
        dga_retain: graphs kept from the first pass, a number or "auto".
        dga_check: when replayed features are compared with the first pass: first, always, never.
        loss_chunk: rows of the logit matrix alive at once.
        ablate: of ABLATIONS, what to do wrong on purpose (Tables 4 and 6).
        coin_flip_mixup, mixup_alpha: mix images or texts of an effective batch, lambda ~ Beta(alpha, alpha) (section 3.2).
        text_augment: share of words masked, replaced or deleted (section 2.2).
        auto_augment: policy applied to images after the crop (A.9).
        token_drop: share of ViT patch tokens dropped in training (section 4.2).
        init_from, init_image, init_text: checkpoint of a dual encoder; raw timm and HF weights (section 4.3).
        freeze: towers that are not trained: image, text.
        cache_frozen: folder that keeps a frozen tower's features of each sample.
        temperature_constant: keep the temperature at its initial value.
        no_embedding_decay: exempt class tokens and embeddings from weight decay.
        warmup_share: share of all steps that warm up.
        lr_min: floor of the cosine schedule.
        save_every_steps: optimizer steps between two step checkpoints.
        keep_checkpoints: step checkpoints kept.
        retrieval_data: `name=folder::name=folder`, evaluated while training.
        retrieval_frequency: epochs between two retrieval evaluations (the last epoch always has one).
        text_model: folder or hub name of the HF text tower, in place of the model config's own.
    """

    sampling: str | None = None
    debiased_draw: str = "exact"
    source_order: str | None = None
    captions: str | None = None
    on_bad_sample: str = "replace"
    max_bad_share: float = 0.10
    loader_timeout: float = 600.0
    dga_steps: int = 1
    dga_retain: int | str = 1
    dga_check: str = "first"
    loss_chunk: int | None = None
    ablate: tuple[str, ...] = ()
    coin_flip_mixup: bool = False
    mixup_alpha: float = 0.1
    text_augment: float | None = None
    auto_augment: str | None = None
    token_drop: float | None = None
    init_from: str | None = None
    init_image: str | None = None
    init_text: str | None = None
    freeze: tuple[str, ...] = ()
    cache_frozen: str | None = None
    temperature_constant: bool = False
    no_embedding_decay: bool = False
    warmup_share: float | None = None
    lr_min: float | None = None
    save_every_steps: int | None = None
    keep_checkpoints: int = 2
    retrieval_data: str | None = None
    retrieval_frequency: int = 1
    text_model: str | None = None

    @property
    def active(self) -> bool:
        """Whether any of our flags was given; if not, the run is open_clip's own."""
        return self != RecipeConfig()

    @property
    def step_flags(self) -> bool:
        """Whether a flag asks for our optimizer step (DGA and ContrastiveLoss) by itself."""
        stock = RecipeConfig()
        names = ("dga_steps", "dga_retain", "dga_check", "loss_chunk", "ablate", "coin_flip_mixup")
        return any(getattr(self, name) != getattr(stock, name) for name in names)


def uses_own_step(config: RecipeConfig, args: argparse.Namespace) -> bool:
    """Whether the run takes our optimizer step: with a step flag, or with our sampling where the model allows it.

    A mixture alone also takes it, because over several ranks open_clip's default gather gives 1/W of the gradient; CoCa and
    distillation, whose losses the step does not know, then keep open_clip's.
    """
    return config.step_flags or (config.sampling is not None and not _foreign_loss(args))


def _foreign_loss(args: argparse.Namespace) -> bool:
    return "coca" in args.model.lower() or args.distill_model is not None


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
        help="retrieval sets in CLIP_benchmark's webdataset layout; recall@1/5/10 and RSUM are logged while training",
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
    _check(config, args)
    if config.token_drop is not None:
        args.force_patch_dropout = config.token_drop
    if config.active:
        vars(args).update(asdict(config))
    return args, config


def _once(values: list[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


def _retain(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _sampling(ours: argparse.Namespace, args: argparse.Namespace) -> str | None:
    if ours.debiased_sampling and ours.sampling not in (None, "debiased"):
        raise UserError(f"--debiased-sampling and --sampling {ours.sampling} contradict each other; give one of them")
    sampling = "debiased" if ours.debiased_sampling else ours.sampling
    if sampling is None and is_named(args.train_data):
        return "random"
    return sampling


# open_clip flags that cannot work with one of ours: (its name, when it is on, our flag, when that is on, why and what to do)
def _refusals(config: RecipeConfig, args: argparse.Namespace):
    mixture = config.sampling is not None
    own_step = uses_own_step(config, args)
    step = "the recipe's step (--sampling, --dga-steps, --loss-chunk ...)"
    named = "named sources or --sampling"
    yield args.horovod, "--horovod", config.active, "the recipe's flags", "use torchrun"
    yield (
        args.accum_freq > 1,
        f"--accum-freq {args.accum_freq}",
        own_step or mixture,
        step,
        "it multiplies the temperature's gradient by its number and redraws dropout; give --dga-steps instead",
    )
    yield (
        args.local_loss and not args.gather_with_grad,
        "--local-loss without --gather-with-grad",
        own_step and "detached-gather" not in config.ablate,
        step,
        "it loses the other ranks' gradients (paper section 4.1); leave both out, the recipe's loss is local and exact, or ask "
        "for the ablation with --ablate detached-gather",
    )
    yield (
        args.ddp_static_graph,
        "--ddp-static-graph",
        own_step,
        step,
        "a static graph counts on one backward pass a step, and the recipe's step takes one a micro-batch",
    )
    yield (
        "coca" in args.model.lower(),
        f"--model {args.model}",
        config.step_flags,
        "--dga-steps, --dga-retain, --dga-check, --loss-chunk or --ablate",
        "CoCa's generative loss cannot be decoupled from its graph",
    )
    yield (
        args.distill_model is not None,
        "--distill-model",
        config.step_flags,
        "--dga-steps, --dga-retain, --dga-check, --loss-chunk or --ablate",
        "the distillation loss needs the teacher's features of the whole effective batch",
    )
    yield (
        args.siglip,
        "--siglip",
        bool(config.loss_chunk or config.ablate or config.coin_flip_mixup),
        "--loss-chunk, --ablate or --coin-flip-mixup",
        "they belong to the softmax loss",
    )
    yield (
        not config.coin_flip_mixup,
        "no --coin-flip-mixup",
        config.mixup_alpha != RecipeConfig.mixup_alpha,
        "--mixup-alpha",
        "it is mixup's parameter; give both",
    )
    yield (
        not mixture,
        "open_clip's own data pipeline",
        config.text_augment is not None,
        "--text-augment",
        "name the sources: --train-data NAME=SHARDS",
    )
    yield (
        args.force_patch_dropout is not None,
        f"--force-patch-dropout {args.force_patch_dropout}",
        config.token_drop is not None,
        "--token-drop",
        "they are the same; give one",
    )
    yield (
        "image" in config.freeze,
        "--freeze image",
        config.token_drop is not None,
        "--token-drop",
        "a frozen tower drops nothing",
    )
    for tower, locked in (("image", args.lock_image), ("text", args.lock_text)):
        yield locked, f"--lock-{tower}", tower in config.freeze, f"--freeze {tower}", "give one of them"
    yield (
        len(config.freeze) == 2,
        "--freeze of both towers",
        not config.init_from and not config.init_image and not config.init_text,
        "towers from scratch",
        "nothing but the temperature would be trained",
    )
    yield (
        len(config.freeze) != 1 or not mixture or not own_step,
        "anything but one frozen tower on named sources",
        config.cache_frozen is not None,
        "--cache-frozen",
        "give --freeze image or --freeze text and name the sources",
    )
    yield (
        config.freeze == ("text",) and config.text_augment is not None,
        "--text-augment",
        config.cache_frozen is not None,
        "--cache-frozen",
        "augmented captions have other features each epoch",
    )
    yield (
        config.coin_flip_mixup and config.freeze == ("image",),
        "--coin-flip-mixup",
        config.cache_frozen is not None,
        "--cache-frozen of the image tower",
        "mixed images have other features each step",
    )
    yield (
        "timm" in args.opt,
        f"--opt {args.opt}",
        config.no_embedding_decay,
        "--no-embedding-decay",
        "timm's optimizers group parameters by their own rule",
    )
    yield (
        args.lr_scheduler != "cosine",
        f"--lr-scheduler {args.lr_scheduler}",
        config.warmup_share is not None,
        "--warmup-share",
        "give --warmup in steps",
    )
    yield (
        not mixture or not own_step,
        "open_clip's own data or step",
        config.save_every_steps is not None,
        "--save-every-steps",
        "exact resume needs the mixture; name the sources: --train-data NAME=SHARDS",
    )
    yield (
        args.save_most_recent,
        "--save-most-recent",
        config.save_every_steps is not None,
        "--save-every-steps",
        "open_clip would resume from epoch_latest.pt and not from the newer step checkpoint; leave it out",
    )
    for flag in ("captions", "on_bad_sample", "max_bad_share", "loader_timeout"):
        yield (
            not mixture,
            "open_clip's own data pipeline",
            getattr(config, flag) != getattr(RecipeConfig, flag),
            f"--{flag.replace('_', '-')}",
            "name the sources: --train-data NAME=SHARDS",
        )
    yield args.trace, "--trace", config.active, "the recipe's flags", "a traced model cannot be trained"
    yield (
        config.sampling != "sequential",
        f"--sampling {config.sampling}",
        config.source_order is not None,
        "--source-order",
        "the order is that of --sampling sequential",
    )
    yield (
        config.sampling != "debiased",
        f"--sampling {config.sampling}",
        config.debiased_draw != "exact",
        "--debiased-draw iid",
        "it is a way of --debiased-sampling",
    )
    yield (
        args.dataset_type not in ("auto", "webdataset"),
        f"--dataset-type {args.dataset_type}",
        mixture,
        named,
        "sources are webdataset shards",
    )
    yield (
        not args.train_data,
        "no --train-data",
        mixture,
        "--sampling",
        "name the sources: --train-data NAME=SHARDS::...",
    )
    yield (
        args.lr_scheduler != "cosine",
        f"--lr-scheduler {args.lr_scheduler}",
        config.lr_min is not None,
        "--lr-min",
        "it is the floor of the cosine schedule",
    )


def _check(config: RecipeConfig, args: argparse.Namespace) -> None:
    for stock_on, stock, ours_on, ours, advice in _refusals(config, args):
        if stock_on and ours_on:
            raise UserError(f"{stock} does not work with {ours}: {advice}")
    for flag, value, good, wanted in (
        (
            "--lr-min",
            config.lr_min,
            config.lr_min is None or 0 <= config.lr_min <= (args.lr or 0),
            f"0 to --lr {args.lr}",
        ),
        ("--max-bad-share", config.max_bad_share, 0 <= config.max_bad_share <= 1, "a share from 0 to 1"),
        ("--loader-timeout", config.loader_timeout, config.loader_timeout >= 0, "seconds, or 0"),
        ("--mixup-alpha", config.mixup_alpha, config.mixup_alpha > 0, "a positive number"),
        *(
            (flag, value, value is None or 0 < value < 1, "a share between 0 and 1")
            for flag, value in (
                ("--text-augment", config.text_augment),
                ("--token-drop", config.token_drop),
                ("--warmup-share", config.warmup_share),
            )
        ),
        ("--retrieval-frequency", config.retrieval_frequency, config.retrieval_frequency >= 1, "at least 1 epoch"),
        ("--dga-steps", config.dga_steps, config.dga_steps >= 1, "at least 1"),
        (
            "--dga-retain",
            config.dga_retain,
            isinstance(config.dga_retain, str) or 0 <= config.dga_retain <= max(1, config.dga_steps),
            f"auto, or 0 to --dga-steps {config.dga_steps}",
        ),
        (
            "--save-every-steps",
            config.save_every_steps,
            config.save_every_steps is None or config.save_every_steps >= 1,
            "at least 1 step",
        ),
        ("--keep-checkpoints", config.keep_checkpoints, config.keep_checkpoints >= 1, "at least 1"),
        ("--loss-chunk", config.loss_chunk, config.loss_chunk is None or config.loss_chunk >= 1, "at least 1 row"),
        ("--batch-size", args.batch_size, args.batch_size >= 1, "at least 1"),
        ("--accum-freq", args.accum_freq, args.accum_freq >= 1, "at least 1"),
        ("--workers", args.workers, args.workers >= 0, "0 or more"),
        ("--epochs", args.epochs, args.epochs >= 1, "at least 1"),
    ):
        if not good:
            raise UserError(f"{flag} {value} is out of range; give {wanted}")
