"""The `train_one_epoch` hook: K micro-batches -> decoupled gradient accumulation -> one optimizer step.

Schedules, epochs and logs count optimizer steps and effective samples.

    B  micro-batch per rank    K  micro-batches of a step    W  ranks    N = B*K*W  effective batch

With `--plan` (`zerovl plan`) a training takes two steps and prints what the whole run takes. The first step starts the loaders,
makes the optimizer's state and chooses kernels; the second is timed. On a CPU a step has at most two micro-batches, and the
time of the run's step follows from it: each micro-batch costs the same, and a third more where it is forwarded twice. Nothing
is saved.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip_train.distributed import is_master
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import free_space
from open_clip_zerovl.core.randomness import seed_step
from open_clip_zerovl.dga.extras import CaptionTerm
from open_clip_zerovl.dga.model import on_device, unwrapped
from open_clip_zerovl.dga.replay import restored_buffers
from open_clip_zerovl.dga.step import Prepare
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.optimizer import described_groups
from open_clip_zerovl.recipe.step import MicroBatch, RecipeStep
from open_clip_zerovl.report.tables import duration, size_words
from open_clip_zerovl.sampling.schedule import Batching
from training.checkpointing import Position, checkpoint_bytes, save_step
from training.data import batching_of
from training.log import RunLog, StepLog, memory_bytes
from training.stopping import Preemption, Stopped


def create_loss(
    config: AllFlags, args: argparse.Namespace, model: torch.nn.Module | None = None
) -> torch.nn.Module:
    """Make the loss of our step, ContrastiveLoss.

    With `--siglip` SigmoidLoss, or open_clip's if no flag needs ours.

    Args:
        model: the run's, which may learn to write captions.
    """
    if config.distill_model is not None:
        return open_clip.create_loss(args)
    asked: dict[str, Any] = {"positives": config.positives or "pair"}
    if captions(model):
        asked["weight"] = args.coca_contrastive_loss_weight
    if args.siglip:
        plain = not config.changes("loss_chunk", "positives")
        if plain and not captions(model):
            return open_clip.create_loss(args)
        return SigmoidLoss(
            chunk_size=config.loss_chunk, rank=args.rank, world_size=args.world_size, **asked
        )
    if "detached-gather" in config.ablate and args.world_size == 1:
        logging.warning(
            "--ablate detached-gather changes nothing in one process: no feature is gathered, and gradients are right."
        )
    return ContrastiveLoss(
        chunk_size=config.loss_chunk,
        rank=args.rank,
        world_size=args.world_size,
        gather_grad="detached-gather" not in config.ablate,
        **asked,
    )


def captions(model: torch.nn.Module | None) -> bool:
    """Return whether a model is open_clip's CoCa, which returns the logits of a caption's tokens beside its features."""
    return model is not None and hasattr(unwrapped(model)[0], "text_decoder")


class Trainer:
    """Trains an epoch, called like open_clip's `train_one_epoch`, and keeps the `RecipeStep` between epochs.

    Args:
        preemption: asked after every step whether the run is to stop.
        log: the run's record.
        resumed: the position of the checkpoint from which this run was resumed, if it has one.
        mixup: draws a mix per step, if mixup is on.
        teacher: the model of `--distill-model`, or None.
        entries: added to each step checkpoint.

    Attributes:
        epoch_end: after an epoch, the position for open_clip's checkpoint of it.
    """

    def __init__(
        self,
        config: AllFlags,
        preemption: Preemption,
        log: RunLog,
        resumed: Position | None = None,
        *,
        mixup: CoinFlipMixup | None = None,
        teacher: torch.nn.Module | None = None,
        entries: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.preemption = preemption
        self.resumed = resumed
        self.entries = entries or {}
        self.mixup = mixup
        self.log = log
        self.teacher = None if teacher is None else unwrapped(teacher)[0].eval()
        self.step: RecipeStep | None = None
        self._settled = False  # what comes once before the first step of this process is done
        self.epoch_end: Position | None = None

    def __call__(
        self, model, data, loss, epoch, optimizer, scaler, scheduler, args, tb_writer=None
    ) -> None:
        """Train one epoch, or the rest of it after a resume from a step checkpoint.

        Raises:
            Stopped: the run was asked to stop, and a step checkpoint is written.
        """
        loader = data["train"].dataloader
        mixture = getattr(loader, "mixture", None)
        sources = getattr(mixture, "sources", ())
        here = Position(epoch, 0, batching_of(self.config, args))
        steps = loader.num_batches
        start = (
            self.resumed.start_step(here.batching, steps)
            if self.resumed is not None and self.resumed.epoch == epoch
            else 0
        )
        # open_clip's own data cannot begin in the middle of an epoch, and does not take a step.
        data["train"].set_epoch(*((epoch, start) if start else (epoch,)))
        # Of shared positives, of mixtures and of other losses it is another than ln N.
        plain = isinstance(loss, ContrastiveLoss) and not captions(model)
        plain = plain and not self.config.changes("positives", "coin_flip_mixup")
        chance = math.log(here.batching.effective_batch) if plain else None
        if self.step is None:
            normalize = getattr(data["train"], "normalize", None)
            self.step = self._make_step(model, loss, optimizer, scaler, normalize, args, here)
            self.log.begin(
                here.batching,
                steps,
                epoch,
                start,
                sources=sources,
                loss_at_chance=chance,
                resumed=args.resume if self.resumed is not None or epoch else None,
                groups=described_groups(optimizer),
            )
        self.preemption.training = True
        model.train()
        # None: only when the run is stopped
        every = self.config.save_every_steps
        log = StepLog(
            self.log,
            args,
            epoch,
            steps,
            loader.num_samples,
            here.batching,
            tb_writer,
            [source.name for source in sources],
            chance=chance,
            recovers=scaler is not None,
        )
        timer = StepTimer(torch.device(args.device), steps - start) if self.config.plan else None
        for index, micro_batches in enumerate(
            self._groups(loader, here.batching.dga_steps, start, steps), start=start
        ):
            step = steps * epoch + index
            if timer is not None:
                micro_batches = timer.shortened(micro_batches)
            if not self._settled:  # not in the first epoch, if a resume finds nothing left of it
                self._settled = True
                settle_buckets(model, micro_batches[0], self.step.prepare, self.step.autocast)
                if mixture is not None and is_master(args) and self.config.positives is None:
                    warn_of_equal_captions(micro_batches)
            seed_step(args.seed, step, args.rank)
            if not args.skip_scheduler:
                scheduler(step)
            log.data_ready()
            losses = self.step.take(micro_batches, step)
            if isinstance(loss, ContrastiveLoss):
                log.by_source.see(loss.report)
            log.step_done(index, step, losses, optimizer.param_groups[0]["lr"])
            if timer is not None and timer.is_last():
                lines = plan_lines(
                    timer, args, here.batching, self.config, unwrapped(model)[0], steps
                )
                raise Planned(epoch, index + 1, lines)
            stop = self.preemption.agreed(args.distributed)
            if stop or (every is not None and (step + 1) % every == 0):
                require_finite(model, f"after step {index + 1} of epoch {epoch}")
                now = replace(here, step=index + 1, retained=self._retained())
                save_step(
                    args,
                    model,
                    optimizer,
                    scaler,
                    now,
                    self.entries,
                    keep=self.config.keep_checkpoints,
                )
            if stop:
                self._lost(loader, epoch + (index + 1) / steps)
                # args.save_logs is the first rank's
                raise Stopped(stop, epoch, index + 1, saved=args.logs.lower() != "none")
        self._lost(loader, epoch + 1)
        self.epoch_end = replace(here, epoch=epoch + 1, retained=self._retained())

    def _make_step(
        self, model, loss, optimizer, scaler, normalize, args: argparse.Namespace, here: Position
    ) -> RecipeStep:
        """Make the step that the flags ask for, which goes on with the graphs of a resumed run."""
        return RecipeStep(
            model,
            loss,
            optimizer,
            precision=args.precision,
            terms=CaptionTerm(args.coca_caption_loss_weight) if captions(model) else None,
            teacher=self.teacher,
            scaler=scaler,
            normalize=normalize,
            mixup=self.mixup,
            grad_clip_norm=args.grad_clip_norm,
            sort_text=self.config.sort_text,
            retain=self.config.dga_retain,
            check=self.config.dga_check,
            replay_rng="no-replay" not in self.config.ablate,
            adopted=self.resumed.graphs_for(here.batching) if self.resumed is not None else None,
        )

    def _lost(self, loader, at: float) -> None:
        """Record the samples delivered and replaced, of all ranks at an epoch's end, else of this rank."""
        stats = getattr(loader, "stats", None)
        if stats is not None:
            counted = stats.whole or stats.epoch
            self.log.add("lost", at, delivered=counted.delivered, lost=counted.lost)

    def _retained(self) -> dict[str, float]:
        """Decide `--dga-retain auto`.

        All ranks call this together.
        """
        assert self.step is not None
        decision = self.step.decision() if self.config.dga_retain == "auto" else None
        return {} if decision is None else asdict(decision)

    def _groups(
        self, loader: Iterable, size: int, start: int, steps: int
    ) -> Iterator[list[MicroBatch]]:
        """Yield the loader's micro-batches, `size` at a time, for the optimizer steps from `start` on."""
        micro_batches = iter(loader)
        for index in range(start, steps):
            group = list(itertools.islice(micro_batches, size))
            if len(group) < size:
                raise UserError(
                    f"the training data ended in step {index} of {steps}: {len(group)} of {size} "
                    "micro-batches came; check --train-num-samples against the number of samples in the shards"
                )
            yield group
        # Read the loader to its end: a persistent loader whose iterator is dropped before would fill its queue in vain.
        for _ in micro_batches:
            pass


