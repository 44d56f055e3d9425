"""A run's record and page on its first rank, its few lines beside open_clip's log, and that log on standard error.

The log file has everything. With flags of the recipe standard error has a short form: the run's own lines, open_clip's lines of
steps and evaluations, and all warnings. `--verbose` shows everything.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import open_clip_zerovl
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.report.record import Record, read_record
from open_clip_zerovl.report.tables import duration
from open_clip_zerovl.sampling.schedule import Batching

_OURS = tuple(
    os.path.join(os.path.dirname(file), "")
    for file in (__file__, open_clip_zerovl.__file__)
    if file is not None
)
# of open_clip: its lines of steps and metrics
_TRAINING_AND_EVALUATION = os.path.join("open_clip_train", "train.py")
# open_clip sets them all to INFO
_LIBRARIES = ("torch", "transformers", "timm", "PIL", "fsspec", "matplotlib")


class EarlyHandler(logging.StreamHandler):
    """Shows messages in the form of open_clip's log until its main has set that up.

    Without it the first message would make `logging` add a handler of its own, and each later line would come twice.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(
            logging.Formatter("%(asctime)s | %(levelname)s | %(message)s", "%Y-%m-%d,%H:%M:%S")
        )
        if not logging.root.handlers:
            logging.root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message if no other handler does."""
        if logging.root.handlers == [self]:
            super().emit(record)

    def close(self) -> None:
        """Take the handler away."""
        logging.root.removeHandler(self)
        super().close()


def shorten(rank: int) -> None:
    """Set the short form from now on.

    Call it when open_clip's main has set up its log.
    """
    for handler in logging.root.handlers:
        if type(handler) is logging.StreamHandler:
            handler.addFilter(lambda record: _is_shown(record, rank))
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in _LIBRARIES:
            logging.getLogger(name).setLevel(logging.WARNING)


def close_logs_in(folder: Path) -> None:
    """Close the log files in a folder that is removed.

    A later run in this process would write to them again.
    """
    for handler in list(logging.root.handlers):
        if (
            isinstance(handler, logging.FileHandler)
            and folder.absolute() in Path(handler.baseFilename).parents
        ):
            logging.root.removeHandler(handler)
            handler.close()


def _is_shown(record: logging.LogRecord, rank: int) -> bool:
    ours = record.pathname.startswith(_OURS)
    if record.levelno >= logging.WARNING:
        return ours or rank == 0
    return ours or record.pathname.endswith(_TRAINING_AND_EVALUATION)


# ---------------------------------------------------------------------------------------------------------------------
# The record and the page
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run before its first step.

    Attributes:
        sources: sources of the mixture; none for open_clip's own data.
        steps: optimizer steps of an epoch.
        epoch, start: where the run begins or continues.
        loss_at_chance: the loss of a model at chance; None for losses of another form.
        resumed: the checkpoint that it continues from.
        groups: parameter groups of the optimizer, see `recipe.optimizer.described_groups`.
    """

    batching: Batching
    sources: Sequence[Source]
    steps: int
    epoch: int
    start: int
    loss_at_chance: float | None
    resumed: str | None
    groups: Sequence[tuple[str, float, float, int, int]] = ()

    @property
    def batch(self) -> str:
        """Write the effective batch and its factors."""
        b, k, w = self.batching.micro_batch, self.batching.dga_steps, self.batching.world_size
        return f"{b} x {k} x {w} = {self.batching.effective_batch:,} pairs a step (micro-batch x DGA steps x ranks)"


