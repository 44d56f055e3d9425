"""The flags of training, each declared once: default, type, choices, range, help, and the flags that it contradicts.

From the declarations follow the parser of `python -m training.main`, the fields of `RecipeConfig`, and the checks (see
`core.flags`). Nothing here imports torch, so that a help text or a refusal is
printed at once.

`RecipeConfig` has our flags, by section. `OpenClipFlags` are those of open_clip's own flags that a check depends on or that
have a range; `open_clip_train.params` declares them, and a test compares the two.

Other commands write a training's flags as `Settings`, a table from which `as_arguments` makes the command line:

    {"lr": "1e-4", "pretrained-image": "", "wd": None}     --lr 1e-4 --pretrained-image
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import (
    FROM_0_TO_1,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SHARE,
    Range,
    Rule,
    at_least,
    flag,
    flags_of,
    number_or,
)
from open_clip_zerovl.core.releases import line_here
from open_clip_zerovl.data.names import (
    AUTO_AUGMENTS,
    CAPTIONS,
    POLICIES,
    is_captions,
    is_named,
)
from open_clip_zerovl.sampling import STRATEGIES, WHEN_DEBIASED

TOWERS = ("image", "text")
POSITIVES = ("pair", "caption", "image", "both")  # whose samples share a target
ABLATIONS = ("detached-gather", "no-replay")
CAPTIONERS = ("coca", "mammut")  # in the names of models that also learn to write captions
RETRIEVAL_TRANSFORMS = ("checkpoint", "paper")

# ---------------------------------------------------------------------------------------------------------------------
# Ours
# ---------------------------------------------------------------------------------------------------------------------

_NAMED_SOURCES = Rule(
    "{option} needs named sources: --train-data NAME=SHARDS", lambda given: not given.mixture
)


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Sources and their batches (sections 3.1, A.4)"""

    sampling: str | None = flag(
        None,
        "how the sources of --train-data make batches",
        choices=STRATEGIES,
        switch=(
            "--debiased-sampling",
            "debiased",
            "each optimizer step draws from one of the sources of --train-data NAME=SHARDS::NAME=SHARDS: --sampling debiased; "
            f"take it {WHEN_DEBIASED}",
        ),
        rules=(
            Rule(
                "--sampling {sampling} needs --train-data NAME=SHARDS::...",
                lambda given: not given.train_data,
            ),
        ),
    )
    source_order: str | None = flag(
        None,
        "order of the sources in --sampling sequential (default: as given)",
        metavar="NAME::NAME",
        range=Range("names with :: between them, as in sbu::vg", lambda value, _: "," not in value),
        rules=(
            Rule(
                "--source-order needs --sampling sequential",
                lambda given: given.sampling != "sequential",
            ),
        ),
    )
    captions: str | None = flag(
        None,
        "several captions of an image: show one an epoch (default of packed data), make each a sample, show the first alone, "
        "or all as one text; txt=0.5,KEY=0.5 draws between the txt and a key of the json (MEMBER:KEY of another member)",
        metavar="{one-per-epoch,all,first,joined}|FIELD=SHARE,...",
        range=Range(
            f"{', '.join(CAPTIONS)} or FIELD=SHARE,...", lambda value, _: is_captions(value)
        ),
        rules=(_NAMED_SOURCES,),
    )
    on_bad_sample: str = flag(
        "replace",
        "replace a sample that cannot be used by another of its source, or fail",
        choices=POLICIES,
        rules=(_NAMED_SOURCES,),
    )
    max_bad_share: float = flag(
        0.10,
        "stop when a source has lost a larger share of its samples",
        metavar="SHARE",
        range=FROM_0_TO_1,
        rules=(_NAMED_SOURCES,),
    )
    shard_cache: str | None = flag(
        None,
        "the folder of fetched remote shards, on a local disk (default: the user's cache)",
        metavar="DIR",
        rules=(_NAMED_SOURCES,),
    )
    shard_cache_gib: float = flag(
        100.0,
        "GiB that fetched shards may take; the least recently read ones make room",
        metavar="N",
        range=POSITIVE,
        rules=(_NAMED_SOURCES,),
    )