def warn_of_equal_captions(micro_batches: Sequence[MicroBatch]) -> None:
    """Warn if more than half of a batch's captions are equal to another one."""
    texts = [text.numpy().tobytes() for micro_batch in micro_batches for text in micro_batch[1]]
    repeated = sum(count for count in Counter(texts).values() if count > 1)
    if 2 * repeated <= len(texts):
        return
    logging.warning(
        f"{repeated} of the {len(texts)} captions of the first batch are equal to another one of it: the loss takes the "
        "pictures of a caption for negatives of each other; give --positives caption."
    )


def require_finite(model: torch.nn.Module, when: str) -> None:
    """Refuse weights that are not finite, before a checkpoint of them is written.

    Called by all ranks, which agree.

    Raises:
        UserError: a weight is NaN or infinite, or a saved buffer NaN: a GradScaler leaves out the step of an overflow, and
            batch norm keeps its statistics. (Infinite numbers have a place in masks.)
    """
    bad = [~parameter.detach().isfinite().all() for parameter in model.parameters()]
    saved = model.state_dict().keys()
    bad += [buffer.isnan().any() for name, buffer in model.named_buffers() if name in saved]
    any_bad = torch.stack(bad).any().int()
    # statistics differ between ranks; the first one's are saved
    if torch.distributed.is_initialized():
        torch.distributed.broadcast(any_bad, 0)
    if bool(any_bad):
        raise UserError(
            f"{when} the weights are not finite numbers; no checkpoint of them is written: continue from an earlier one with "
            "--resume latest, or start again, with a lower --lr, --grad-clip-norm 1, or --precision amp_bf16 or fp32"
        )


