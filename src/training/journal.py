"""What a run tells of itself on its first rank: on the console, in its record, and on the page made from the record."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.data.health import Books
from open_clip_zerovl.report.record import Record, read_record
from open_clip_zerovl.report.run_page import PAGE, best_words, write_run_page
from training.config import RecipeConfig
from training.console import Console, seconds_in_words
from training.summary import Facts, settings_of, summary

REDRAW_SECONDS = 0.5
_GIB = 2**30


class Journal:
    """A run's console lines and record. Before `begin`, and on other ranks, nothing is done.

    A record or page that cannot be written is told once and does not end the training.
    """

    def __init__(self, args: argparse.Namespace, config: RecipeConfig, console: Console) -> None:
        self.args, self.config, self.console = args, config, console
        self.facts: Facts | None = None
        self._record: Record | None = None
        self._began = self._drawn = 0.0
        self._steps_here = 0  # done by this process
        self._last: dict[str, Any] = {}
        self._said: set[str] = set()

    def first(self, kind: str) -> bool:
        """Whether this process asks for the first time whether to say something of a kind."""
        new = kind not in self._said
        self._said.add(kind)
        return new

    # -----------------------------------------------------------------------------------------------------------------
    # Training
    # -----------------------------------------------------------------------------------------------------------------

    def begin(self, facts: Facts) -> None:
        """Say what will be done, and open the record at the position where the run begins or goes on."""
        if self.args.rank != 0:
            return
        self.facts = facts
        self._began = time.monotonic()
        if self.console.short:
            for line in summary(facts):
                logging.info(line)
        if not self.args.save_logs:
            return
        folder, at = Path(self.args.logs) / self.args.name, facts.epoch + facts.start / facts.steps
        try:
            self._record = Record(folder, at)
        except (OSError, UserError) as error:
            self._give_up(error)
        self._add(
            "start", at, model=facts.args.model, batch=facts.batch, epochs=facts.args.epochs, steps=facts.steps,
            loss_at_chance=facts.loss_at_chance, sources={source.name: source.num_samples for source, _ in facts.sources},
            settings=settings_of(self.args, self.config), resumed=facts.resumed,
        )  # fmt: skip

    def step(self, epoch: int, index: int, rate: float) -> None:
        """A step is done, whose loss is not looked at: the terminal's line goes on.

        Args:
            rate: samples a second over all ranks.
        """
        if self.facts is None:
            return
        self._steps_here += 1
        if self.console.progress.possible and time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._draw(epoch, index, rate)

    def logged(self, epoch: int, index: int, entries: Mapping[str, Any]) -> None:
        """A step is logged.

        Args:
            entries: `loss`, `by_source`, `lr`, `samples_per_second`, `waited`, `memory_bytes` and what else the record is to
                hold.
        """
        if self.facts is None:
            return
        # A step from one source tells nothing of the others, whose last losses stay on show.
        self._last = {**entries, "by_source": {**self._last.get("by_source", {}), **entries["by_source"]}}
        if self.console.progress.possible:
            self._draw(epoch, index, entries["samples_per_second"])
        self._add("step", epoch + (index + 1) / self.facts.steps, epoch=epoch, step=index, **entries)

    def lost(self, at: float, books: Books) -> None:
        """What was delivered and lost since the epoch, or this process, began."""
        self._add("lost", at, delivered=books.delivered, lost=books.lost)

    def retrieval(self, epoch: int, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """An evaluation on the retrieval sets."""
        self._add("retrieval", epoch, metrics=metrics)

    def eta(self, epoch: int, index: int) -> str:
        """The time that the rest of the steps takes at this process's mean pace; "" before it is known."""
        if self.facts is None or not self._steps_here:
            return ""
        left = self.facts.steps * self.args.epochs - (self.facts.steps * epoch + index + 1)
        return seconds_in_words(left * (time.monotonic() - self._began) / self._steps_here)

    def _draw(self, epoch: int, index: int, rate: float) -> None:
        assert self.facts is not None
        self._drawn = time.monotonic()
        # What a person looks for first comes first: a terminal of 80 columns cuts the rest, and sources can be many.
        words = [
            f"epoch {epoch + 1}/{self.args.epochs} step {index + 1}/{self.facts.steps}, ETA {self.eta(epoch, index)}"
        ]
        own = ""
        if "loss" in self._last:
            own = ", ".join(f"{name} {value:.3g}" for name, value in self._last["by_source"].items())
            words.append(f"loss {self._last['loss']:.4g}")
        words.append(f"{rate:,.0f} samples/s")
        if "waited" in self._last:
            words.append(f"data {self._last['waited']:.0%}")
            words.append(f"{self._last['memory_bytes'] / _GIB:.1f} GiB")
        if own:
            words.append(own)
        self.console.progress.show(" | ".join(words))

    # -----------------------------------------------------------------------------------------------------------------
    # The end
    # -----------------------------------------------------------------------------------------------------------------

    def end(self, how: str, words: str = "", at: float | None = None) -> None:
        """Close the record and write the page; after a run that is done, say what there is and what comes next.

        Args:
            how: done, stopped or failed.
        """
        if self.facts is None:
            return
        self.console.progress.end()
        record, facts = self._record, self.facts
        self.facts = None
        if record is not None:
            self._add("end", record.at if at is None else at, how=how, words=words)
        page = None
        if self._record is not None:
            folder = self._record.path.parent
            try:
                page = write_run_page(folder)
            except Exception as error:  # a page must not turn a training that is done into one that failed
                reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
                logging.warning(f"{folder / PAGE} is not written: {reason}; `zerovl report {folder}` writes it later.")
        if how == "done":
            for line in self._closing(facts, page):
                logging.info(line)
        elif page is not None:
            logging.info(f"Page of the run: {page}.")

    def _closing(self, facts: Facts, page: Path | None) -> list[str]:
        lines = [f"Done: {self._steps_here:,} steps in {seconds_in_words(time.monotonic() - self._began)}."]
        if not self.args.save_logs:
            return lines
        folder = os.path.normpath(os.path.join(self.args.logs, self.args.name))
        checkpoint = os.path.join(folder, "checkpoints", f"epoch_{self.args.epochs}.pt")
        lines[0] += f" Checkpoint: {checkpoint}."
        if self._record is not None:
            lines += filter(None, [best_words(read_record(folder)["retrieval"])])
        if page is not None:
            lines.append(f"Page of the run: {page}.")
        lines.append(f"Next: zerovl export {checkpoint} {os.path.join(folder, 'exported')}")
        return lines

    # -----------------------------------------------------------------------------------------------------------------

    def _add(self, kind: str, at: float, **entries: Any) -> None:
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
    """Peak memory of this process: on a GPU what its tensors took there, else its main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
