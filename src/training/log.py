"""The log of a run: open_clip's log and `record.jsonl`, from which the first rank makes the run's page.

A logged step is one line of open_clip's log, with waiting time, memory and ETA, and one line of the record. tensorboard and
wandb get the same numbers under open_clip's names.

The log file has everything. With flags of the recipe standard error has a short form: the run's own lines, open_clip's lines of
steps and evaluations, and all warnings. `--debug` shows everything.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from open_clip_train.distributed import is_master
from open_clip_train.train import AverageMeter

import open_clip_zerovl
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.processes import usable_cores
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.losses.contrastive import Report
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.report.run import (
    PAGE,
    RECORD,
    Record,
    next_command,
    read_record,
    verdict_words,
    write_run_page,
)
from open_clip_zerovl.report.tables import duration
from open_clip_zerovl.sampling.schedule import Batching

# ---------------------------------------------------------------------------------------------------------------------
# Standard error
# ---------------------------------------------------------------------------------------------------------------------

_OURS = tuple(
    os.path.join(os.path.dirname(file), "")
    for file in (__file__, open_clip_zerovl.__file__)
    if file is not None
)
# of open_clip: its lines of steps and metrics
_TRAINING_AND_EVALUATION = os.path.join("open_clip_train", "train.py")
# open_clip sets them all to INFO
_LIBRARIES = ("torch", "transformers", "timm", "PIL", "fsspec", "matplotlib")


def early_handler() -> logging.Handler:
    """Show messages in the form of open_clip's log until its main has set that up.

    Without it the first message would make `logging` add a handler of its own, and each later line would come twice.
    """
    handler = logging.StreamHandler()
    form = logging.Formatter("%(asctime)s | %(levelname)s | %(message)s", "%Y-%m-%d,%H:%M:%S")
    handler.setFormatter(form)
    handler.addFilter(lambda _: logging.root.handlers == [handler])
    if not logging.root.handlers:
        logging.root.addHandler(handler)
    return handler


def shorten(rank: int) -> None:
    """Set the short form, once open_clip's main has set up its log."""
    for handler in logging.root.handlers:
        if type(handler) is logging.StreamHandler:
            handler.addFilter(lambda record: _is_shown(record, rank))
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in _LIBRARIES:
            logging.getLogger(name).setLevel(logging.WARNING)


def _is_shown(record: logging.LogRecord, rank: int) -> bool:
    ours = record.pathname.startswith(_OURS)
    if record.levelno >= logging.WARNING:
        return ours or rank == 0
    return ours or record.pathname.endswith(_TRAINING_AND_EVALUATION)


# ---------------------------------------------------------------------------------------------------------------------
# The record and the page
# ---------------------------------------------------------------------------------------------------------------------