def settle_buckets(
    model: torch.nn.Module,
    micro_batch: Sequence[Any],
    prepare: Prepare,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Give DDP's gradient buckets their final layout by a backward pass of zeros, which all ranks take together.

    After a process's first synchronised backward pass DDP rearranges its buckets by the order in which gradients came. With
    three ranks or more, the place of a gradient in its bucket decides in which order the ranks' parts are summed. A run that
    resumes at step s would take that step with the first layout, a run that was never interrupted with the second: the last
    bits would differ. Without DDP nothing is done.

    Gradients are None afterwards and norm statistics as before; random numbers are drawn, so seed after it.

    Args:
        model: in DDP, perhaps compiled (then gradients come in another order); called as `model(images, texts)`, returns
            open_clip's output dict.
        micro_batch: some samples: images, texts and further parts for `prepare`, in host memory.
        prepare: makes the model's inputs of them, on its device.
    """
    inner, ddp = unwrapped(model)
    if ddp is None:
        return
    device = next(model.parameters()).device
    images, texts = prepare(*on_device(tuple(micro_batch[:2]), device), *micro_batch[2:])
    with restored_buffers(inner):
        with autocast():
            outputs = model(images, texts)
        parts = [
            value for value in outputs.values() if isinstance(value, Tensor) and value.requires_grad
        ]
        torch.stack([part.float().sum() * 0 for part in parts]).sum().backward()
    model.zero_grad(set_to_none=True)


# ---------------------------------------------------------------------------------------------------------------------
# A plan
# ---------------------------------------------------------------------------------------------------------------------

STEPS = 2
CPU_MICRO_BATCHES = 2
_GIB = 2**30


class Planned(Stopped):
    """The steps of a plan are taken.

    Attributes:
        lines: what the whole run takes.
    """

    def __init__(self, epoch: int, step: int, lines: Sequence[str]) -> None:
        super().__init__(0, epoch, step, saved=False)
        self.lines = lines


class StepTimer:
    """Timer of a plan's steps, of which the last one counts.

    Attributes:
        wait_seconds: time in which the step waited for its K micro-batches.
        step_seconds: time of the step itself.
        micro_batches: number of the micro-batches that it took.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device = device
        self.left = min(STEPS, steps)
        self.wait_seconds = self.step_seconds = 0.0
        self.micro_batches = 0
        self._at = time.perf_counter()

    def shortened(self, micro_batches: list[Any]) -> list[Any]:
        """Cut a step to CPU_MICRO_BATCHES on a CPU.

        Call when they have come.
        """
        now = time.perf_counter()
        self.wait_seconds, self._at = now - self._at, now
        taken = micro_batches if self.device.type == "cuda" else micro_batches[:CPU_MICRO_BATCHES]
        self.micro_batches = len(taken)
        return taken

    def is_last(self) -> bool:
        """Return whether the plan is done.

        Call after each step.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.step_seconds, self._at = now - self._at, now
        self.left -= 1
        return self.left == 0

    def seconds(self, dga_steps: int, retain: int | str) -> float:
        """Return the seconds of a step of K micro-batches, with the wait for its data."""
        return self.wait_seconds + self.step_seconds * (
            relative_cost(dga_steps, retain) / relative_cost(self.micro_batches, retain)
        )


def relative_cost(dga_steps: int, retain: int | str) -> float:
    """Return the cost of a step in micro-batches of plain training, whose forward pass is a third: K + (K-R)/3."""
    retained = dga_steps if retain == "auto" else min(int(retain), dga_steps)
    return dga_steps + (0 if dga_steps == 1 else (dga_steps - retained) / 3)


def plan_lines(
    timer: StepTimer,
    args: argparse.Namespace,
    batching: Batching,
    config: AllFlags,
    model: torch.nn.Module,
    steps: int,
) -> list[str]:
    """Return the lines of a plan.

    Args:
        args: of the plan; its `whole_run` holds the run's own values, see `params.without_a_trace`.
        steps: of an epoch.
    """
    seconds, pairs = timer.seconds(batching.dga_steps, config.dga_retain), batching.effective_batch
    step = (
        f"{seconds:.3g} s for {pairs:,} pairs ({pairs / seconds:,.1f} pairs/s), {timer.wait_seconds / seconds:.0%} of it "
        "waiting for data"
    )
    if timer.micro_batches < batching.dga_steps:
        step += f"; timed with {timer.micro_batches} of its {batching.dga_steps} micro-batches"
    if timer.device.type == "cuda":
        total = torch.cuda.get_device_properties(timer.device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    every = steps * args.epochs
    hours = f"{every:,} steps, {duration(every * seconds)}"
    if timer.device.type == "cuda":
        hours += f", {every * seconds * batching.world_size / 3600:,.1f} GPU hours"
    size, count = checkpoint_bytes(model), checkpoints_kept(args.whole_run, config)
    logs = args.whole_run.logs
    place, free = free_space("." if logs.lower() == "none" else logs)
    disk = f"{count} checkpoints of {size_words(size)}, with one being written: {size_words(count * size)}"
    rows = {
        "step": step,
        "memory": f"{memory_bytes(timer.device) / _GIB:.1f} of {total / _GIB:.1f} GiB at the peak of a rank",
        "run": f"{hours}; evaluation and checkpoints come on top",
        "disk": f"{disk}; {size_words(free)} are free in {Path(place)}",
    }
    return [f"{label:<10}{words}" for label, words in rows.items()]


def checkpoints_kept(args: argparse.Namespace, config: AllFlags) -> int:
    """Return the number of checkpoints on the disk at the end of a run, with one that is being written."""
    every = args.save_frequency
    epochs = 1 if every <= 0 else len({*range(every, args.epochs + 1, every), args.epochs})
    if args.delete_previous_checkpoint:
        epochs = 1
    steps = config.keep_checkpoints if config.save_every_steps is not None else 0
    return epochs + steps + args.save_most_recent + 1
