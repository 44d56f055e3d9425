"""Batches of a torch DataLoader that raise a bad item's `UserError` in the calling process.

An error that is raised in a loader's worker process reaches the caller inside the worker's traceback. So a dataset here returns
the `UserError` as an item, a batch with such an item becomes that error, and `read_batches` raises it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.workers import begin_worker


class ItemSet(Dataset):
    """A dataset whose `read` may raise UserError, which then is the item. Subclasses define `read` and `__len__`."""

    def read(self, index: int) -> Any:
        """Item `index`. UserError where it cannot be read."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        try:
            return self.read(index)
        except UserError as error:
            return error


class _Collate:
    """Collates items, or returns the first error among them. A class, so that it can be pickled for a worker."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[Any]) -> Any:
        return next((item for item in items if isinstance(item, UserError)), None) or self.collate(items)


def read_batches(dataset: Dataset, collate: Callable[[Sequence[Any]], Any], **loader_options: Any) -> Iterator[Any]:
    """Batches of a dataset whose items may be errors (an `ItemSet`, or an iterable one that yields them).

    Args:
        collate: items of a batch -> the batch.
        loader_options: keyword arguments of torch's DataLoader.

    Raises:
        UserError: the first bad item, after the batches before it.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    # A scheduler's SIGTERM reaches the workers too; a training that then saves a checkpoint still needs their batches.
    begin = partial(begin_worker, parent=os.getpid() if in_main_thread else None)
    for batch in DataLoader(dataset, collate_fn=_Collate(collate), worker_init_fn=begin, **loader_options):
        if isinstance(batch, UserError):
            raise batch
        yield batch