class RunLog:
    """The record and page of a run.

    Before `begin`, and on other ranks, nothing is written. A record or page that cannot be written gets one warning and does
    not end the training.

    Attributes:
        not_finite: losses that were not finite numbers, in steps of this process.
    """

    def __init__(self, args: argparse.Namespace, config: AllFlags) -> None:
        self.args = args
        self.config = config
        self.not_finite = 0
        self._record: Record | None = None
        self._began: float | None = None  # None: not begun, or ended
        self._steps = self._begins_at = 0  # steps of an epoch, and of the run before this process
        self._said: set[str] = set()

    def first(self, kind: str) -> bool:
        """Return True the first time that this process asks about a kind of message."""
        new = kind not in self._said
        self._said.add(kind)
        return new

    def begin(
        self,
        batching: Batching,
        steps: int,
        epoch: int = 0,
        start: int = 0,
        *,
        sources: Sequence[Source] = (),
        **facts: Any,
    ) -> None:
        """Open the record at the position where the run begins or continues.

        Args:
            steps: optimizer steps of an epoch.
            epoch, start: the position.
            sources: sources of the mixture.
            facts: further entries of the record's line: `loss_at_chance`, `resumed`, `groups`.
        """
        if self.args.rank != 0:
            return
        self._steps, self._begins_at = steps, steps * epoch + start
        self._began = time.monotonic()
        factors = f"{batching.micro_batch} x {batching.dga_steps} x {batching.world_size}"
        batch = f"{factors} = {batching.effective_batch:,} pairs a step (micro-batch x DGA steps x ranks)"
        epochs = self.args.epochs
        where = f"; goes on after step {start} of epoch {epoch}" if self._begins_at else ""
        logging.info(
            f"Training {self.args.model}: {batch}, {steps:,} steps an epoch, {epochs} epoch{'s' * (epochs != 1)}{where}."
        )
        if not self.args.save_logs:
            return
        logging.info(
            f"All messages, settings and the model: {os.path.normpath(self.args.log_path)}"
        )
        at = self._begins_at / steps
        self._open_record(at)
        self.add(
            "start", at, model=self.args.model, batch=batch, epochs=epochs, steps=steps,
            sources={source.name: source.num_samples for source in sources},
            # `--sampling random` is what named sources get without the flag.
            settings={
                name: " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
                for name, value in self.config.given.items()
                if (name, value) != ("sampling", "random")
            },
            **facts,
        )  # fmt: skip

    def add(self, kind: str, at: float, **entries: Any) -> None:
        """Add a line to the record, if there is one."""
        if self._record is None:
            return
        try:
            self._record.add(kind, at, **entries)
        except OSError as error:
            self._give_up(error)

    def _open_record(self, at: float) -> None:
        try:
            self._record = Record(Path(self.args.logs) / self.args.name, at)
        except (OSError, UserError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._record = None
        logging.warning(f"The run's record is not written any more: {first_line(error)}.")

    def eta(self, steps_done: int) -> str:
        """Estimate the time of the remaining steps at this process's mean pace, after some steps of the run.

        Returns:
            "" before `begin`.
        """
        if self._began is None:
            return ""
        pace = (time.monotonic() - self._began) / max(1, steps_done - self._begins_at)
        return duration(round(pace * (self._steps * self.args.epochs - steps_done)))

    def end(self, how: str, words: str = "") -> None:
        """Close the record and write the page.

        After a run that is done, log its results and the next command.

        Args:
            how: done, stopped or failed.
        """
        if self._began is None:
            folder = Path(self.args.logs) / self.args.name
            if how != "done" or self.args.rank != 0 or not (folder / RECORD).is_file():
                return
            # Nothing was left to train: the process that trained may have been killed while it wrote the page.
            self._open_record(self.args.epochs)
        elif how == "done":
            logging.info(f"Done in {duration(round(time.monotonic() - self._began))}.")
        self._began = None
        if self.not_finite:
            words = (
                f"The loss was not a finite number in {self.not_finite:,} steps. {words}".strip()
            )
        if self._record is not None:
            self.add("end", self._record.at, how=how, words=words)
        if self._record is not None:
            self._write_page(Path(os.path.normpath(self._record.path.parent)), how)

    def _write_page(self, folder: Path, how: str) -> None:
        try:
            page = write_run_page(folder)
            verdict = verdict_words(read_record(folder))
        except Exception as error:  # a page must not turn a training that is done into a failed one
            logging.warning(
                f"{folder / PAGE} is not written ({type(error).__name__}: {first_line(error)})."
            )
            return
        if how == "done" and verdict:
            logging.info(verdict)
        logging.info(f"Page of the run: {page}.")
        if how == "done" and (command := next_command(folder)):
            logging.info(f"Next: {command}")


def report(
    args: argparse.Namespace,
    tb_writer: Any,
    metrics: Mapping[str, float],
    at: int,
    step: int | None,
    also: Mapping[str, int],
) -> None:
    """Report metrics to tensorboard, and to wandb or open_clip 4's trackio where `--report-to` names one.

    Args:
        tb_writer: None without tensorboard.
        at: their position on tensorboard, a step or an epoch.
        step, also: wandb's position, and its further metrics.
    """
    if tb_writer is not None:
        for name, value in metrics.items():
            tb_writer.add_scalar(name, value, at)
    reporter = "trackio" if getattr(args, "trackio", False) else "wandb" if args.wandb else None
    if reporter is not None:
        importlib.import_module(reporter).log({**metrics, **also}, step=step)


# ---------------------------------------------------------------------------------------------------------------------
# The steps of an epoch
# ---------------------------------------------------------------------------------------------------------------------

LOGGED_AN_EPOCH = 20  # steps, at least, whatever --log-every-n-steps
STUCK_SHARE = 0.99  # of ln N: an epoch with a mean loss from there on has learned nothing
JUDGED_FROM_STEP = 100  # of the run; a loss is that of chance when training begins
LIMITING_SHARE = 0.1  # smallest share of an epoch's time spent waiting for data that is logged


class BySource:
    """The mean loss of each source's pairs since the last `take`.

    With one source a step the loss of a step jumps between sources; these numbers do not. Sums stay on the device until `take`,
    so that no step waits for them.

    Args:
        names: the names of the sources, in their order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._sums: torch.Tensor | None = None  # (2, S): losses, pairs

    def see(self, report: Report) -> None:
        """Add a step's pairs of all ranks, where there are several sources."""
        if report.sources is None or report.pair_losses is None or len(self.names) < 2:
            return
        losses = report.pair_losses.float()
        if self._sums is None:
            self._sums = torch.zeros(2, len(self.names), device=losses.device)
        # Added up step by step: fp32 rounds a single loss that is added to the sum of a million (by 0.3 % on average).
        of_step = torch.zeros_like(self._sums)
        self._sums += of_step.index_add_(
            1, report.sources, torch.stack([losses, torch.ones_like(losses)])
        )

    def take(self) -> dict[str, float]:
        """Return the mean losses of the sources that were seen, and reset the sums."""
        if self._sums is None:
            return {}
        of_sources = zip(self.names, self._sums.T.tolist(), strict=True)
        self._sums = None
        return {name: loss / pairs for name, (loss, pairs) in of_sources if pairs}


class StepLog:
    """The log of an epoch's steps, in effective samples.

    Args:
        run_log: gets each logged step.
        chance: the loss of a model that has learned nothing, where it is known.
        recovers: whether a GradScaler leaves out the step of a loss that is not finite.
    """

    def __init__(
        self,
        run_log: RunLog,
        args: argparse.Namespace,
        epoch: int,
        steps: int,
        epoch_samples: int,
        batching: Batching,
        tb_writer=None,
        sources: Sequence[str] = (),
        *,
        chance: float | None = None,
        recovers: bool = False,
    ) -> None:
        self.run_log = run_log
        self.args = args
        self.epoch = epoch
        self.steps = steps
        self.epoch_samples = epoch_samples
        self.batching = batching
        self.tb_writer = tb_writer
        self.chance, self.recovers = chance, recovers
        self.by_source = BySource(sources)
        self.every = max(1, min(args.log_every_n_steps, steps // LOGGED_AN_EPOCH))
        self.batch_time, self.data_time = AverageMeter(), AverageMeter()
        self.losses: dict[str, AverageMeter] = {}
        self._not_finite: torch.Tensor | float = 0.0  # since the last logged step, on the device
        self.end = time.time()
        # without the first step, which waits for the workers' start
        self.waited = 0.0
        self.counted_from: float | None = None

    def data_ready(self) -> None:
        """Call when all micro-batches of the step have come from the loader."""
        wait = time.time() - self.end
        self.data_time.update(wait)
        if self.counted_from is not None:
            self.waited += wait

    def step_done(self, index: int, step: int, outputs: dict[str, Any], lr: float) -> None:
        """Log an optimizer step, if it is due.

        Call it after the step, on all ranks.

        Raises:
            UserError: a loss since the last logged step was not a finite number, and so the weights are none.
        """
        self.batch_time.update(time.time() - self.end)
        self.end = time.time()
        if self.counted_from is None:
            self.counted_from = self.end
        loss = outputs["loss"]
        finite = loss.detach().isfinite() if isinstance(loss, torch.Tensor) else math.isfinite(loss)
        self._not_finite = self._not_finite + (1.0 - finite * 1.0)
        if index % self.every and index + 1 != self.steps:
            return
        self._require_finite(index)
        if not is_master(self.args):
            return
        values = {key: float(value) for key, value in outputs.items()}
        scale = values.pop("logit_scale")
        values.pop("logit_bias", None)
        self._write(index, step, values, scale, lr)
        self.batch_time.reset()
        self.data_time.reset()
        if index + 1 == self.steps:
            self._warn_once(step)

    def _require_finite(self, index: int) -> None:
        lost, self._not_finite = int(self._not_finite), 0.0
        if not lost:
            return
        self.run_log.not_finite += lost
        advice = "a lower --lr, --grad-clip-norm 1, or --precision amp_bf16 or fp32"
        if not self.recovers:
            raise UserError(
                f"in {lost} of the steps up to step {index + 1} of epoch {self.epoch} the loss is not a finite number, "
                "and the weights are not finite numbers from there on; continue from an earlier checkpoint with --resume "
                f"latest, or start again, with {advice}"
            )
        if is_master(self.args):
            logging.warning(
                f"Step {index + 1} of epoch {self.epoch}: the loss is not a finite number in {lost} of the last steps, which "
                f"the scaler of --precision amp left out; try {advice}."
            )

    def _write(
        self, index: int, step: int, values: dict[str, float], scale: float, lr: float
    ) -> None:
        """Write a step to the log, the record, and the places of `--report-to`."""
        for key, value in values.items():
            self.losses.setdefault(key, AverageMeter()).update(value, self.batching.rank_batch)
        per_gpu = self.batching.rank_batch / self.batch_time.val
        metrics = {
            "data_time": self.data_time.val,
            "batch_time": self.batch_time.val,
            "samples_per_second": per_gpu * self.batching.world_size,
            "samples_per_second_per_gpu": per_gpu,
            "scale": scale,
            "lr": lr,
            **values,
        }
        of_sources = self.by_source.take()
        waited = self.data_time.sum / self.batch_time.sum
        memory = memory_bytes(torch.device(getattr(self.args, "device", "cpu")))

        losses = [
            f"{key.capitalize()}: {meter.val:#.5g} ({meter.avg:#.5g})"
            for key, meter in self.losses.items()
        ]
        words = [f"{name} {loss:#.5g}" for name, loss in of_sources.items()]
        losses += [f"By source: {', '.join(words)}"] * bool(words)
        eta = self.run_log.eta(self.steps * self.epoch + index + 1)
        seen = (index + 1) * self.batching.effective_batch
        digits = math.ceil(math.log(self.epoch_samples + 1, 10))
        logging.info(
            f"Train Epoch: {self.epoch} [{seen:>{digits}}/{self.epoch_samples} ({100.0 * (index + 1) / self.steps:.0f}%)] "
            f"Data (t): {self.data_time.avg:.3f} "
            f"Batch (t): {self.batch_time.avg:.3f}, {metrics['samples_per_second']:#g}/s, {per_gpu:#g}/s/gpu "
            f"LR: {lr:5f} Logit Scale: {scale:.3f} {' '.join(losses)} "
            f"Data wait: {waited:.0%} Memory: {memory / 2**30:.1f} GiB" + f" ETA: {eta}" * bool(eta)
        )
        self.run_log.add(
            "step", self.epoch + (index + 1) / self.steps, epoch=self.epoch, step=index, by_source=of_sources, waited=waited,
            memory_bytes=memory, **metrics,
        )  # fmt: skip
        metrics |= {f"loss/{name}": loss for name, loss in of_sources.items()}
        reported = {f"train/{name}": value for name, value in metrics.items()}
        report(self.args, self.tb_writer, reported, step, step, {"step": step})

    def _warn_once(self, step: int) -> None:
        """Warn, in the first such epoch of a process, of a loss that is that of chance and of a slow loader."""
        loss = self.losses["loss"].avg
        stuck = self.chance and step >= JUDGED_FROM_STEP and loss >= STUCK_SHARE * self.chance
        if stuck and self.run_log.first("stuck"):
            logging.warning(
                f"Epoch {self.epoch}: the loss, {loss:.4g}, is that of chance, {self.chance:.4g}: the model does not "
                "tell which caption belongs to which picture; look at the learning rate (--lr, --warmup), at captions and "
                "pictures, and at the starting weights."
            )
        assert self.counted_from is not None  # a step is done
        seconds = self.end - self.counted_from
        share = self.waited / seconds if seconds > 0 else 0.0
        if share >= LIMITING_SHARE and self.run_log.first("loader"):
            logging.info(
                f"Epoch {self.epoch}: {share:.0%} of the time waited for data, with {self.args.workers} workers on "
                f"{usable_cores()} cores; more of either, or smaller pictures, make it faster."
            )


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: on a GPU the memory of its tensors, else its main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
