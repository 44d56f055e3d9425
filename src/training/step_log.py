"""The log of an optimizer step, with open_clip's log line and metric names, for programs that read open_clip's logs."""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from open_clip_train.distributed import is_master
from open_clip_train.train import AverageMeter

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.losses.problem import Report
from open_clip_zerovl.sampling.schedule import Batching
from training.run_log import RunLog, memory_bytes

LOGGED_AN_EPOCH = 20  # steps, at least, whatever --log-every-n-steps
STUCK_SHARE = 0.99  # of ln N: an epoch with a mean loss from there on has learned nothing
JUDGED_FROM_STEP = 100  # of the run; a loss is that of chance when training begins
LIMITING_SHARE = (
    0.1  # smallest share of an epoch's time spent waiting for data that the log reports
)


def loader_sentence(waited: float, total: float, samples: int, workers: int) -> str | None:
    """Warn in a sentence if the loader limits a rank.

    Args:
        waited: seconds of `total` in which the rank waited for its loader. On a GPU computation may have gone on meanwhile, so
            this is an upper bound.
        samples: that the rank trained on in `total`.
        workers: its loader processes; 0 reads in the training process, which always waits.

    Returns:
        None if it does not.
    """
    computed = total - waited
    if total <= 0 or computed <= 0 or waited < LIMITING_SHARE * total:
        return None
    delivered, taken = samples / total, samples / computed
    if workers == 0:
        return (
            f"{waited / total:.0%} of the time waited for data, which this process reads itself "
            f"({samples / waited:,.0f} samples/s); give --workers"
        )
    needed = math.ceil(workers * total / computed)
    deliver = f"{workers} workers deliver" if workers > 1 else "1 worker delivers"
    return (
        f"{waited / total:.0%} of the time waited for data: {deliver} "
        f"{delivered:,.0f} samples/s, a rank takes {taken:,.0f}; {needed} workers would be enough, or smaller images"
    )


def stuck_sentence(loss: float, effective_batch: int) -> str | None:
    """Warn in a sentence if a contrastive loss is that of a model at chance.

    Args:
        loss: mean of an epoch.
        effective_batch: N; chance is ln N.

    Returns:
        None if it is not.
    """
    chance = math.log(effective_batch)
    if effective_batch < 2 or not loss >= STUCK_SHARE * chance:
        return None
    return (
        f"the loss, {loss:.4g}, is that of chance, ln {effective_batch:,} = {chance:.4g}: the model does not tell which "
        "caption belongs to which picture; look at the learning rate (--lr, --warmup), at captions and pictures, and "
        "at the starting weights"
    )


def reporter_of(args: argparse.Namespace) -> Any:
    """Return the module with wandb's `log` that `--report-to` names: wandb or, in open_clip 4, trackio.

    Returns:
        None for neither.
    """
    name = "trackio" if getattr(args, "trackio", False) else "wandb" if args.wandb else None
    return None if name is None else importlib.import_module(name)