class RunLog:
    """A run's record and page. Before `begin`, and on other ranks, nothing is done.

    A record or page that cannot be written gets one warning and does not end the training.

    Attributes:
        not_finite: losses that were not finite numbers, in steps of this process.
    """

    def __init__(self, args: argparse.Namespace, config: AllFlags) -> None:
        self.args = args
        self.config = config
        self.not_finite = 0
        self._facts: RunFacts | None = None
        self._record: Record | None = None
        self._began = 0.0
        self._said: set[str] = set()

    def first(self, kind: str) -> bool:
        """Return True the first time that this process asks about a kind of message."""
        new = kind not in self._said
        self._said.add(kind)
        return new

    def begin(self, facts: RunFacts) -> None:
        """Open the record at the position where the run begins or continues."""
        if self.args.rank != 0:
            return
        self._facts = facts
        self._began = time.monotonic()
        epochs = self.args.epochs
        logging.info(
            f"Training {self.args.model}: {facts.batch}, {facts.steps:,} steps an epoch, {epochs} epoch{'s' * (epochs != 1)}"
            + (
                f"; goes on after step {facts.start} of epoch {facts.epoch}"
                if facts.epoch or facts.start
                else ""
            )
            + "."
        )
        if not self.args.save_logs:
            return
        logging.info(
            f"All messages, settings and the model: {os.path.normpath(self.args.log_path)}"
        )
        folder, at = Path(self.args.logs) / self.args.name, facts.epoch + facts.start / facts.steps
        try:
            self._record = Record(folder, at)
        except (OSError, UserError) as error:
            self._give_up(error)
        self.add(
            "start", at, model=self.args.model, batch=facts.batch, epochs=epochs, steps=facts.steps,
            loss_at_chance=facts.loss_at_chance, sources={source.name: source.num_samples for source in facts.sources},
            # `--sampling random` is what named sources get without the flag.
            settings={name: str(value) for name, value in self.config.given.items() if (name, value) != ("sampling", "random")},
            resumed=facts.resumed,
            groups=[(part, f"{scale:.3g}", f"{decay:g}", n, f"{size:,}") for part, scale, decay, n, size in facts.groups],
        )  # fmt: skip

    def step(self, epoch: int, index: int, entries: Mapping[str, Any]) -> None:
        """Record a logged step.

        Args:
            entries: `loss`, `by_source`, `lr`, `samples_per_second`, `waited`, `memory_bytes`, and any other metrics.
        """
        if self._facts is not None:
            at = epoch + (index + 1) / self._facts.steps
            self.add("step", at, epoch=epoch, step=index, **entries)

    def eta(self, epoch: int, index: int) -> str:
        """Estimate the time of the remaining steps at this process's mean pace.

        Returns:
            "" before `begin`.
        """
        if self._facts is None:
            return ""
        done = self._facts.steps * epoch + index + 1
        here = done - self._facts.steps * self._facts.epoch - self._facts.start
        left = self._facts.steps * self.args.epochs - done
        return duration(round(left * (time.monotonic() - self._began) / max(1, here)))

    def end(self, how: str, words: str = "") -> None:
        """Close the record and write the page.

        After a run that is done, log its results and the next command.

        Args:
            how: done, stopped or failed.
        """
        if self._facts is None:
            return
        self._facts = None
        if self.not_finite:
            words = (
                f"The loss was not a finite number in {self.not_finite:,} steps. {words}".strip()
            )
        if how == "done":
            logging.info(f"Done in {duration(round(time.monotonic() - self._began))}.")
        if self._record is not None:
            self.add("end", self._record.at, how=how, words=words)
        if self._record is not None:
            self._write_page(self._record.path.parent, how)

    def _write_page(self, folder: Path, how: str) -> None:
        from open_clip_zerovl.report.run_page import PAGE, verdict_words, write_run_page

        folder = Path(os.path.normpath(folder))
        try:
            page = write_run_page(folder)
            verdict = verdict_words(read_record(folder))
        except (
            Exception
        ) as error:  # a page must not turn a training that is done into one that failed
            reason = (
                str(error)
                if isinstance(error, UserError)
                else f"{type(error).__name__}: {first_line(error)}"
            )
            logging.warning(f"{folder / PAGE} is not written: {reason}.")
            return
        if how == "done" and verdict:
            logging.info(verdict)
        logging.info(f"Page of the run: {page}.")
        if how == "done":
            checkpoint = folder / "checkpoints" / f"epoch_{self.args.epochs}.pt"
            logging.info(f"Next: zerovl export {checkpoint} {folder / 'exported'}")

    def add(self, kind: str, at: float, **entries: Any) -> None:
        """Add a line to the record, if there is one."""
        if self._record is None:
            return
        try:
            self._record.add(kind, at, **entries)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._record = None
        logging.warning(f"The run's record is not written any more: {first_line(error)}.")


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: on a GPU the memory of its tensors, else its main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
