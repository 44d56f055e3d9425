"""A run's output on its first rank: about ten lines before its first step, progress, a record, its page."""

from __future__ import annotations

import argparse
import logging
import math
import os
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from open_clip_zerovl.core.durations import duration
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.processes import usable_cores
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.stats import EpochStats
from open_clip_zerovl.models.configs import context_length_of
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.report.record import Record, read_record
from training.console import PROGRESS, Console

REDRAW_SECONDS = 0.5
_GIB = 2**30

_LABEL = 10


class RunLog:
    """A run's console lines and record. Before `begin`, and on other ranks, nothing is done.

    A record or page that cannot be written gets one warning and does not end the training.
    """

    def __init__(self, args: argparse.Namespace, config: AllFlags, console: Console) -> None:
        self.args = args
        self.config = config
        self.console = console
        self.facts: RunFacts | None = None
        self._record: Record | None = None
        self._began = self._drawn = 0.0
        self._steps_here = 0  # done by this process
        self._last: dict[str, Any] = {}
        self._said: set[str] = set()
        self.not_finite = 0  # losses, in steps of this process

    def first(self, kind: str) -> bool:
        """True the first time that this process asks about a kind of message."""
        new = kind not in self._said
        self._said.add(kind)
        return new

    # -----------------------------------------------------------------------------------------------------------------
    # Training
    # -----------------------------------------------------------------------------------------------------------------

    def begin(self, facts: RunFacts) -> None:
        """Print the summary, and open the record at the position where the run begins or continues."""
        if self.args.rank != 0:
            return
        self.facts = facts
        self._began = time.monotonic()
        if self.console.short:
            for line in summary(facts):
                logging.info(line)
        self.doing("Waiting for the first batch")
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
            # `--sampling random` is what named sources get without the flag.
            settings={name: str(value) for name, value in self.config.given.items() if (name, value) != ("sampling", "random")},
            resumed=facts.resumed,
            groups=[(part, f"{scale:.3g}", f"{decay:g}", n, f"{size:,}") for part, scale, decay, n, size in facts.groups],
        )  # fmt: skip

    def doing(self, words: str) -> None:
        """Show the run's current activity on the first rank: in the terminal's progress line, or as a line of its own."""
        if self.args.rank == 0:
            self.console.progress.show(words)
            logging.info(words, extra=PROGRESS)

    def step(self, epoch: int, index: int, rate: float) -> None:
        """Call after each step; updates the progress line without reading the loss.

        Args:
            rate: samples a second over all ranks.
        """
        if self.facts is None:
            return
        self._steps_here += 1
        if self.console.progress.possible and time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._draw(epoch, index, rate)

    def logged(self, epoch: int, index: int, entries: Mapping[str, Any]) -> None:
        """Record a logged step.

        Args:
            entries: `loss`, `by_source`, `lr`, `samples_per_second`, `waited`, `memory_bytes`, and any other metrics.
        """
        if self.facts is None:
            return
        # A step from one source has no news of the other sources, whose last losses stay on show.
        self._last = {
            **entries,
            "by_source": {**self._last.get("by_source", {}), **entries["by_source"]},
        }
        if self.console.progress.possible:
            self._draw(epoch, index, entries["samples_per_second"])
        self._add(
            "step", epoch + (index + 1) / self.facts.steps, epoch=epoch, step=index, **entries
        )

    def lost(self, at: float, stats: EpochStats) -> None:
        """Record the samples delivered and lost since the epoch, or this process, began."""
        self._add("lost", at, delivered=stats.delivered, lost=stats.lost)

    def retrieval(self, epoch: int, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Record an evaluation on the retrieval sets."""
        self._add("retrieval", epoch, metrics=metrics)

    def zero_shot(self, epoch: int, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Record an evaluation on the labelled sets."""
        self._add("zero-shot", epoch, metrics=metrics)

    def eta(self, epoch: int, index: int) -> str:
        """The time that the rest of the steps takes at this process's mean pace; "" before it is known."""
        if self.facts is None or not self._steps_here:
            return ""
        left = self.facts.steps * self.args.epochs - (self.facts.steps * epoch + index + 1)
        return duration(round(left * (time.monotonic() - self._began) / self._steps_here))

    def _draw(self, epoch: int, index: int, rate: float) -> None:
        assert self.facts is not None
        self._drawn = time.monotonic()
        # The most important numbers come first: a terminal of 80 columns cuts the rest, and there can be many sources.
        words = [
            f"epoch {epoch + 1}/{self.args.epochs} step {index + 1}/{self.facts.steps}, ETA {self.eta(epoch, index)}"
        ]
        by_source = ""
        if "loss" in self._last:
            by_source = ", ".join(
                f"{name} {value:.3g}" for name, value in self._last["by_source"].items()
            )
            words.append(f"loss {self._last['loss']:.4g}")
        words.append(f"{rate:,.0f} samples/s")
        if "waited" in self._last:
            words.append(f"data {self._last['waited']:.0%}")
            words.append(f"{self._last['memory_bytes'] / _GIB:.1f} GiB")
        if by_source:
            words.append(by_source)
        self.console.progress.show(" | ".join(words))

    # -----------------------------------------------------------------------------------------------------------------
    # The end
    # -----------------------------------------------------------------------------------------------------------------

    def end(self, how: str, words: str = "", at: float | None = None) -> None:
        """Close the record and write the page; after a run that is done, print its results and the next command.

        Args:
            how: done, stopped or failed.
        """
        if self.facts is None:
            return
        self.console.progress.end()
        if self.not_finite:
            words = (
                f"The loss was not a finite number in {self.not_finite:,} steps. {words}".strip()
            )
        record, facts = self._record, self.facts
        self.facts = None
        if record is not None:
            self._add("end", record.at if at is None else at, how=how, words=words)
        page = None
        if self._record is not None:
            from open_clip_zerovl.report.run_page import PAGE, write_run_page  # at the run's end

            folder = self._record.path.parent
            self.doing("Writing the page of the run")
            try:
                page = write_run_page(folder)
            except (
                Exception
            ) as error:  # a page must not turn a training that is done into one that failed
                reason = (
                    str(error)
                    if isinstance(error, UserError)
                    else f"{type(error).__name__}: {first_line(error)}"
                )
                logging.warning(f"{folder / PAGE} is not written: {reason}.")
            self.console.progress.end()
        if how == "done":
            for line in self._closing(facts, page):
                logging.info(line)
        elif page is not None:
            logging.info(f"Page of the run: {page}.")

    def _closing(self, facts: RunFacts, page: Path | None) -> list[str]:
        lines = [
            f"Done: {self._steps_here:,} steps in {duration(round(time.monotonic() - self._began))}."
        ]
        if not self.args.save_logs:
            return lines
        folder = os.path.normpath(os.path.join(self.args.logs, self.args.name))
        checkpoint = os.path.join(folder, "checkpoints", f"epoch_{self.args.epochs}.pt")
        lines[0] += f" Checkpoint: {checkpoint}."
        if self._record is not None:
            from open_clip_zerovl.report.run_page import verdict_words

            lines += filter(None, [verdict_words(read_record(folder))])
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
    """Peak memory of this process: on a GPU the memory of its tensors, else its main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---------------------------------------------------------------------------------------------------------------------
# The lines before the first step
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run before its first step.

    Attributes:
        model: without DDP.
        sources: with the samples that an epoch takes of each; none for open_clip's own data.
        epoch_samples, steps: samples and steps of an epoch.
        epoch, start: where the run begins or continues.
        resumed: the checkpoint that it continues from.
        groups: parameter groups of the optimizer, see `recipe.optimizer.described_groups`.
    """

    args: argparse.Namespace
    config: AllFlags
    model: Any
    loss: Any
    sources: Sequence[tuple[Source, int]]
    epoch_samples: int
    steps: int
    epoch: int
    start: int
    resumed: str | None
    groups: Sequence[tuple[str, float, float, int, int]] = ()

    @property
    def batch(self) -> str:
        """The effective batch and its factors."""
        parts = (self.args.batch_size, self.config.dga_steps, self.args.world_size)
        whole = parts[0] * parts[1] * parts[2]
        return f"{parts[0]} x {parts[1]} x {parts[2]} = {whole:,} pairs a step (micro-batch x DGA steps x ranks)"

    @property
    def loss_at_chance(self) -> float | None:
        """The loss of a model at chance, ln of the effective batch; None for losses of another form."""
        args, config = self.args, self.config
        if getattr(args, "siglip", False) or args.distill_model or config.captions_images:
            return None
        return math.log(args.batch_size * config.dga_steps * args.world_size)


def summary(facts: RunFacts) -> list[str]:
    """The lines, with a label each."""
    args, config = facts.args, facts.config
    said = [
        ("model", _model(facts)),
        *_weights(facts),
        ("data", _data(facts)),
        ("batch", facts.batch),
        (
            "run",
            f"{facts.steps:,} steps an epoch, {args.epochs} epoch{'s' * (args.epochs != 1)}: "
            f"{facts.steps * args.epochs:,} steps"
            + (
                f"; goes on after step {facts.start} of epoch {facts.epoch}"
                if facts.epoch or facts.start
                else ""
            ),
        ),
        ("loss", _loss(facts)),
        ("optimizer", _optimizer(facts)),
        ("device", _device(args)),
        ("saves", _saves(args, config)),
    ]
    if args.log_path:
        path = os.path.normpath(args.log_path)
        said.append(
            (
                "log",
                f"{path} has all settings, the model, and the messages not shown here (--verbose shows them)",
            )
        )
    return [f"{label:<{_LABEL}}{text}" for label, text in said]


def _model(facts: RunFacts) -> str:
    counts = [(p.numel(), p.requires_grad) for p in facts.model.parameters()]
    whole, trained = sum(n for n, _ in counts), sum(n for n, wanted in counts if wanted)
    words = f"{facts.args.model}, {whole / 1e6:,.1f} M parameters"
    if trained != whole:
        words += f", {trained / 1e6:,.1f} M of them trained"
    size = getattr(facts.model.visual, "image_size", None)
    if size is not None:
        sides = size if isinstance(size, tuple | list) else (size, size)
        words += f"; {' x '.join(map(str, sides))} px"
    context = facts.args.force_context_length or context_length_of(facts.args.model, facts.model)
    return words + (f", {context} tokens" if context else "")


def _weights(facts: RunFacts) -> list[tuple[str, str]]:
    args, config = facts.args, facts.config
    if facts.resumed:
        return [("weights", facts.resumed)]
    named = {
        "--init-from": config.init_from, "--init-image": config.init_image, "--init-text": config.init_text,
        "--pretrained": args.pretrained or None, "--pretrained-image": args.pretrained_image or None,
    }  # fmt: skip
    given = [f"{flag} {value}".removesuffix(" True") for flag, value in named.items() if value]
    return [("weights", ", ".join(given))] if given else []


def _data(facts: RunFacts) -> str:
    if not facts.sources:
        return f"{facts.epoch_samples:,} samples an epoch, in open_clip's own pipeline"
    taken = ", ".join(f"{source.name} {count:,}" for source, count in facts.sources)
    order = {
        "debiased": "each step from one source",
        "random": "steps mix sources",
        "sequential": "one source after another",
    }
    words = f"{facts.epoch_samples:,} samples an epoch: {taken}"
    return (
        f"{words}; {order[facts.config.sampling or 'random']}" if len(facts.sources) > 1 else words
    )


def _loss(facts: RunFacts) -> str:
    config = facts.config
    words = [type(facts.loss).__name__]
    words += [f"in chunks of {config.loss_chunk} rows"] if config.loss_chunk else []
    words += [f"mixup {config.mixup_alpha:g}"] if config.coin_flip_mixup else []
    words += [f"token drop {config.token_drop:g}"] if config.token_drop else []
    words += [f"word augmentation {config.text_augment:g}"] if config.text_augment else []
    words += [f"frozen: {', '.join(config.freeze)}"] if config.freeze else []
    return ", ".join(words)


def _optimizer(facts: RunFacts) -> str:
    args, config = facts.args, facts.config
    words = f"{args.opt}, lr {args.lr:g}, weight decay {args.wd:g}"
    if config.own_rates:
        parts = (
            ("image tower", config.lr_image),
            ("text tower", config.lr_text),
            ("heads", config.lr_head),
        )
        words += "".join(f", of {part} {lr:g}" for part, lr in parts if lr is not None)
        words += f", x {config.layer_decay:g} a layer" if config.layer_decay is not None else ""
    words += f", betas {args.beta1:g} and {args.beta2:g}" if args.beta1 is not None else ""
    if args.skip_scheduler:
        return words
    warm = (
        args.warmup
        if config.warmup_share is None
        else round(config.warmup_share * facts.steps * args.epochs)
    )
    floor = f" to {config.lr_min:g}" if config.lr_min else ""
    return f"{words}; {warm:,} steps of warm-up, then {args.lr_scheduler}{floor}"


def _device(args: argparse.Namespace) -> str:
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    loaders = "1 loader process" if args.workers == 1 else f"{args.workers} loader processes"
    words = f"{args.world_size} x {name}, {args.precision}, {loaders} a rank"
    cores = usable_cores()
    if args.workers * args.world_size > cores:
        enough = max(1, cores // args.world_size)
        words += f" (on {cores} CPU core{'s' * (cores > 1)}: --workers {enough} is enough)"
    return words


def _saves(args: argparse.Namespace, config: AllFlags) -> str:
    if not args.save_logs:
        return "nothing (--logs none)"
    often = []
    if config.save_every_steps:
        often.append(
            f"every {config.save_every_steps:,} steps (the newest {config.keep_checkpoints} kept)"
        )
    if args.save_frequency > 0:
        often.append(
            "each epoch" if args.save_frequency == 1 else f"every {args.save_frequency} epochs"
        )
    else:
        often.append("at the end")
    where = os.path.normpath(os.path.join(args.logs, args.name, "checkpoints"))
    return f"{' and '.join(often)}, to {where}"
