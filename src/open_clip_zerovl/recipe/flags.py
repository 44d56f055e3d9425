"""The flags of training, each declared once: default, type, choices, range, help, and what it contradicts.

A flag is a field of a dataclass here. From it follow the parsers of `python -m training.main` and `zerovl plan`, the fields of
`RecipeConfig` and `PlanSettings`, and the checks of both. Nothing here needs torch, so that a help text or a refusal is
printed at once.

    dga_steps: int = flag(1, "K micro-batches make one effective batch", metavar="K", range=at_least(1))
    # --dga-steps K, an int, 1 where it is not given, refused below 1

`RecipeConfig` are ours, by section. `OpenClipFlags` are those of open_clip's own flags that a plan depends on or that have a
range; `open_clip_train.params` declares them, and a test compares the two.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from open_clip_zerovl.data.names import (
    AUTO_AUGMENTS,
    CAPTIONS,
    DRAWS,
    PIXEL_PATH,
    PIXEL_PATHS,
    POLICIES,
    STRATEGIES,
    is_captions,
    is_named,
)
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.losses.names import POSITIVES

TOWERS = ("image", "text")
ABLATIONS = ("detached-gather", "no-replay")
PRECISIONS = ("amp", "amp_bf16", "amp_bfloat16", "bf16", "fp16", "pure_bf16", "pure_fp16", "fp32")  # open_clip's


# ---------------------------------------------------------------------------------------------------------------------
# What a declaration consists of
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """The values that a flag may have.

    Attributes:
        wanted: in words; `{name}` stands for another flag's value.
        holds: (value, all flags' values) -> whether the value is in the range.
    """

    wanted: str
    holds: Callable[[Any, AllFlags], bool]


def at_least(low: float, unit: str = "") -> Range:
    """`low` or more; `unit` belongs to the words alone."""
    return Range(f"at least {low}{unit and ' ' + unit}", lambda value, _: value >= low)


SHARE = Range("a share between 0 and 1", lambda value, _: 0 < value < 1)
NOT_NEGATIVE = Range("0 or more", lambda value, _: value >= 0)
BETA = Range("0 to less than 1", lambda value, _: 0 <= value < 1)
POSITIVE = Range("a positive number", lambda value, _: value > 0)


@dataclass(frozen=True)
class Contradiction:
    """Something that a flag does not work with.

    Attributes:
        other: how it is called in the sentence; `{name}` stands for a flag's value.
        when: whether it is the case.
        advice: what to do.
        flag: how the flag itself is called, where its name alone would not say enough.
    """

    other: str
    when: Callable[[AllFlags], bool]
    advice: str
    flag: str | None = None


@dataclass(frozen=True)
class Switch:
    """A switch that stands for one value of a flag: `--debiased-sampling` for `--sampling debiased`."""

    option: str
    value: str
    help: str


@dataclass(frozen=True)
class Flag:
    """One flag, as declared by a field.

    Attributes:
        name: of the field; `option` is its form on a command line.
        kind: makes the value of a word; bool is a switch.
        several: the flag may be given several times; its value is a sorted tuple without repetition.
        nargs: argparse's.
        planned: whether `zerovl plan` takes it; False, or a reason in words, where it is passed over.
    """

    name: str
    default: Any
    help: str
    kind: Callable[[str], Any]
    choices: tuple[str, ...] | None
    metavar: str | None
    several: bool
    nargs: str | None
    range: Range | None
    contradicts: tuple[Contradiction, ...]
    planned: bool | str
    switch: Switch | None

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


def flag(
    default: Any,
    help: str = "",
    *,
    kind: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    nargs: str | None = None,
    range: Range | None = None,
    contradicts: tuple[Contradiction, ...] = (),
    planned: bool | str = True,
    switch: Switch | None = None,
) -> Any:
    """A dataclass field that declares a flag; see `Flag`. `kind` is the field's type unless given, `dict` an empty dict."""
    declared = {
        "help": help, "kind": kind, "choices": choices, "metavar": metavar, "nargs": nargs, "range": range,
        "contradicts": contradicts, "planned": planned, "switch": switch,
    }  # fmt: skip
    if default is dict:
        return field(default_factory=dict, metadata={"flag": declared})
    return field(default=default, metadata={"flag": declared})


def redeclared(section: type, name: str, default: Any) -> Any:
    """The flag `name` of a section, as a field of a subclass that has another default for it."""
    return field(default=default, metadata=section.__dataclass_fields__[name].metadata)  # type: ignore[attr-defined]


@cache
def flags_of(section: type) -> tuple[Flag, ...]:
    """The flags that a dataclass declares or inherits, in order."""
    hints = typing.get_type_hints(section)
    found = []
    for each in fields(section):
        if (declared := each.metadata.get("flag")) is None:
            continue
        kinds = [kind for kind in _alternatives(hints[each.name]) if kind is not type(None)]
        several = typing.get_origin(kinds[0]) is tuple and declared["nargs"] is None
        inner = typing.get_args(kinds[0])[0] if typing.get_origin(kinds[0]) is tuple else kinds[0]
        default = {} if each.default is dataclasses.MISSING else each.default
        found.append(Flag(each.name, default, several=several, **{**declared, "kind": declared["kind"] or inner}))
    return tuple(found)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


# ---------------------------------------------------------------------------------------------------------------------
# Values that are more than a number or a word
# ---------------------------------------------------------------------------------------------------------------------


def retain(text: str) -> int | str:
    """The value of `--dga-retain`: a number of graphs, or "auto"."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of micro-batches nor auto")
    return text if text == "auto" else int(text)


def key_value(text: str) -> tuple[str, Any]:
    """A word of open_clip's `--aug-cfg`: `scale=(0.6,1.0)` is ("scale", (0.6, 1.0)); what is no Python value is a string."""
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is no key=value")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _are_sides(value: int | Sequence[int]) -> bool:
    sides = (value,) if isinstance(value, int) else value
    return len(sides) in (1, 2) and min(sides) >= 1


# ---------------------------------------------------------------------------------------------------------------------
# Ours
# ---------------------------------------------------------------------------------------------------------------------

NAME_THEM = "name the sources: --train-data NAME=SHARDS"
_STOCK_DATA = Contradiction("open_clip's own data pipeline", lambda given: not given.mixture, NAME_THEM)


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Sources and their batches (sections 3.1, A.4)"""

    sampling: str | None = flag(
        None,
        "how the sources of --train-data make batches",
        choices=STRATEGIES,
        switch=Switch(
            "--debiased-sampling",
            "debiased",
            "every optimizer step draws from one source, over all ranks and micro-batches; the same as --sampling debiased. "
            "Name the sources: --train-data sbu=SHARDS::vg=SHARDS",
        ),
        contradicts=(
            Contradiction("no --train-data", lambda given: not given.train_data and given.trains, NAME_THEM + "::..."),
        ),
    )
    debiased_draw: str = flag(
        "exact",
        "exact: every source in exact proportion each epoch; iid: a source drawn for each step, as the paper's released "
        "code does (default %(default)s)",
        choices=DRAWS,
        contradicts=(
            Contradiction(
                "--sampling {strategy}",
                lambda given: given.sampling != "debiased",
                "it is a way of --debiased-sampling",
                flag="--debiased-draw iid",
            ),
        ),
    )
    source_order: str | None = flag(
        None,
        "order of the sources in --sampling sequential (default: as given)",
        metavar="NAME::NAME",
        contradicts=(
            Contradiction(
                "--sampling {strategy}",
                lambda given: given.sampling != "sequential",
                "the order is that of --sampling sequential",
            ),
        ),
    )
    captions: str | None = flag(
        None,
        "several captions of an image (lines of a txt, rows of a table): show one an epoch, or make each a sample; "
        "txt=0.5,KEY=0.5 draws each time between the txt and a key of the sample's json (MEMBER:KEY of another member)",
        metavar="{one-per-epoch,all}|FIELD=SHARE,...",
        range=Range(f"{', '.join(CAPTIONS)} or FIELD=SHARE,...", lambda value, _: is_captions(value)),
        contradicts=(_STOCK_DATA,),
    )
    on_bad_sample: str = flag(
        "replace",
        "replace a sample that cannot be used by a neighbour of its source and count it, or fail (default %(default)s)",
        choices=POLICIES,
        contradicts=(_STOCK_DATA,),
    )
    pixel_path: str = flag(
        PIXEL_PATH,
        "decode and resize pictures by PIL, or on arrays by libjpeg-turbo and torch: the same pictures to rounding, faster "
        "(default %(default)s)",
        choices=PIXEL_PATHS,
        contradicts=(_STOCK_DATA,),
    )
    max_bad_share: float = flag(
        0.10,
        "stop when a source has lost more of its samples (default %(default)s)",
        metavar="SHARE",
        range=Range("a share from 0 to 1", lambda value, _: 0 <= value <= 1),
        contradicts=(_STOCK_DATA,),
        planned=False,
    )
    shard_cache: str | None = flag(
        None,
        "keep remote shards in DIR, on a local disk: each is fetched once and read from there",
        metavar="DIR",
        contradicts=(_STOCK_DATA,),
        planned="the plan reads remote shards as they come",
    )
    shard_cache_gib: float = flag(
        100.0,
        "GiB that --shard-cache may take; what was not read for longest makes room (default %(default)s)",
        metavar="N",
        range=POSITIVE,
        contradicts=(
            Contradiction(
                "no --shard-cache", lambda given: given.shard_cache is None, "it is the cache's bound; give both"
            ),
        ),
        planned="it is a bound of --shard-cache",
    )
    loader_timeout: float = flag(
        600.0,
        "stop when no batch comes for so long, and name what is being read; 0 waits forever (default %(default)s)",
        metavar="SECONDS",
        range=Range("seconds, or 0", lambda value, _: value >= 0),
        contradicts=(_STOCK_DATA,),
    )


@dataclass(frozen=True, kw_only=True)
class DgaFlags:
    """Decoupled gradient accumulation (section 4.1)"""

    dga_steps: int = flag(
        1,
        "K micro-batches of --batch-size per rank make one exact effective batch, in the memory of one",
        metavar="K",
        range=at_least(1),
    )
    dga_retain: int | str = flag(
        1,
        "micro-batches whose graph is kept instead of forwarded twice; auto: as many as free memory allows",
        kind=retain,
        metavar="R|auto",
        range=Range(
            "auto, or 0 to --dga-steps {dga_steps}",
            lambda value, given: (
                isinstance(value, str) or given.dga_steps is None or 0 <= value <= max(1, given.dga_steps)
            ),
        ),
    )
    dga_check: str = flag(
        "first",
        "when to compare the replayed forward pass with the first one",
        choices=("first", "always", "never"),
        planned=False,
    )
    sort_text: bool = flag(
        False,
        "sort the texts of a step by length over its micro-batches and cut each micro-batch to its longest: the same "
        "gradient, less padding computed",
        planned="texts are planned at the tokenizer's length",
        contradicts=(
            Contradiction(
                "--cache-frozen of the text tower",
                lambda given: given.cache_frozen is not None and given.freeze == ("text",),
                "texts whose features are kept are not forwarded; leave it out",
            ),
            Contradiction("--torchscript", lambda given: given.torchscript, "a scripted model cannot be changed"),
        ),
    )
    loss_chunk: int | None = flag(
        None, "rows of the logit matrix alive at once (default: all)", metavar="ROWS", range=at_least(1, "row")
    )
    ablate: tuple[str, ...] = flag(
        (),
        "for the paper's ablations only, wrong on purpose: gather without gradient (Table 4), other dropout masks in the "
        "second pass (Table 6)",
        choices=ABLATIONS,
        planned=False,
    )


_DETACHED_GATHER = Contradiction(
    "--ablate detached-gather",
    lambda given: "detached-gather" in given.ablate,
    "it is the paper's comparison of the plain loss",
)


@dataclass(frozen=True, kw_only=True)
class LossFlags:
    """Negatives and targets of the loss"""

    cross_source_weight: float = flag(
        1.0,
        "how often a negative of another source counts in the loss of a batch that mixes sources: 0 leaves them out, 1 is "
        "the plain loss (default %(default)s)",
        metavar="W",
        range=NOT_NEGATIVE,
        contradicts=(
            _STOCK_DATA,
            Contradiction(
                "--sampling {strategy}",
                lambda given: given.strategy != "random",
                "a batch from one source has no negatives of others; give --sampling random",
            ),
            Contradiction(
                "--coin-flip-mixup",
                lambda given: given.coin_flip_mixup,
                "a sample mixed from two sources belongs to neither; leave one of them out",
            ),
            _DETACHED_GATHER,
        ),
        planned=False,
    )
    positives: str = flag(
        "pair",
        "samples of the effective batch with the same caption, the same image, or either (both), share the target evenly "
        "(default %(default)s: each pair for itself)",
        choices=POSITIVES,
        contradicts=(
            _STOCK_DATA,
            Contradiction(
                "--coin-flip-mixup",
                lambda given: given.coin_flip_mixup,
                "a mixed sample has two captions and pictures; leave one of them out",
            ),
            _DETACHED_GATHER,
        ),
        planned=False,
    )


_NO_TEACHER = Contradiction("no --teacher", lambda given: given.teacher is None, "it is of the teachers; give both")


@dataclass(frozen=True, kw_only=True)
class TeacherFlags:
    """Distillation from stored teachers"""

    teacher: str | None = flag(
        None,
        "learn from the embeddings that `zerovl teacher` has stored in DIR, and show the views that it has stored",
        metavar="DIR",
        contradicts=(
            _STOCK_DATA,
            Contradiction(
                "--coin-flip-mixup",
                lambda given: given.coin_flip_mixup,
                "no teacher has seen the mixed samples; leave one of them out",
            ),
            _DETACHED_GATHER,
        ),
        planned="neither its rows nor its part of the loss are in the plan",
    )
    distill_weight: float = flag(
        1.0,
        "share of the distillation in the loss; the rest is the contrastive loss (default %(default)s)",
        metavar="W",
        range=Range("above 0 and up to 1", lambda value, _: 0 < value <= 1),
        contradicts=(_NO_TEACHER,),
        planned=False,
    )
    distill_temperature: float = flag(
        0.01,
        "temperature of the teachers' softmaxes (default %(default)s, a scale of 100)",
        metavar="T",
        range=POSITIVE,
        contradicts=(_NO_TEACHER,),
        planned=False,
    )


@dataclass(frozen=True, kw_only=True)
class AugmentationFlags:
    """Mixup, augmentation and token drop (sections 2.2, 3.2, 4.2, A.9)"""

    coin_flip_mixup: bool = flag(
        False, "mix either the images or the texts of each effective batch, by a coin (section 3.2)"
    )
    mixup_alpha: float = flag(
        0.1,
        "lambda ~ Beta(A, A) (default %(default)s)",
        metavar="A",
        range=POSITIVE,
        contradicts=(
            Contradiction(
                "no --coin-flip-mixup", lambda given: not given.coin_flip_mixup, "it is mixup's parameter; give both"
            ),
        ),
    )
    text_augment: float | None = flag(
        None,
        "share of words processed: half masked, a tenth replaced, the rest deleted (section 2.2: 0.2)",
        metavar="SHARE",
        range=SHARE,
        contradicts=(_STOCK_DATA,),
    )
    auto_augment: str | None = flag(
        None, "AutoAugment policy, after the crop (A.9); crop: --aug-cfg scale=(0.6,1.0)", choices=AUTO_AUGMENTS
    )
    token_drop: float | None = flag(
        None,
        "share of ViT patch tokens dropped in training (section 4.2: 0.25); the paper's name for --force-patch-dropout",
        metavar="SHARE",
        range=SHARE,
        contradicts=(
            Contradiction(
                "--force-patch-dropout {force_patch_dropout}",
                lambda given: given.force_patch_dropout is not None,
                "they are the same; give one",
            ),
            Contradiction(
                "--freeze image", lambda given: "image" in given.freeze, "a frozen tower drops nothing"
            ),
        ),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TowerFlags:
    """Starting weights and auxiliary encoders (section 4.3)"""

    text_model: str | None = flag(
        None,
        "folder (or hub name) of the HF text tower and its tokenizer, in place of the model config's own",
        metavar="DIR",
    )
    init_from: str | None = flag(
        None, "start from a checkpoint's towers, each where all its shapes fit", metavar="CKPT"
    )
    init_image: str | None = flag(None, "start the image tower from raw timm weights", metavar="FILE")
    init_text: str | None = flag(None, "start the text tower from raw HF weights", metavar="FILE|DIR")
    freeze: tuple[str, ...] = flag(
        (),
        "do not train this tower and its projection (auxiliary encoder)",
        choices=TOWERS,
        contradicts=(
            *(
                Contradiction(
                    f"--lock-{tower}",
                    lambda given, tower=tower: tower in given.freeze and getattr(given, f"lock_{tower}"),  # type: ignore[misc]
                    "give one of them",
                    flag=f"--freeze {tower}",
                )
                for tower in TOWERS
            ),
            Contradiction(
                "--freeze image",
                lambda given: len(given.freeze) == len(TOWERS),
                "nothing but the temperature would be trained; freeze one",
                flag="--freeze text",
            ),
        ),
    )
    cache_frozen: str | None = flag(
        None,
        "keep the frozen tower's features of each sample in DIR and reuse them",
        metavar="DIR",
        planned="the plan is for an epoch that fills the cache",
        contradicts=(
            Contradiction(
                "anything but one frozen tower on named sources",
                lambda given: len(given.freeze) != 1 or not given.mixture or not given.own_step,
                "give --freeze image or --freeze text and name the sources",
            ),
            Contradiction(
                "--text-augment",
                lambda given: given.freeze == ("text",) and given.text_augment is not None,
                "augmented captions have other features each epoch",
            ),
            Contradiction(
                "--captions {captions}",
                lambda given: given.freeze == ("text",) and given.captions not in (None, "all"),
                "another caption each epoch has other features; use --captions all",
            ),
            Contradiction(
                "--coin-flip-mixup",
                lambda given: given.freeze == ("image",) and given.coin_flip_mixup,
                "mixed images have other features each step",
                flag="--cache-frozen of the image tower",
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """Optimisation (sections 2.2, A.9)"""

    temperature_constant: bool = flag(False, "keep the temperature at its initial value")
    no_embedding_decay: bool = flag(
        False,
        "exempt class tokens, position and token embeddings from weight decay, which open_clip decays",
        contradicts=(
            Contradiction(
                "--opt {opt}",
                lambda given: "timm" in given.opt,
                "timm's optimizers group parameters by their own rule",
            ),
        ),
    )
    warmup_share: float | None = flag(
        None,
        "warm up over this share of all steps (released code: 0.025)",
        metavar="SHARE",
        range=SHARE,
        planned=False,
        contradicts=(
            Contradiction(
                "--lr-scheduler {lr_scheduler}", lambda given: given.lr_scheduler != "cosine", "give --warmup in steps"
            ),
            Contradiction(
                "--skip-scheduler", lambda given: given.skip_scheduler, "without a schedule nothing warms up"
            ),
            Contradiction(
                "--warmup {warmup}",
                lambda given: given.warmup != OpenClipFlags.warmup,
                "it is the share and the number of the same steps; give one",
            ),
        ),
    )
    lr_min: float | None = flag(
        None,
        "floor of the cosine learning rate (the paper's: 1e-5)",
        metavar="LR",
        range=Range("0 to --lr {lr}", lambda value, given: 0 <= value <= (given.lr or 0)),
        planned=False,
        contradicts=(
            Contradiction(
                "--lr-scheduler {lr_scheduler}",
                lambda given: given.lr_scheduler != "cosine",
                "it is the floor of the cosine schedule",
            ),
            Contradiction(
                "--skip-scheduler", lambda given: given.skip_scheduler, "without a schedule the rate stays at --lr"
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Step checkpoints"""

    save_every_steps: int | None = flag(
        None,
        "write a checkpoint every so many optimizer steps; --resume latest goes on from the newest, exactly",
        metavar="STEPS",
        range=at_least(1, "step"),
        contradicts=(
            Contradiction(
                "open_clip's own data or step",
                lambda given: not given.mixture or not given.own_step,
                f"exact resume needs the mixture; {NAME_THEM}",
            ),
            Contradiction(
                "--save-most-recent",
                lambda given: given.save_most_recent,
                "open_clip would resume from epoch_latest.pt and not from the newer step checkpoint; leave it out",
            ),
        ),
    )
    keep_checkpoints: int = flag(
        2, "step checkpoints kept (default %(default)s)", metavar="N", range=at_least(1)
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RetrievalFlags:
    """Retrieval while training (sections 5.1, 5.2)"""

    retrieval_data: str | None = flag(
        None,
        "retrieval sets (CLIP_benchmark's layout, Karpathy's JSON@PICTURES, ZeroVL's CSV@PICTURES); recall@1/5/10 and RSUM "
        "are logged while training",
        metavar="NAME=DIR::...",
    )
    retrieval_frequency: int = flag(
        1, "epochs between retrieval evaluations", metavar="EPOCHS", range=at_least(1, "epoch"), planned=False
    )


SECTIONS = (
    SourceFlags, DgaFlags, LossFlags, TeacherFlags, AugmentationFlags, TowerFlags, OptimizerFlags, CheckpointFlags,
    RetrievalFlags,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(
    RetrievalFlags,
    CheckpointFlags,
    OptimizerFlags,
    TowerFlags,
    AugmentationFlags,
    TeacherFlags,
    LossFlags,
    DgaFlags,
    SourceFlags,
):
    """All flags of ours. Their defaults mean: open_clip as it is."""

    @property
    def active(self) -> bool:
        """Whether any of our flags was given; if not, the run is open_clip's own."""
        return any(getattr(self, each.name) != each.default for each in flags_of(RecipeConfig))

    @property
    def step_flags(self) -> bool:
        """Whether a flag asks for our optimizer step (DGA and ContrastiveLoss) by itself."""
        of_step = (*flags_of(DgaFlags), *flags_of(LossFlags), *flags_of(TeacherFlags))
        return self.coin_flip_mixup or any(getattr(self, each.name) != each.default for each in of_step)


# ---------------------------------------------------------------------------------------------------------------------
# open_clip's own that a plan or a check depends on, with its defaults
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OpenClipFlags:
    """Training flags that matter, as python -m training.main takes them"""

    model: str = flag("RN50", metavar="NAME")
    train_data: str | None = flag(None, metavar="TEXT")
    train_data_upsampling_factors: str | None = flag(None, metavar="TEXT")
    train_num_samples: int | None = flag(None, metavar="N", range=at_least(1))
    dataset_type: str = flag("auto", choices=("webdataset", "csv", "synthetic", "auto"), planned=False)
    dataset_resampled: bool = flag(False)
    batch_size: int = flag(64, metavar="N", range=at_least(1))
    accum_freq: int = flag(1, metavar="N", range=at_least(1), planned="give --dga-steps in its place")
    epochs: int = flag(32, metavar="N", range=at_least(1))
    workers: int = flag(4, metavar="N", range=NOT_NEGATIVE)
    precision: str = flag("amp", choices=PRECISIONS)
    device: str = flag("cuda", metavar="TEXT")
    seed: int = flag(0, metavar="N", range=Range("0 to 4294967295", lambda value, _: 0 <= value < 2**32))

    lr: float | None = flag(None, metavar="X", range=NOT_NEGATIVE, planned=False)
    beta1: float | None = flag(None, metavar="X", range=BETA, planned=False)
    beta2: float | None = flag(None, metavar="X", range=BETA, planned=False)
    eps: float | None = flag(None, metavar="X", range=NOT_NEGATIVE, planned=False)
    momentum: float | None = flag(None, metavar="X", range=BETA, planned=False)
    wd: float = flag(0.2, metavar="X", range=NOT_NEGATIVE)
    warmup: int = flag(10000, metavar="N", range=NOT_NEGATIVE)
    skip_scheduler: bool = flag(False, planned=False)
    opt: str = flag(
        "adamw",
        metavar="TEXT",
        range=Range(
            "adamw, or timm/NAME", lambda value, _: value.lower() == "adamw" or value.lower().startswith("timm/")
        ),
        planned="AdamW is planned",
    )
    lr_scheduler: str = flag(
        "cosine",
        metavar="TEXT",
        range=Range("cosine, const or const-cooldown", lambda value, _: value in ("cosine", "const", "const-cooldown")),
        planned=False,
    )
    epochs_cooldown: int | None = flag(
        None, range=Range("0 to --epochs {epochs}", lambda value, given: 0 <= value <= given.epochs), planned=False
    )
    lr_cooldown_end: float = flag(0.0, range=NOT_NEGATIVE, planned=False)
    lr_cooldown_power: float = flag(1.0, range=NOT_NEGATIVE, planned=False)
    grad_clip_norm: float | None = flag(None, metavar="X", range=POSITIVE)

    siglip: bool = flag(False)
    distill_model: str | None = flag(None, planned="its teacher's passes are not in the plan")
    distill_pretrained: str | None = flag(None, planned=False)
    local_loss: bool = flag(False, planned=False)
    gather_with_grad: bool = flag(False, planned=False)

    pretrained_image: bool = flag(False)
    lock_image: bool = flag(False)
    lock_image_unlocked_groups: int = flag(0, range=NOT_NEGATIVE, planned="the whole tower counts as locked")
    lock_text: bool = flag(False)
    lock_text_unlocked_layers: int = flag(0, range=NOT_NEGATIVE, planned="the whole tower counts as locked")
    grad_checkpointing: bool = flag(False)
    torchscript: bool = flag(False, planned=False)
    torchcompile: bool = flag(False, planned="steps are timed without it")
    trace: bool = flag(False, planned=False)
    horovod: bool = flag(False, planned=False)
    ddp_static_graph: bool = flag(False, planned=False)
    force_patch_dropout: float | None = flag(
        None, metavar="X", range=Range("a share from 0 to less than 1", lambda value, _: 0 <= value < 1)
    )
    force_image_size: int | tuple[int, ...] | None = flag(
        None,
        kind=int,
        metavar="PX",
        nargs="+",
        range=Range("one side, or height and width, of at least 1 pixel", lambda value, _: _are_sides(value)),
    )
    force_context_length: int | None = flag(None, metavar="N", range=at_least(1))
    image_mean: tuple[float, ...] | None = flag(
        None, metavar="X", nargs="+", range=Range("three numbers", lambda value, _: len(value) == 3)
    )
    image_std: tuple[float, ...] | None = flag(
        None,
        metavar="X",
        nargs="+",
        range=Range("three positive numbers", lambda value, _: len(value) == 3 and min(value) > 0),
    )
    image_interpolation: str | None = flag(None, choices=("bicubic", "bilinear", "random"))
    aug_cfg: dict[str, Any] = flag(dict, kind=key_value, metavar="KEY=VALUE", nargs="*")  # noqa: RUF009 (a field)

    logs: str = flag("./logs/", metavar="TEXT")
    log_every_n_steps: int = flag(100, metavar="N", range=at_least(1), planned=False)
    report_to: str = flag("", metavar="TEXT", planned=False)
    remote_sync_frequency: int = flag(300, metavar="SECONDS", range=at_least(1, "second"), planned=False)
    use_bnb_linear: str | None = flag(None, planned=False)
    loss_dist_impl: str | None = flag(
        None,
        range=Range("bidir, shift, reduce or gather", lambda value, _: value in ("bidir", "shift", "reduce", "gather")),
        planned=False,
    )
    val_num_samples: int | None = flag(None, metavar="N", range=at_least(1), planned=False)
    imagenet_v2: str | None = flag(None, planned=False)
    save_frequency: int = flag(1, metavar="N")
    save_most_recent: bool = flag(False)
    delete_previous_checkpoint: bool = flag(False)


@dataclass(frozen=True, kw_only=True)
class AllFlags(OpenClipFlags, RecipeConfig):
    """The values of all flags that are declared here: what a range or a contradiction is judged by."""

    @property
    def strategy(self) -> str:
        """How sources make batches; open_clip's own pipeline counts as random."""
        return self.sampling or "random"

    @property
    def mixture(self) -> bool:
        """Whether training reads our mixture of sources, and not open_clip's own pipeline."""
        return self.sampling is not None or is_named(self.train_data)

    @property
    def trains(self) -> bool:
        """Whether the flags must say what is trained on; `zerovl plan` may go without."""
        return True

    @property
    def own_step(self) -> bool:
        """Whether the run takes our optimizer step: with a step flag, or with our sampling where the model allows it.

        A mixture alone also takes it, because over several ranks open_clip's default gather gives 1/W of the gradient; CoCa
        and distillation, whose losses the step does not know, then keep open_clip's.
        """
        foreign_loss = "coca" in self.model.lower() or self.distill_model is not None
        return self.step_flags or (self.mixture and not foreign_loss)


def contradicted(given: AllFlags, names: Iterable[str] | None = None) -> Iterator[str]:
    """One sentence for each flag of ours that was given and contradicts something.

    Args:
        names: of the flags to look at; None: all of them.
    """
    for each in flags_of(RecipeConfig):
        if getattr(given, each.name) == each.default or (names is not None and each.name not in names):
            continue
        for one in each.contradicts:
            if one.when(given):
                other = one.other.format_map(_Values(given))
                yield f"{other} does not work with {one.flag or each.option}: {one.advice}"


def out_of_range(given: AllFlags) -> Iterator[str]:
    """One sentence for each value that is out of its flag's range."""
    section: Any = type(given)
    for each in flags_of(section):
        value = getattr(given, each.name)
        if value is not None and each.range is not None and not each.range.holds(value, given):
            yield f"{each.option} {value} is out of range; give {each.range.wanted.format_map(_Values(given))}"


class _Values(dict):
    """Values of flags by name, for `str.format_map`."""

    def __init__(self, given: AllFlags) -> None:
        super().__init__()
        self._given = given

    def __missing__(self, name: str) -> Any:
        return getattr(self._given, name)


# ---------------------------------------------------------------------------------------------------------------------
# In a parser
# ---------------------------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser, sections: Sequence[type], *, plan: bool = False) -> None:
    """Add the flags of some sections, each as a group of its own.

    Args:
        plan: leave out those that `zerovl plan` passes over, and let a flag that is not given leave no value.
    """
    for section in sections:
        group = parser.add_argument_group((section.__doc__ or "").strip())
        for each in flags_of(section):
            if plan and each.planned is not True:
                continue
            if each.switch is not None:
                group.add_argument(each.switch.option, action="store_true", help=each.switch.help)
            help_text = each.help.replace("%(default)s", str(each.default))
            options: dict[str, Any] = {"help": help_text or None, "default": None if plan else each.default}
            if each.kind is bool:
                group.add_argument(each.option, action="store_true", **{**options, "default": False})
                continue
            if each.several:
                options |= {"action": "append", "default": None if plan else []}
            group.add_argument(
                each.option, type=each.kind, choices=each.choices, metavar=each.metavar, nargs=each.nargs, **options
            )


def values_of(parsed: argparse.Namespace | Mapping[str, Any]) -> dict[str, Any]:
    """What a parser of `add_flags` found, as the fields have it; what was not given (None) stays as it is.

    Raises:
        UserError: a switch beside another value of the flag that it stands for.
    """
    values = dict(parsed if isinstance(parsed, Mapping) else vars(parsed))
    for each in (*flags_of(RecipeConfig), *flags_of(OpenClipFlags)):
        if each.switch is not None:
            given = values.pop(each.switch.option.removeprefix("--").replace("-", "_"), False)
            if given and values.get(each.name) not in (None, each.switch.value):
                raise UserError(
                    f"{each.switch.option} and {each.option} {values[each.name]} contradict each other; give one of them"
                )
            if given:
                values[each.name] = each.switch.value
        value = values.get(each.name)
        if value is None:
            continue
        if each.several:
            values[each.name] = tuple(sorted(set(value)))
        elif each.kind is key_value:
            values[each.name] = dict(value)
        elif each.nargs is not None and not isinstance(value, int):
            values[each.name] = value[0] if each.name == "force_image_size" and len(value) == 1 else tuple(value)
    return values
