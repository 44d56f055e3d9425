"""The settings of `zerovl plan`, and the arithmetic of batches: N = B*K*W.

B  micro-batch per rank    K  micro-batches of a step (DGA steps)    W  ranks    N = B*K*W  effective batch
"""

from __future__ import annotations

from dataclasses import dataclass

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import at_least, flag, flags_of, out_of_range, redeclared
from open_clip_zerovl.recipe.flags import AllFlags, contradicted
from open_clip_zerovl.sampling.schedule import Batching


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Options of zerovl plan"""

    effective_batch: int | None = flag(
        None,
        "choose batch size, DGA steps and graphs kept for this effective batch",
        metavar="N",
        range=at_least(1),
    )
    assume: str | None = flag(
        None, "estimate for other hardware: v100, a100-80, h200, ...", metavar="GPU[:COUNT]"
    )
    gpus: int | None = flag(
        None, "use N of this machine's GPUs (default: all)", metavar="N", range=at_least(1)
    )


@dataclass(frozen=True, kw_only=True)
class PlanSettings(PlanFlags, AllFlags):
    """The training program's flags, and those of the plan. `batch_size` and `dga_steps` are chosen if they are not given.

    Attributes:
        effective_batch: N asked for; K follows from it. None: B and K as given.
        assume: other hardware to plan for, `NAME[:COUNT]`.
        gpus: how many of this machine's GPUs; None: all.
        passed_over: flags of training that do not change a plan.
    """

    batch_size: int | None = redeclared(AllFlags, "batch_size", None)  # type: ignore[assignment]
    dga_steps: int | None = redeclared(AllFlags, "dga_steps", None)  # type: ignore[assignment]
    passed_over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """
        Raises:
            UserError: a value out of range, or flags that training refuses together.
        """
        planned = [each.name for each in flags_of(AllFlags) if each.planned is True]
        for sentence in (*out_of_range(self), *contradicted(self, planned)):
            raise UserError(sentence)
        if self.assume is not None and self.gpus is not None:
            raise UserError(
                f"--assume {self.assume} and --gpus {self.gpus} both give a number of GPUs; give --assume NAME:{self.gpus}"
            )
        if self.train_data is None and (self.assume is None or self.train_num_samples is None):
            raise UserError(
                "give --train-data, as for training; with --assume, --train-num-samples can replace it"
            )

    @property
    def trains(self) -> bool:
        """A plan may go without --train-data."""
        return False

    @property
    def mixture(self) -> bool:
        """Without --train-data the plan counts on named sources."""
        return self.train_data is None or super().mixture

    @property
    def stock_pipeline(self) -> bool:
        """True if training takes open_clip's own data pipeline."""
        return not super().mixture


def choose_batching(settings: PlanSettings, ranks: int, micro_batch: int) -> Batching:
    """B, K and W of the run.

    Args:
        ranks: W.
        micro_batch: B if --batch-size does not give it.

    Returns:
        A batching whose effective batch is the one asked for, or the multiple of B*W nearest to it.

    Raises:
        UserError: given B, K and N contradict each other, or more graphs are retained than a step has.
    """
    wanted = settings.effective_batch
    b = settings.batch_size
    k = settings.dga_steps
    if wanted is None:
        b, k = b or 64, k or 1  # open_clip's default, and ours
    elif b is not None and k is not None and b * k * ranks != wanted:
        raise UserError(
            f"--effective-batch {wanted} is not --batch-size {b} x --dga-steps {k} x {ranks} rank{'s' * (ranks > 1)} = "
            f"{b * k * ranks}; leave --dga-steps out to have it chosen"
        )
    elif b is None and k is not None:
        b = max(1, round(wanted / (k * ranks)))
    else:
        b = b or min(micro_batch, max(1, wanted // ranks))
        k = max(1, round(wanted / (b * ranks)))
    assert b is not None and k is not None
    if isinstance(settings.dga_retain, int) and not 0 <= settings.dga_retain <= max(
        1, k - (ranks > 1 and k > 1)
    ):
        raise UserError(
            f"--dga-retain {settings.dga_retain} is out of range for {k} micro-batches on {ranks} rank(s); give auto, or 0 to "
            f"{k - (ranks > 1 and k > 1)}"
        )
    return Batching(b, k, ranks, max(1, settings.workers))
