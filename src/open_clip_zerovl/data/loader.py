"""The loader of a mixture: worker processes, the epoch and the step it begins with, what was lost, how it ends.

An error in a worker travels to the training process as a value and is raised there as one sentence: a traceback out of a
worker process helps nobody, and an exception lost in one would leave the other ranks waiting.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from open_clip_zerovl.data.health import Ledger
from open_clip_zerovl.data.lending import Lending, Lent
from open_clip_zerovl.data.mixture import Failure, Mixture
from open_clip_zerovl.data.workers import begin_worker, explain_worker_error
from open_clip_zerovl.errors import UserError


class MixtureLoader:
    """A loader of a `Mixture`, with the attributes that open_clip's training loop reads.

    Args:
        workers: loader processes; 0 reads in this one.
        prefetch: micro-batches that each loader process reads ahead; None takes two, or as many as all of a step's K can
            wait together when the step begins, and one more.
        stall_timeout_seconds: end the run when no batch comes for so long; 0 waits forever.
        max_bad_share: of a source's samples that may be replaced before the run ends.
        gather: hands an object to all ranks and returns all ranks' (`torch.distributed.all_gather_object`, say); called
            once at the end of every epoch that is read to its end, so that the share is judged over all ranks.

    Attributes:
        num_batches: optimizer steps of an epoch (T); iterating yields K micro-batches a step.
        num_samples: samples of an epoch (T*N).
        batch_size: B.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        workers: int,
        pin_memory: bool = False,
        prefetch: int | None = None,
        stall_timeout_seconds: float = 600,
        max_bad_share: float = 0.10,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        if stall_timeout_seconds < 0:
            raise UserError(
                f"a loader time-out of {stall_timeout_seconds:g} s is none; give seconds, or 0 to wait forever"
            )
        if not 0 <= max_bad_share <= 1:
            raise UserError(
                f"the share of bad samples that is allowed must lie between 0 and 1, but is {max_bad_share:g}"
            )
        self.mixture = mixture
        self.workers = workers
        self.stall_timeout_seconds = stall_timeout_seconds
        self.gather = gather
        first = mixture.schedule(0)
        self.num_batches = first.steps
        self.num_samples = first.steps * first.effective_batch
        self.batch_size = mixture.batching.micro_batch
        self.ledger = Ledger([source.name for source in mixture.sources], max_bad_share)
        if prefetch is None:
            prefetch = max(2, -(-mixture.batching.dga_steps // max(1, workers)) + 1)
        mixture.lending = self._lending = Lending(workers) if workers > 0 else None
        mixture.stall_seconds = stall_timeout_seconds if workers == 0 else 0
        self._loader: DataLoader = DataLoader(
            mixture,
            batch_size=None,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            prefetch_factor=prefetch if workers > 0 else None,
            timeout=stall_timeout_seconds if workers > 0 else 0,
        )
        self._processes: list[Any] = []
        atexit.register(_end_workers_of, weakref.ref(self))

    @property
    def lost(self) -> dict[str, dict[str, int]]:
        """source -> reason -> samples that this rank has replaced since it entered the epoch."""
        return self.ledger.lost

    def __len__(self) -> int:
        return self.num_batches

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Choose the epoch that the next iteration yields, and the optimizer step that it begins with.

        The batches are those of the whole epoch from that step on, bit for bit; `start_step = num_batches` leaves none.

        Raises:
            UserError: no such step.
        """
        if not 0 <= start_step <= self.num_batches:
            raise UserError(f"epoch {epoch} has {self.num_batches} steps and cannot begin at step {start_step}")
        self.mixture.start.set(epoch, start_step)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        epoch, step = self.mixture.start.get()
        micro_batches = (self.num_batches - step) * self.mixture.batching.dga_steps
        self.ledger.open_epoch(self.mixture.schedule(epoch).taken.tolist())
        seen = 0
        for item in self._items():
            if isinstance(item, Failure):
                raise UserError(item.message)
            *batch, report = item
            self.ledger.add(report)
            seen += 1
            if isinstance(batch[0], Lent):
                assert self._lending is not None
                batch[:] = self._lending.receive(batch[0])
            yield tuple(batch)
        if seen != micro_batches:
            raise UserError(
                f"the loader ended after {seen} of {micro_batches} micro-batches; a worker process was lost"
            )
        mine = (self.ledger.lost, self.ledger.delivered)
        self.ledger.close_epoch(self.gather(mine) if self.gather is not None else [mine])

    def _items(self) -> Iterator[Any]:
        count = 0
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._loader.worker_init_fn = partial(begin_worker, parent=os.getpid() if in_main_thread else None)
        try:
            iterator = iter(self._loader)
            self._processes = list(getattr(iterator, "_workers", ()))
            for item in iterator:
                yield item
                count += 1
        except RuntimeError as error:
            sentence = self.explain(error, count)
            if sentence is None:
                raise
            self.abandon()
            raise UserError(sentence) from error

    def abandon(self) -> None:
        """End the worker processes without torch's own shutdown: after one of them was lost, and when this process exits.

        A worker that was killed may have held the lock that torch's shutdown waits for.
        """
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_workers"):
            iterator._shutdown = True
            if iterator._worker_pids_set:
                # torch raises about each registered worker that dies, wherever the process is then
                torch.utils.data._utils.signal_handling._remove_worker_pids(id(iterator))
                iterator._worker_pids_set = False
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []

    def explain(self, error: RuntimeError, delivered: int = 0) -> str | None:
        """The sentence for an error that torch's DataLoader raises about its workers, None for any other error.

        A worker that dies also raises in the midst of training, out of a signal handler, and not only here.

        Args:
            delivered: items that came before it.
        """
        return explain_worker_error(
            error,
            [activity.get() for activity in self.mixture.activity],
            self.mixture.sources,
            rank=self.mixture.rank,
            next_worker=delivered % max(1, self.workers),
            timeout_seconds=self.stall_timeout_seconds,
        )


def _end_workers_of(loader: weakref.ref[MixtureLoader]) -> None:
    """At exit, before multiprocessing's own clean-up: that one sends SIGTERM, which workers may ignore, and waits forever."""
    alive = loader()
    if alive is not None:
        alive.abandon()
