"""What `zerovl plan` is told, and the arithmetic of batches: N = B*K*W.

B  micro-batch per rank    K  micro-batches of a step (DGA steps)    W  ranks    N = B*K*W  effective batch
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from open_clip_zerovl.data.schedule import Batching
from open_clip_zerovl.data.sources import is_named
from open_clip_zerovl.errors import UserError

PRECISIONS = ("amp", "amp_bf16", "amp_bfloat16", "bf16", "fp16", "pure_bf16", "pure_fp16", "fp32")  # open_clip's


@dataclass(frozen=True)
class PlanSettings:
    """The training program's flags that time, memory or data depend on, under its names and with its defaults.

    Attributes:
        effective_batch: N wanted; K follows from it. None: B and K as given.
        assume: hardware in place of what is here, `NAME[:COUNT]`.
        gpus: how many of the GPUs here; None: all.
        passed_over: flags given that matter for nothing of this.
    """

    model: str
    effective_batch: int | None = None
    assume: str | None = None
    gpus: int | None = None
    passed_over: tuple[str, ...] = ()

    text_model: str | None = None
    train_data: str | None = None
    train_data_upsampling_factors: str | None = None
    train_num_samples: int | None = None
    retrieval_data: str | None = None
    sampling: str | None = None
    debiased_draw: str = "exact"
    source_order: str | None = None
    dataset_resampled: bool = False
    captions: str | None = None
    on_bad_sample: str = "replace"

    batch_size: int | None = None
    dga_steps: int | None = None
    dga_retain: int | str = 1
    loss_chunk: int | None = None
    siglip: bool = False
    epochs: int = 32
    workers: int = 4
    precision: str = "amp"
    device: str = "cuda"
    seed: int = 0
    wd: float = 0.2
    grad_clip_norm: float | None = None

    token_drop: float | None = None
    freeze: tuple[str, ...] = ()
    lock_image: bool = False
    lock_text: bool = False
    grad_checkpointing: bool = False
    no_embedding_decay: bool = False
    temperature_constant: bool = False
    coin_flip_mixup: bool = False
    mixup_alpha: float = 0.1
    text_augment: float | None = None
    auto_augment: str | None = None
    aug_cfg: dict[str, Any] = field(default_factory=dict)
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None
    image_interpolation: str | None = None
    force_image_size: int | tuple[int, ...] | None = None
    force_context_length: int | None = None
    pretrained_image: bool = False
    init_from: str | None = None
    init_image: str | None = None
    init_text: str | None = None

    logs: str = "./logs/"
    save_frequency: int = 1
    save_most_recent: bool = False
    delete_previous_checkpoint: bool = False
    save_every_steps: int | None = None
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        """
        Raises:
            UserError: a value out of range, named with what to give.
        """
        positive = ("effective_batch", "gpus", "batch_size", "dga_steps", "loss_chunk", "epochs", "train_num_samples")
        for name in (*positive, "save_every_steps", "keep_checkpoints"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value} is out of range; give at least 1")
        if self.workers < 0:
            raise UserError(f"--workers {self.workers} is out of range; give 0 or more")
        for name in ("token_drop", "text_augment"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value} is out of range; give a share between 0 and 1")
        if self.assume is not None and self.gpus is not None:
            raise UserError(
                f"--assume {self.assume} and --gpus {self.gpus} both tell a number of GPUs; give --assume NAME:{self.gpus}"
            )
        if self.train_data is None and (self.assume is None or self.train_num_samples is None):
            raise UserError(
                "give --train-data, as for training; with --assume, --train-num-samples stands for data elsewhere"
            )

    @property
    def strategy(self) -> str:
        """How sources make batches; open_clip's own pipeline counts as random."""
        return self.sampling or "random"

    @property
    def stock_pipeline(self) -> bool:
        """Whether training would take open_clip's own data pipeline."""
        return self.sampling is None and not is_named(self.train_data)


def choose_batching(settings: PlanSettings, ranks: int, micro_batch: int) -> Batching:
    """B, K and W of the run.

    Args:
        ranks: W.
        micro_batch: what fits, for where --batch-size does not say B.

    Returns:
        A batching whose effective batch is the one asked for, or the nearest that B divides.

    Raises:
        UserError: B, K and N given that contradict each other, more graphs retained than a step has.
    """
    wanted, b, k = settings.effective_batch, settings.batch_size, settings.dga_steps
    if wanted is None:
        b, k = b or 64, k or 1  # open_clip's default, and ours
    elif b is not None and k is not None and b * k * ranks != wanted:
        raise UserError(
            f"--effective-batch {wanted} is not --batch-size {b} x --dga-steps {k} x {ranks} rank{'s' * (ranks > 1)} = "
            f"{b * k * ranks}; leave --dga-steps out, and it is chosen"
        )
    elif b is None and k is not None:
        b = max(1, round(wanted / (k * ranks)))
    else:
        b = b or min(micro_batch, max(1, wanted // ranks))
        k = max(1, round(wanted / (b * ranks)))
    assert b is not None and k is not None
    if isinstance(settings.dga_retain, int) and not 0 <= settings.dga_retain <= max(1, k - (ranks > 1 and k > 1)):
        raise UserError(
            f"--dga-retain {settings.dga_retain} is out of range for {k} micro-batches on {ranks} rank(s); give auto, or 0 to "
            f"{k - (ranks > 1 and k > 1)}"
        )
    return Batching(b, k, ranks, max(1, settings.workers))