class BySource:
    """The mean loss of each source's pairs since the last `take`, and how many pairs had a duplicate positive.

    With one source a step the loss of a step jumps between sources; these numbers do not. Sums stay on the device until `take`,
    so that no step waits for them.

    Args:
        names: the names of the sources, in their order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._sums: torch.Tensor | None = (
            None  # (3, S): losses, pairs, pairs with a duplicate positive
        )
        self._with_duplicates = False

    def see(self, report: Report) -> None:
        """Add a step's pairs of all ranks. With one source, or without sources, nothing is recorded."""
        if (
            report.sources is None
            or report.pair_losses is None
            or (len(self.names) < 2 and report.duplicates is None)
        ):
            return
        losses = report.pair_losses.float()
        self._with_duplicates = report.duplicates is not None
        duplicates = (
            report.duplicates.float() if report.duplicates is not None else torch.zeros_like(losses)
        )
        if self._sums is None:
            self._sums = torch.zeros(3, len(self.names), device=losses.device)
        # Added up step by step: fp32 rounds a single loss that is added to the sum of a million (by 0.3 % on average).
        of_step = torch.zeros_like(self._sums)
        self._sums += of_step.index_add_(
            1, report.sources, torch.stack([losses, torch.ones_like(losses), duplicates])
        )

    def take(self) -> tuple[dict[str, float], str]:
        """Take the metrics by name (`loss/SOURCE`, `duplicates/SOURCE`: a share) and words for the log line, and reset the
        sums.
        """
        if self._sums is None:
            return {}, ""
        metrics, words = {}, []
        for name, (loss, pairs, duplicates) in zip(self.names, self._sums.T.tolist(), strict=True):
            if not pairs:
                continue
            metrics[f"loss/{name}"] = loss / pairs
            words.append(f"{name} {loss / pairs:#.5g}")
            if self._with_duplicates:
                metrics[f"duplicates/{name}"] = duplicates / pairs
                words[-1] += f" ({duplicates:.0f} of {pairs:.0f} samples have duplicates)"
        self._sums = None
        return metrics, " By source: " + ", ".join(words)