@dataclass(frozen=True, kw_only=True)
class DgaFlags:
    """Decoupled gradient accumulation (section 4.1)"""

    dga_steps: int = flag(
        1,
        "K micro-batches of --batch-size per rank make one exact effective batch, in the memory of one; the best "
        "--lr of a batch 16 times larger was 3 times higher",
        metavar="K",
        range=at_least(1),
    )
    dga_retain: int | str = flag(
        1,
        "micro-batches whose graph is kept instead of forwarded twice; auto: as many as free memory allows",
        kind=number_or("auto"),
        metavar="R|auto",
        range=Range(
            "auto, or 0 to --dga-steps {dga_steps}",
            lambda value, given: (
                isinstance(value, str)
                or given.dga_steps is None
                or 0 <= value <= max(1, given.dga_steps)
            ),
        ),
    )
    dga_check: str = flag(
        "first",
        "when to compare the replayed forward pass with the first one",
        choices=("first", "always", "never"),
        rules=(
            Rule(
                "--dga-check needs --dga-steps of 2 or more",
                lambda given: (given.dga_steps or 1) == 1,
            ),
        ),
    )
    sort_text: bool = flag(
        False,
        "sort a step's texts by length over its micro-batches and cut each to its longest: the same gradient, less padding",
    )
    loss_chunk: int | None = flag(
        None,
        "rows of the logit matrix alive at once (default: all)",
        metavar="ROWS",
        range=at_least(1, "row"),
    )
    ablate: tuple[str, ...] = flag(
        (),
        "a comparison of the paper with wrong gradients (docs/flags.md); may be given several times",
        choices=ABLATIONS,
        metavar="NAME",
        rules=(
            Rule(
                "--dga-retain {dga_retain} with --dga-steps {dga_steps} does not work with --ablate no-replay: no micro-batch "
                "is forwarded twice, so that no mask is drawn anew; give --dga-retain 0",
                lambda given: (
                    "no-replay" in given.ablate
                    and isinstance(given.dga_retain, int)
                    and given.dga_retain >= (given.dga_steps or 1)
                ),
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class LossFlags:
    """Targets of the loss"""

    positives: str | None = flag(
        None,
        "samples that share the target evenly: those with the same caption, the same image, or either (both) (default: caption "
        "where a source was packed from folders of classes, else pair)",
        choices=POSITIVES,
        rules=(
            _NAMED_SOURCES,
            Rule(
                "--coin-flip-mixup does not work with --positives: a mixed sample has two captions and pictures; leave one of "
                "them out",
                lambda given: given.positives != "pair" and given.coin_flip_mixup,
            ),
            Rule(
                "--ablate detached-gather does not work with --positives: it is the paper's comparison of the plain loss",
                lambda given: given.positives != "pair" and "detached-gather" in given.ablate,
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class AugmentationFlags:
    """Mixup, augmentation and token drop (sections 2.2, 3.2, 4.2, A.9)"""

    coin_flip_mixup: bool = flag(
        False, "mix either the images or the texts of each effective batch, by a coin (section 3.2)"
    )
    mixup_alpha: float = flag(
        0.1,
        "lambda ~ Beta(A, A)",
        metavar="A",
        range=POSITIVE,
        rules=(
            Rule("--mixup-alpha needs --coin-flip-mixup", lambda given: not given.coin_flip_mixup),
        ),
    )
    text_augment: float | None = flag(
        None,
        "share of words processed: half masked, a tenth replaced, the rest deleted (section 2.2: 0.2)",
        metavar="SHARE",
        range=SHARE,
        rules=(_NAMED_SOURCES,),
    )
    auto_augment: str | None = flag(
        None,
        "AutoAugment policy, after the crop (A.9); crop: --aug-cfg scale=(0.6,1.0)",
        choices=AUTO_AUGMENTS,
    )
    token_drop: float | None = flag(
        None,
        "share of ViT patch tokens dropped in training (section 4.2: 0.25); the paper's name for --force-patch-dropout",
        metavar="SHARE",
        range=SHARE,
        rules=(
            Rule(
                "--force-patch-dropout {force_patch_dropout} does not work with --token-drop: they are the same; give one",
                lambda given: given.force_patch_dropout is not None,
            ),
            Rule(
                "--freeze image does not work with --token-drop: a frozen tower drops nothing",
                lambda given: "image" in given.freeze,
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TowerFlags:
    """Starting weights and auxiliary encoders (section 4.2)"""

    model_config: str | None = flag(
        None,
        "one's own model as a JSON file, in place of --model; its name is the file's",
        metavar="FILE.json",
    )
    text_model: str | None = flag(
        None,
        "folder (or hub name) of the HF text tower and its tokenizer, in place of the model config's own",
        metavar="DIR",
    )
    init_from: str | None = flag(
        None,
        "start from those towers of a checkpoint whose names and shapes all fit",
        metavar="CKPT",
    )
    init_image: str | None = flag(
        None, "start the image tower from raw timm weights", metavar="FILE"
    )
    init_text: str | None = flag(
        None, "start the text tower from raw HF weights", metavar="FILE|DIR"
    )
    freeze: tuple[str, ...] = flag(
        (),
        "keep this tower and its projection constant (auxiliary encoder)",
        choices=TOWERS,
        rules=(
            Rule(
                "--lock-image does not work with --freeze image: give one of them",
                lambda given: "image" in given.freeze and given.lock_image,
            ),
            Rule(
                "--lock-text does not work with --freeze text: give one of them",
                lambda given: "text" in given.freeze and given.lock_text,
            ),
            Rule(
                "--freeze image does not work with --freeze text: nothing but the temperature would be trained; freeze one",
                lambda given: len(given.freeze) == len(TOWERS),
            ),
        ),
    )
    freeze_norm_statistics: bool = flag(
        False,
        "keep the running statistics of batch norms: they normalise as in evaluation while their weights train (for a tower "
        "that begins trained)",
        rules=(
            Rule(
                "--use-bn-sync does not work with --freeze-norm-statistics: it replaces the norms, and frozen statistics need "
                "no synchronisation; leave it out",
                lambda given: bool(given.given.get("use_bn_sync")),
            ),
        ),
    )
    channels_last: bool = flag(
        False,
        "keep the image tower's convolutions with the channels last in memory: faster for convolutional towers",
    )


_ADAMW = Rule(
    "--opt {opt} does not work with {option}: it is a way of making adamw's groups of parameters",
    lambda given: given.opt.lower() != "adamw",
)


def _rate(of: str) -> Any:
    return flag(
        None,
        f"learning rate of {of} (default: --lr); it follows the schedule of --lr in proportion",
        metavar="LR",
        range=POSITIVE,
        rules=(Rule("{option} needs --lr above 0", lambda given: given.lr == 0), _ADAMW),
    )


@dataclass(frozen=True, kw_only=True)
class TuningFlags:
    """Adapters, and learning rates by part"""

    lora: int | None = flag(
        None,
        "train adapters of rank R on the linear layers of the towers, whose own weights stay as they are; projections and "
        "temperature train whole (needs peft)",
        metavar="R",
        range=at_least(1),
        rules=(
            Rule(
                "--lock-image and --lock-text do not work with --lora: the weights of both towers are constant "
                "already; leave them out",
                lambda given: given.lock_image or given.lock_text,
            ),
            Rule(
                "--freeze of a tower with adapters does not work with --lora: give --lora-on the other tower",
                lambda given: bool(given.freeze) and given.lora_on in ("both", *given.freeze),
            ),
        ),
    )
    lora_on: str = flag(
        "both",
        "towers with adapters; the other one stays as it is",
        choices=(*TOWERS, "both"),
        rules=(Rule("--lora-on needs --lora", lambda given: given.lora is None),),
    )

    lr_image: float | None = _rate("the image tower")
    lr_text: float | None = _rate("the text tower")
    lr_head: float | None = _rate("projections and temperature")
    layer_decay: float | None = flag(
        None,
        "multiply the rate of each layer of both towers by FACTOR for each layer above it, as BEiT does",
        metavar="FACTOR",
        range=SHARE,
        rules=(_ADAMW,),
    )

    @property
    def own_rates(self) -> bool:
        """Return whether parts of the model have learning rates of their own."""
        return any(
            each is not None
            for each in (self.lr_image, self.lr_text, self.lr_head, self.layer_decay)
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """Optimisation (sections 2.2, A.9)"""

    temperature_constant: bool = flag(False, "keep the temperature at its initial value")
    no_embedding_decay: bool = flag(
        False,
        "exempt class tokens, position and token embeddings from weight decay, which open_clip decays",
        rules=(_ADAMW,),
    )
    warmup_share: float | None = flag(
        None,
        "warm up over this share of all steps (released code: 0.025)",
        metavar="SHARE",
        range=SHARE,
        rules=(
            Rule(
                "--lr-scheduler {lr_scheduler} does not work with --warmup-share: give --warmup in steps",
                lambda given: given.lr_scheduler != "cosine",
            ),
            Rule(
                "--skip-scheduler does not work with --warmup-share: without a schedule nothing warms up",
                lambda given: given.skip_scheduler,
            ),
            Rule(
                "--warmup {warmup} does not work with --warmup-share: it is the share and the number of the same steps; give "
                "one",
                lambda given: given.warmup != OpenClipFlags.warmup,
            ),
        ),
    )
    lr_min: float | None = flag(
        None,
        "floor of the cosine learning rate (the paper's: 1e-5)",
        metavar="LR",
        range=Range("0 to --lr {lr}", lambda value, given: 0 <= value <= (given.lr or 0)),
        rules=(
            Rule(
                "--lr-scheduler {lr_scheduler} does not work with --lr-min: it is the floor of the cosine schedule",
                lambda given: given.lr_scheduler != "cosine",
            ),
            Rule(
                "--skip-scheduler does not work with --lr-min: without a schedule the rate stays at --lr",
                lambda given: given.skip_scheduler,
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Step checkpoints"""

    save_every_steps: int | None = flag(
        None,
        "write a checkpoint every STEPS optimizer steps; --resume latest continues exactly from the newest",
        metavar="STEPS",
        range=at_least(1, "step"),
        rules=(
            _NAMED_SOURCES,
            Rule(
                "--save-most-recent does not work with --save-every-steps: open_clip would resume from epoch_latest.pt and not "
                "from the newer step checkpoint; leave it out",
                lambda given: given.save_most_recent,
            ),
        ),
    )
    keep_checkpoints: int = flag(
        2,
        "step checkpoints kept",
        metavar="N",
        range=at_least(1),
        rules=(
            Rule(
                "--keep-checkpoints needs --save-every-steps",
                lambda given: given.save_every_steps is None,
            ),
        ),
    )


_SETS = Rule("{option} needs --retrieval-data", lambda given: given.retrieval_data is None)


@dataclass(frozen=True, kw_only=True)
class RetrievalFlags:
    """Retrieval while training (sections 5.1, 5.2)"""

    retrieval_data: str | None = flag(
        None,
        "retrieval sets (CLIP_benchmark's layout, JSON@PICTURES, CSV@PICTURES) whose recall and RSUM are logged while training",
        metavar="NAME=DIR::...",
    )
    zero_shot_data: str | None = flag(
        None,
        "labelled sets (folders of classes, CLIP_benchmark's layout) whose zero-shot accuracy is logged while training",
        metavar="NAME=DIR::...",
    )
    retrieval_frequency: int = flag(
        1,
        "epochs between evaluations on these sets",
        metavar="EPOCHS",
        range=at_least(1, "epoch"),
        rules=(
            Rule(
                "--retrieval-frequency needs --retrieval-data or --zero-shot-data",
                lambda given: given.retrieval_data is None and given.zero_shot_data is None,
            ),
        ),
    )
    retrieval_transform: str = flag(
        "checkpoint",
        "transform of the retrieval sets' pictures: the checkpoint's own, or the paper's squash and centre crop (A.9)",
        choices=RETRIEVAL_TRANSFORMS,
        rules=(_SETS,),
    )
    retrieval_captions: int | str = flag(
        5,
        "first captions of each image of a retrieval set that count; the papers count five of COCO's",
        kind=number_or("all"),
        range=Range("all, or 1 or more", lambda value, _: value == "all" or value >= 1),
        metavar="N|all",
        rules=(_SETS,),
    )


@dataclass(frozen=True, kw_only=True)
class ConsoleFlags:
    """Output while training"""

    plan: bool = flag(
        False,
        "take two steps, print the time, memory and disk of the whole run, and end; nothing is saved (zerovl plan)",
    )


SECTIONS = (
    SourceFlags, DgaFlags, LossFlags, AugmentationFlags, TowerFlags, TuningFlags, OptimizerFlags, CheckpointFlags,
    RetrievalFlags, ConsoleFlags,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(
    ConsoleFlags,
    RetrievalFlags,
    CheckpointFlags,
    OptimizerFlags,
    TuningFlags,
    TowerFlags,
    AugmentationFlags,
    LossFlags,
    DgaFlags,
    SourceFlags,
):
    """All our flags, with whose defaults a run is open_clip's own."""

    @property
    def active(self) -> bool:
        """Return whether any of our flags was given that changes a training."""
        return self.changes(*(each.name for each in flags_of(RecipeConfig)))

    @property
    def step_flags(self) -> bool:
        """Return whether a flag needs our optimizer step (DGA and ContrastiveLoss)."""
        of_step = (*flags_of(DgaFlags), *flags_of(LossFlags))
        return self.changes("coin_flip_mixup", *(each.name for each in of_step))

    def changes(self, *names: str) -> bool:
        """Return whether one of these flags has another value than its default."""
        return any(
            getattr(self, each.name) != each.default
            for each in flags_of(RecipeConfig)
            if each.name in names
        )


# ---------------------------------------------------------------------------------------------------------------------
# open_clip's own that a check depends on, with its defaults
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OpenClipFlags:
    """Flags of open_clip on which a check depends"""

    model: str = flag("RN50", metavar="NAME")
    train_data: str | None = flag(None, metavar="TEXT")
    train_data_upsampling_factors: str | None = flag(None, metavar="TEXT")
    train_num_samples: int | None = flag(None, metavar="N", range=at_least(1))
    dataset_type: str = flag("auto", choices=("webdataset", "csv", "synthetic", "auto"))
    dataset_resampled: bool = flag(False)
    batch_size: int = flag(64, metavar="N", range=at_least(1))
    accum_freq: int = flag(1, metavar="N", range=at_least(1))
    epochs: int = flag(32, metavar="N", range=at_least(1))
    workers: int = flag(4, metavar="N", range=NOT_NEGATIVE)
    seed: int = flag(0, metavar="N", range=SEED)

    lr: float | None = flag(None, metavar="X", range=NOT_NEGATIVE)
    eps: float | None = flag(None, metavar="X")
    wd: float = flag(0.2, metavar="X", range=NOT_NEGATIVE)
    warmup: int = flag(10000, metavar="N", range=NOT_NEGATIVE)
    skip_scheduler: bool = flag(False)
    opt: str = flag(
        "adamw",
        metavar="TEXT",
        range=Range(
            f"{', '.join(line_here().optimizers)}, or timm/NAME",
            lambda value, _: (
                value.lower() in line_here().optimizers or value.lower().startswith("timm/")
            ),
        ),
    )
    lr_scheduler: str = flag(
        "cosine",
        metavar="TEXT",
        range=Range(
            "cosine, const or const-cooldown",
            lambda value, _: value in ("cosine", "const", "const-cooldown"),
        ),
    )
    epochs_cooldown: int | None = flag(
        None,
        range=Range("0 to --epochs {epochs}", lambda value, given: 0 <= value <= given.epochs),
    )
    lr_cooldown_end: float = flag(0.0, range=NOT_NEGATIVE)
    lr_cooldown_power: float = flag(1.0, range=NOT_NEGATIVE)
    grad_clip_norm: float | None = flag(None, metavar="X", range=POSITIVE)

    siglip: bool = flag(False)
    distill_model: str | None = flag(None)
    distill_pretrained: str | None = flag(None)
    local_loss: bool = flag(False)
    gather_with_grad: bool = flag(False)

    lock_image: bool = flag(False)
    lock_image_unlocked_groups: int = flag(0, range=NOT_NEGATIVE)
    lock_text: bool = flag(False)
    lock_text_unlocked_layers: int = flag(0, range=NOT_NEGATIVE)
    torchscript: bool = flag(False)
    torchcompile: bool = flag(False)
    trace: bool = flag(False)
    horovod: bool = flag(False)
    ddp_static_graph: bool = flag(False)
    force_patch_dropout: float | None = flag(
        None,
        metavar="X",
        range=Range("a share from 0 to less than 1", lambda value, _: 0 <= value < 1),
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

    report_to: str = flag("", metavar="TEXT")
    loss_dist_impl: str | None = flag(
        None,
        range=Range(
            "bidir, shift, reduce or gather",
            lambda value, _: value in ("bidir", "shift", "reduce", "gather"),
        ),
    )
    save_most_recent: bool = flag(False)


@dataclass(frozen=True, kw_only=True)
class AllFlags(OpenClipFlags, RecipeConfig):
    """The values of all flags that are declared here, from which ranges and contradictions are checked.

    Attributes:
        given: the flags of the command line that are not at their defaults, open_clip's first: name -> value.
    """

    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, ours: Mapping[str, Any], stock: argparse.Namespace, typed: Mapping[str, Any]
    ) -> AllFlags:
        """Join our flags' values and open_clip's namespace in one record.

        A flag that another release lacks counts as not given.

        Args:
            typed: open_clip's flags that were typed; open_clip derives the values of some other flags from the model.
        """
        known = {
            each.name: getattr(stock, each.name, each.default) for each in flags_of(OpenClipFlags)
        }
        changed = {
            each.name: ours[each.name]
            for each in flags_of(RecipeConfig)
            if ours[each.name] != each.default
        }
        return cls(**values_of(known), **ours, given={**typed, **changed})

    @property
    def mixture(self) -> bool:
        """Return whether training reads our mixture of sources instead of open_clip's own pipeline."""
        return self.sampling is not None or is_named(self.train_data)

    @property
    def own_step(self) -> bool:
        """Return whether the run takes our optimizer step: with a step flag, or with a mixture.

        A mixture takes it because over several ranks open_clip's default gather gives 1/W of the gradient.
        """
        return self.step_flags or self.mixture or self.plan

    @property
    def captions_images(self) -> bool:
        """Return whether the model, by its name, also learns to write captions."""
        return any(kind in self.model.lower() for kind in CAPTIONERS)


def values_of(parsed: argparse.Namespace | Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a parser of `add_flags` found, in the form of the fields.

    A flag that was not given stays None.
    """
    values = dict(parsed if isinstance(parsed, Mapping) else vars(parsed))
    for each in (*flags_of(RecipeConfig), *flags_of(OpenClipFlags)):
        value = values.get(each.name)
        if value is None:
            continue
        if each.several:
            values[each.name] = tuple(sorted(set(value)))
        elif each.nargs is not None:
            values[each.name] = tuple(value)
    return values


# ---------------------------------------------------------------------------------------------------------------------
# Flags as the words of a command line
# ---------------------------------------------------------------------------------------------------------------------

# Name without dashes -> value; "" is a switch, None takes the flag away.
Settings = dict[str, "str | None"]

# --ablate NAME --ablate NAME
REPEATED = {each.option.removeprefix("--") for each in flags_of(RecipeConfig) if each.several}
# --debiased-sampling is --sampling debiased
SWITCHES = {
    each.switch[0].removeprefix("--"): (each.option.removeprefix("--"), each.switch[1])
    for each in flags_of(RecipeConfig)
    if each.switch is not None
}
# --image-mean 0.5 0.5 0.5; two of open_clip's take KEY=VALUE words
SEVERAL_VALUES = {"aug-cfg", "opt-kwargs", "image-mean", "image-std", "force-image-size"}


def parse_settings(texts: Sequence[str]) -> Settings:
    """Parse `--set` as flags: "a=1" sets a flag, "a" a switch, "a=" removes a flag."""
    settings: Settings = {}
    for text in texts:
        name, separator, value = text.partition("=")
        settings[name.removeprefix("--")] = value if value or not separator else None
    return without_switches(settings)


def settings_of(words: Sequence[str]) -> Settings:
    """Parse a command line as flags: `--lr 1e-4 --aug-cfg a=1 b=2` is {"lr": "1e-4", "aug-cfg": "a=1 b=2"}.

    Raises:
        UserError: it does not begin with a flag.
    """
    values: dict[str, list[str]] = {}
    last: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            last = values[name] = values.get(name, []) if name in REPEATED else []
            last += [value] if equals else []
        elif last is None:
            raise UserError(f"unexpected argument {word!r}; training flags begin with --")
        else:
            last.append(word)
    settings = {
        name: shlex.join(parts) if len(parts) > 1 or name in SEVERAL_VALUES else "".join(parts)
        for name, parts in values.items()
    }
    return without_switches(settings)


def without_switches(settings: Mapping[str, str | None]) -> Settings:
    """Write the value that a switch stands for in place of the switch: a table has one entry for a flag.

    A switch beside its flag stays, and both are refused by argparse.
    """
    return dict(
        SWITCHES[name]
        if value == "" and name in SWITCHES and SWITCHES[name][0] not in settings
        else (name, value)
        for name, value in settings.items()
    )


def as_arguments(flags: Mapping[str, str | None]) -> list[str]:
    """Convert flags to the words of a command line."""
    arguments: list[str] = []
    for name, value in flags.items():
        if value is not None and name in REPEATED:
            for part in shlex.split(value):
                arguments += [f"--{name}", part]
        elif value is not None:
            arguments += [
                f"--{name}",
                *(shlex.split(value) if name in SEVERAL_VALUES else [value] * bool(value)),
            ]
    return arguments
