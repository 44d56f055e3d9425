"""The settings of a fine-tuning on a thousand to some million pairs, each with its reason in a line.

N  effective batch    B  micro-batch per rank    K  DGA steps    W  ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.processes import CPU_MICRO_BATCH
from open_clip_zerovl.data.names import PER_EPOCH
from open_clip_zerovl.recipe.flags import Settings
from open_clip_zerovl.sampling.schedule import Batching

GPU_MICRO_BATCH = 256  # at first; halved for want of memory
LARGEST_BATCH = 2048
FEWEST_STEPS = 8  # of an epoch, unless its batches would be smaller than SMALLEST_BATCH
SMALLEST_BATCH = 16
FEWEST_SAMPLES = 2 * FEWEST_STEPS
WARMUP_STEPS = 50  # 1 / (1 - beta2) of AdamW's second moment
STEPS_BETWEEN_SAVES = 250
# Up to so many samples -> epochs, and why.
EPOCHS = (
    (200_000, 20, "FLYP's below 200 K samples, near ZeroVL's 14 to 18 passes (5.2)"),
    (2_000_000, 10, "WiSE-FT's and FLYP's on 1.28 M samples"),
    (math.inf, 5, "half of WiSE-FT's at 1.28 M: the samples are many"),
)
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
    """Choose all settings.

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
    size, steps, split = _split(batch, facts, given)
    epochs, epochs_reason = next(
        (count, why) for most, count, why in EPOCHS if facts.samples < most
    )
    steps_an_epoch = facts.samples // batch
    all_steps = (_number(given, "epochs", int) or epochs) * steps_an_epoch
    share = min(0.2, max(0.025, WARMUP_STEPS / all_steps))
    lora = given.get("lora") is not None
    adamw = given.get("opt") in (None, "adamw")  # other optimizers have one rate
    lr = _number(given, "lr", float) or (1e-4 if lora else 1e-5)
    chosen = [
        Setting("effective-batch", str(batch), batch_reason),
        Setting(
            "batch-size",
            str(size),
            "halved where a GPU's memory does not hold it" if facts.gpus else "enough for a CPU",
        ),
        Setting("dga-steps", str(steps), f"{split}: the gradient of the whole batch"),
        Setting("dga-retain", "auto", "as many graphs as memory holds"),
        Setting("epochs", str(epochs), f"{epochs_reason}; the best epoch is kept"),
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
            f"{share * all_steps:.0f} of {all_steps:,} steps; AdamW needs about {WARMUP_STEPS}",
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
            PER_EPOCH,
            "a picture is shown once an epoch, so that it is not a negative of itself",
        ),
        Setting(
            "text-augment",
            "0.2" if facts.masks else None,
            "words masked and deleted as in pre-training (2.2): captions repeat each epoch"
            if facts.masks
            else "the tokenizer has no mask token, so that pre-training has masked no words",
        ),
        Setting("sampling", *_sampling(facts, batch)),
        Setting("precision", *_precision(facts)),
        Setting("workers", *_workers(facts)),
        Setting("save-every-steps", *_save_every_steps(steps_an_epoch)),
    ]
    asked = {flag: value for flag, value in given.items() if flag != "effective-batch"}
    replaced = [
        Setting(each.flag, asked.pop(each.flag), AS_ASKED) if each.flag in asked else each
        for each in chosen
    ]
    return replaced + [Setting(flag, value, AS_ASKED) for flag, value in asked.items()]


def as_flags(settings: Sequence[Setting]) -> Settings:
    """Take the training flags of settings."""
    return {
        setting.flag: setting.value for setting in settings if setting.flag != "effective-batch"
    }


def _effective_batch(facts: Facts, given: Settings) -> tuple[int, str]:
    """Choose the batch of a step, with its reason.

    Raises:
        UserError: a given batch that the data does not fill.
    """
    asked = _number(given, "effective-batch", int)
    size, steps = _number(given, "batch-size", int), _number(given, "dga-steps", int)
    if asked is None and size is not None and steps is not None:
        asked = Batching(size, steps, facts.ranks).effective_batch
    by_steps = _power_of_two(facts.samples / FEWEST_STEPS)
    if asked is not None and asked > facts.samples:
        raise UserError(
            f"an effective batch of {asked:,} is larger than the {facts.samples:,} samples to train on, and an epoch would "
            f"have no step; give --set effective-batch={by_steps} or less"
        )
    if asked is not None:
        return asked, AS_ASKED
    floor = min(SMALLEST_BATCH, _power_of_two(facts.samples / 2))
    batch = max(floor, min(LARGEST_BATCH, by_steps))
    if batch == LARGEST_BATCH:
        return batch, "ZeroVL's for fine-tuning (5.2); more negatives change little"
    if facts.samples // batch < FEWEST_STEPS:
        return batch, f"{batch - 1} negatives a pair, from {facts.samples} samples"
    return (
        batch,
        f"the most negatives that leave {FEWEST_STEPS} steps an epoch of {facts.samples:,} samples",
    )


def _split(batch: int, facts: Facts, given: Settings) -> tuple[int, int, str]:
    """Split an effective batch into the micro-batch of a rank and DGA steps, also as a product in words."""
    share = max(1, batch // facts.ranks)
    size = min(GPU_MICRO_BATCH if facts.gpus else CPU_MICRO_BATCH, share)
    size = _number(given, "batch-size", int) or size
    steps = _number(given, "dga-steps", int) or max(1, round(share / size))
    gpus = f" x {facts.gpus} GPUs" if facts.gpus > 1 else ""
    whole = Batching(size, steps, facts.ranks).effective_batch
    return size, steps, f"{size} x {steps}{gpus} = {whole}"


def _save_every_steps(steps_an_epoch: int) -> tuple[str | None, str]:
    if steps_an_epoch > STEPS_BETWEEN_SAVES:
        return str(STEPS_BETWEEN_SAVES), "a killed run loses at most these"
    return None, f"an epoch has {steps_an_epoch} steps and ends with a checkpoint"


def _sampling(facts: Facts, batch: int) -> tuple[str, str]:
    smallest = min(facts.sources.values())
    if facts.old_share:
        return "random", f"each batch holds about {facts.old_share:.0%} of old pairs"
    if len(facts.sources) == 1:
        return "random", "there is one source"
    if smallest >= batch:
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


def _number(given: Settings, flag: str, kind: Callable[[str], Any]) -> Any:
    """Read a given number.

    Args:
        kind: `int` or `float`.

    Returns:
        None for a flag that is not given.

    Raises:
        UserError: no number above 0.
    """
    text = given.get(flag)
    if text is None:
        return None
    try:
        number = kind(text)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        word = "a whole number" if kind is int else "a number"
        raise UserError(f"--set {flag}={text} must be {word} above 0")
    return number


def _power_of_two(value: float) -> int:
    """Find the largest power of two that is not above the value, at least 1."""
    return 1 << max(0, int(value).bit_length() - 1)