class StepLog:
    """open_clip's log line, tensorboard and wandb metrics for each logged step, in effective samples.

    Args:
        judged: whether the loss is the plain contrastive one, whose chance value is known.
        recovers: whether a GradScaler leaves out the step of a loss that is not finite.
        run_log: records each step.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        epoch: int,
        steps: int,
        epoch_samples: int,
        batching: Batching,
        tb_writer=None,
        sources: Sequence[str] = (),
        judged: bool = False,
        recovers: bool = False,
        run_log: RunLog | None = None,
    ) -> None:
        self.run_log = run_log
        self.args = args
        self.epoch = epoch
        self.steps = steps
        self.tb_writer = tb_writer
        self.epoch_samples = epoch_samples
        self.judged, self.recovers = judged, recovers
        self.batching = batching
        self.batch_time, self.data_time = AverageMeter(), AverageMeter()
        self.losses: dict[str, AverageMeter] = {}
        self.by_source = BySource(sources)
        self.every = max(1, min(args.log_every_n_steps, steps // LOGGED_AN_EPOCH))
        self._not_finite: torch.Tensor | float = (
            0.0  # losses since the last logged step; counted on the device
        )
        self.end = time.time()
        self.waited = 0.0
        self.counted_from = self.end
        self.counted_steps = -1  # the first step waits for the workers' start

    def data_ready(self) -> None:
        """Call when all micro-batches of the step have come from the loader."""
        wait = time.time() - self.end
        self.data_time.update(wait)
        if self.counted_steps >= 0:
            self.waited += wait

    def step_done(self, index: int, step: int, outputs: dict[str, Any], lr: float) -> None:
        """Log an optimizer step, if it is due.

        Call it after the step, on all ranks.

        Raises:
            UserError: a loss since the last logged step was not a finite number, and so the weights are none.
        """
        self.batch_time.update(time.time() - self.end)
        self.end = time.time()
        self.counted_steps += 1
        if self.counted_steps == 0:
            self.counted_from = self.end
        loss = outputs["loss"]
        finite = loss.detach().isfinite() if isinstance(loss, torch.Tensor) else math.isfinite(loss)
        self._not_finite = self._not_finite + (1.0 - finite * 1.0)
        due = index % self.every == 0 or index + 1 == self.steps
        if not due:
            return
        lost, self._not_finite = int(self._not_finite), 0.0
        advice = "a lower --lr, --grad-clip-norm 1, or --precision amp_bf16 or fp32"
        if lost and self.run_log is not None:
            self.run_log.not_finite += lost
        if lost and not self.recovers:
            raise UserError(
                f"in {lost} of the steps up to step {index + 1} of epoch {self.epoch} the loss is not a finite number, "
                "and the weights are not finite numbers from there on; continue from an earlier checkpoint with --resume "
                f"latest, or start again, with {advice}"
            )
        if not is_master(self.args):
            return
        values = {key: float(value) for key, value in outputs.items()}
        if lost:
            logging.warning(
                f"Step {index + 1} of epoch {self.epoch}: the loss is not a finite number in {lost} of the last steps, which "
                f"the scaler of --precision amp left out; try {advice}."
            )
        scale = values.pop("logit_scale")
        values.pop("logit_bias", None)
        for key, value in values.items():
            self.losses.setdefault(key, AverageMeter()).update(value, self.batching.rank_batch)
        per_gpu = self.batching.rank_batch / self.batch_time.val
        rate = per_gpu * self.batching.world_size
        seen = (index + 1) * self.batching.effective_batch
        of_sources, sources_line = self.by_source.take()
        digits = math.ceil(math.log(self.epoch_samples + 1, 10))
        memory = memory_bytes(torch.device(getattr(self.args, "device", "cpu")))
        waited = self.data_time.sum / self.batch_time.sum
        eta = self.run_log.eta(self.epoch, index) if self.run_log is not None else ""
        logging.info(
            f"Train Epoch: {self.epoch} [{seen:>{digits}}/{self.epoch_samples} ({100.0 * (index + 1) / self.steps:.0f}%)] "
            f"Data (t): {self.data_time.avg:.3f} "
            f"Batch (t): {self.batch_time.avg:.3f}, {rate:#g}/s, {per_gpu:#g}/s/gpu "
            f"LR: {lr:5f} Logit Scale: {scale:.3f} "
            + " ".join(
                f"{key.capitalize()}: {meter.val:#.5g} ({meter.avg:#.5g})"
                for key, meter in self.losses.items()
            )
            + sources_line
            + f" Data wait: {waited:.0%} Memory: {memory / 2**30:.1f} GiB"
            + (f" ETA: {eta}" if eta else "")
        )
        if self.run_log is not None:
            by_source = {
                name.removeprefix("loss/"): v
                for name, v in of_sources.items()
                if name.startswith("loss/")
            }
            self.run_log.step(
                self.epoch,
                index,
                {**values, "by_source": by_source, "lr": lr, "logit_scale": scale, "samples_per_second": rate,
                 "waited": waited, "memory_bytes": memory},
            )  # fmt: skip
        self._report(
            step,
            {
                "data_time": self.data_time.val,
                "batch_time": self.batch_time.val,
                "samples_per_second": rate,
                "samples_per_second_per_gpu": per_gpu,
                "scale": scale,
                "lr": lr,
                **values,
                **of_sources,
            },
        )
        self.batch_time.reset()
        self.data_time.reset()
        if index + 1 == self.steps:
            self._stuck(step)
            total, samples = (
                self.end - self.counted_from,
                self.counted_steps * self.batching.rank_batch,
            )
            sentence = loader_sentence(
                self.waited, total, samples, getattr(self.args, "workers", 0)
            )
            if sentence is not None and self._first("loader"):
                logging.info(f"Epoch {self.epoch}: {sentence}.")

    def _stuck(self, step: int) -> None:
        if self.judged and step >= JUDGED_FROM_STEP:
            sentence = stuck_sentence(self.losses["loss"].avg, self.batching.effective_batch)
            if sentence is not None and self._first("stuck"):
                logging.warning(f"Epoch {self.epoch}: {sentence}.")
            elif sentence is not None:
                logging.warning(
                    f"Epoch {self.epoch}: the loss, {self.losses['loss'].avg:.4g}, is still that of chance."
                )

    def _first(self, kind: str) -> bool:
        """Return whether a message is the first of its kind: each epoch would repeat it."""
        return self.run_log is None or self.run_log.first(kind)

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        metrics = {"train/" + name: value for name, value in metrics.items()}
        if self.tb_writer is not None:
            for name, value in metrics.items():
                self.tb_writer.add_scalar(name, value, step)
        if (reporter := reporter_of(self.args)) is not None:
            reporter.log({**metrics, "step": step}, step=step)
