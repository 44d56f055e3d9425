"""The settings of a fine-tuning on a thousand to some million pairs, each with its reason in a line.

N  effective batch    B  micro-batch per rank    K  DGA steps    W  ranks
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.processes import CPU_MICRO_BATCH
from open_clip_zerovl.recipe.arguments import Settings

GPU_MICRO_BATCH = 256  # at first; halved for want of memory
LARGEST_BATCH = 2048
FEWEST_STEPS = 8  # of an epoch, unless its batches would be smaller than SMALLEST_BATCH
SMALLEST_BATCH = 16
FEWEST_SAMPLES = 2 * FEWEST_STEPS
WARMUP_STEPS = 50  # 1 / (1 - beta2) of AdamW's second moment
STEPS_BETWEEN_SAVES = 250
MANY_SAMPLES, VERY_MANY_SAMPLES = 200_000, 2_000_000
AS_ASKED = "as asked"
FULL_LR = "what ZeroVL (5.2) and FLYP fine-tune with; pre-training's 1e-4 to 1e-3 erases more"
LORA_LR = "of adapters, which begin at zero: ten times that of whole weights"
BOTH_TRAIN = "both towers train: FLYP found this best, from 4 examples a class to ImageNet"
# Flags that a fine-tuning sets itself -> the flag of `zerovl finetune` in their place.
OWN = {
    **dict.fromkeys(("model", "pretrained", "init-from", "text-model"), "--from MODEL"),
    "train-data": "--data",
    "retrieval-data": "--retrieval-data, outside of --set",
    "zero-shot-data": "--zero-shot-data, outside of --set",
    "seed": "--seed, outside of --set",
    **dict.fromkeys(("logs", "name", "resume"), "--out"),
    **dict.fromkeys(
        ("save-frequency", "save-most-recent", "delete-previous-checkpoint", "retrieval-frequency"),
        "nothing: each epoch is scored and the best one is kept",
    ),
}
NEEDED = ("epochs", "lr", "effective-batch", "batch-size", "dga-steps")


@dataclass(frozen=True)
class Facts:
    """Facts about data and machine from which the settings follow.

    Attributes:
        samples: samples of an epoch: pictures, each with one of its captions, unless --set captions asks for another thing.
        sources: name -> samples.
        masks: whether the tokenizer has a mask token.
        gpus: visible GPUs that train; 0 for the CPU.
        bf16: whether these multiply bf16.
        cores: CPU cores.
        old_share: share of --keep-data in an epoch.
        sigmoid: whether the model has a bias of logits, which only the sigmoid loss trains.
    """

    samples: int
    sources: Mapping[str, int]
    masks: bool
    gpus: int
    bf16: bool
    cores: int
    old_share: float = 0.0
    sigmoid: bool = False

    @property
    def ranks(self) -> int:
        return max(1, self.gpus)


@dataclass(frozen=True)
class Setting:
    """A training flag (`effective-batch` is B*K*W) with its value, None for one that is left out, and the reason."""

    flag: str
    value: str | None
    reason: str

    def __str__(self) -> str:
        shown = (
            f"no --{self.flag}" if self.value is None else f"--{self.flag} {self.value}".rstrip()
        )
        return f"  {shown:32} {self.reason}"


def choose_settings(facts: Facts, given: Settings) -> list[Setting]:
    """Choose all settings except the split of the batch (`split_batch`).

    Args:
        given: flags that replace the choice; those that are not chosen here follow at the end.

    Raises:
        UserError: a batch larger than the data, or too few samples.
    """
    for flag, value in given.items():
        if flag in OWN:
            raise UserError(
                f"--set {flag} does not work with finetune, which decides it; give {OWN[flag]}"
            )
        if value is None and flag in NEEDED:
            raise UserError(
                f"--set {flag}= removes a setting that fine-tuning needs; give it a value"
            )
    if facts.samples < FEWEST_SAMPLES:
        raise UserError(
            f"fine-tuning needs at least {FEWEST_SAMPLES} samples, and the data has {facts.samples}; give more pairs"
        )
    batch, batch_reason = _effective_batch(facts, given)
    epochs = _positive(given, "epochs") or _epochs(facts.samples)
    steps_an_epoch = facts.samples // batch
    steps = epochs * steps_an_epoch
    share = min(0.2, max(0.025, WARMUP_STEPS / steps))
    smallest = min(facts.sources.values())
    debiased = len(facts.sources) > 1 and smallest >= batch
    lora = given.get("lora") is not None
    adamw = given.get("opt") in (None, "adamw")  # other optimizers have one rate
    lr = _rate(given.get("lr") or (1e-4 if lora else 1e-5))
    chosen = [
        Setting("effective-batch", str(batch), batch_reason),
        Setting("epochs", str(epochs), _epochs_reason(facts.samples)),
        Setting("lr", f"{lr:g}", LORA_LR if lora else FULL_LR),
        *(
            [Setting("lr-head", "1e-05", "projections train whole, as in full fine-tuning")]
            if lora and adamw
            else []
        ),
        Setting(
            "lr-min",
            f"{lr / 10:g}",
            "a tenth of the rate, the share of the paper's pre-training (A.9)",
        ),
        Setting("wd", "0.1", "WiSE-FT's and FLYP's"),
        Setting("beta2", "0.98", "CLIP's and ZeroVL's"),
        Setting("eps", "1e-6", "CLIP's and ZeroVL's"),
        Setting("grad-clip-norm", "1.0", "limits the effect of one odd batch on the weights"),
        Setting(
            "warmup-share",
            f"{share:.3g}",
            f"{share * steps:.0f} of {steps:,} steps; AdamW needs about {WARMUP_STEPS}",
        ),
        Setting(
            "freeze",
            None,
            "adapters train, and the towers' own weights are constant" if lora else BOTH_TRAIN,
        ),
        Setting(
            "freeze-norm-statistics",
            "",
            "batch norms, where the towers have some, keep the statistics of the model before",
        ),
        Setting(
            "siglip",
            "" if facts.sigmoid else None,
            "the loss that trained the model: it has a bias of logits"
            if facts.sigmoid
            else "softmax, the loss of CLIP",
        ),
        Setting(
            "captions",
            "one-per-epoch",
            "a picture is shown once an epoch, so that it is not a negative of itself",
        ),
        Setting("text-augment", *_text_augment(facts)),
        Setting("sampling", *_sampling(facts, debiased, smallest, batch)),
        Setting("precision", *_precision(facts)),
        Setting("workers", *_workers(facts)),
        Setting("save-every-steps", *_save_every_steps(steps_an_epoch)),
    ]
    names = {setting.flag for setting in chosen}
    asked = [
        Setting(setting.flag, given[setting.flag], AS_ASKED)
        if setting.flag in given and setting.flag not in ("effective-batch",)
        else setting
        for setting in chosen
    ]
    more = [
        Setting(flag, value, AS_ASKED)
        for flag, value in given.items()
        if flag not in names | {"batch-size", "dga-steps", "dga-retain"}
    ]
    return asked + more


def split_batch(batch: int, facts: Facts, given: Settings) -> list[Setting]:
    """Split an effective batch into micro-batch, DGA steps and graphs kept."""
    share = max(1, batch // facts.ranks)
    size = min(GPU_MICRO_BATCH if facts.gpus else CPU_MICRO_BATCH, share)
    size = _positive(given, "batch-size") or size
    steps = _positive(given, "dga-steps") or max(1, round(share / size))
    where = "halved where a GPU's memory does not hold it" if facts.gpus else "enough for a CPU"
    split = f"{size} x {steps}{f' x {facts.gpus} GPUs' if facts.gpus > 1 else ''} = {size * steps * facts.ranks}"
    return [
        Setting("batch-size", str(size), AS_ASKED if "batch-size" in given else where),
        Setting(
            "dga-steps",
            str(steps),
            AS_ASKED if "dga-steps" in given else f"{split}: the gradient of the whole batch",
        ),
        Setting(
            "dga-retain",
            given.get("dga-retain", "auto"),
            AS_ASKED if "dga-retain" in given else "as many graphs as memory holds",
        ),
    ]


def check_batch(batch: int, samples: int) -> None:
    """UserError for an effective batch that the data does not fill."""
    if batch > samples:
        raise UserError(
            f"an effective batch of {batch:,} is larger than the {samples:,} samples to train on, and an epoch would have no "
            f"step; give --set effective-batch={_power_of_two(samples / FEWEST_STEPS)} or less"
        )


def as_flags(settings: Sequence[Setting]) -> Settings:
    """Take the training flags of settings."""
    return {
        setting.flag: setting.value for setting in settings if setting.flag != "effective-batch"
    }


def _effective_batch(facts: Facts, given: Settings) -> tuple[int, str]:
    asked = _positive(given, "effective-batch")
    size, steps = _positive(given, "batch-size"), _positive(given, "dga-steps")
    if asked is None and size is not None and steps is not None:
        asked = size * steps * facts.ranks
    if asked is not None:
        check_batch(asked, facts.samples)
        return asked, AS_ASKED
    floor = min(SMALLEST_BATCH, _power_of_two(facts.samples / 2))
    batch = max(floor, min(LARGEST_BATCH, _power_of_two(facts.samples / FEWEST_STEPS)))
    if batch == LARGEST_BATCH:
        return batch, "ZeroVL's for fine-tuning (5.2); more negatives change little"
    if facts.samples // batch < FEWEST_STEPS:
        return batch, f"{batch - 1} negatives a pair, from {facts.samples} samples"
    return (
        batch,
        f"the most negatives that leave {FEWEST_STEPS} steps an epoch of {facts.samples:,} samples",
    )


def _epochs(samples: int) -> int:
    return 20 if samples < MANY_SAMPLES else 10 if samples < VERY_MANY_SAMPLES else 5


def _epochs_reason(samples: int) -> str:
    if samples < MANY_SAMPLES:
        return "FLYP's below 200 K samples, near ZeroVL's 14 to 18 passes (5.2); the best epoch is kept"
    if samples < VERY_MANY_SAMPLES:
        return "WiSE-FT's and FLYP's on 1.28 M samples; the best epoch is kept"
    return "half of WiSE-FT's at 1.28 M: the samples are many; the best epoch is kept"


def _text_augment(facts: Facts) -> tuple[str | None, str]:
    if facts.masks:
        return (
            "0.2",
            "words masked and deleted as in pre-training (2.2): captions repeat each epoch",
        )
    return None, "the tokenizer has no mask token, so that pre-training has masked no words"


def _save_every_steps(steps_an_epoch: int) -> tuple[str | None, str]:
    if steps_an_epoch > STEPS_BETWEEN_SAVES:
        return str(STEPS_BETWEEN_SAVES), "a killed run loses at most these"
    return None, f"an epoch has {steps_an_epoch} steps and ends with a checkpoint"


def _sampling(facts: Facts, debiased: bool, smallest: int, batch: int) -> tuple[str, str]:
    if facts.old_share:
        return "random", f"each batch holds about {facts.old_share:.0%} of old pairs"
    if len(facts.sources) == 1:
        return "random", "there is one source"
    if debiased:
        return "debiased", f"each batch from one of the {len(facts.sources)} sources (3.1)"
    return (
        "random",
        f"the smallest source has {smallest:,} samples, which do not fill a batch of {batch:,}",
    )


def _precision(facts: Facts) -> tuple[str, str]:
    if not facts.gpus:
        return "fp32", "lower precision is not faster on a CPU"
    return (
        ("amp_bf16", "the GPU has bf16 matmuls")
        if facts.bf16
        else ("amp", "the GPU has no bf16 matmuls")
    )


def _workers(facts: Facts) -> tuple[str, str]:
    if not facts.gpus and facts.cores <= 2:
        return "0", f"{facts.cores} CPU cores, which training itself uses"
    count = (
        min(8, max(1, facts.cores // facts.ranks - 1)) if facts.gpus else min(4, facts.cores // 2)
    )
    return str(count), f"loader processes a rank on {facts.cores} CPU cores"


def _positive(given: Settings, flag: str) -> int | None:
    """A given whole number of at least 1. UserError for another value."""
    text = given.get(flag)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--set {flag}={text} must be a whole number of at least 1")
    return int(text)


def _rate(value: str | float) -> float:
    """A learning rate. UserError for a text that is not a positive number."""
    try:
        rate = float(value)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise UserError(f"--set lr={value} must be a number above 0, as 1e-5")
    return rate


def _power_of_two(value: float) -> int:
    """Find the largest power of two that is not above the value, at least 1."""
    return 1 << max(0, int(value).bit_length() - 1)
