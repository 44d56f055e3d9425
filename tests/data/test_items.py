"""Batches of items that may be errors, and the processes that read them."""

from __future__ import annotations

import os
import signal

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.workers import ItemSet, read_batches


class Numbers(ItemSet):
    """Each item is (its number, the process that has read it); number 7 is bad where asked."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 12

    def read(self, index: int) -> tuple[int, int]:
        if index == self.bad:
            raise UserError("number 7 is bad")
        return index, os.getpid()


def test_workers_go_on_after_the_signal_of_a_scheduler_that_the_training_handles():
    """SIGTERM reaches every process of a job; a training that then saves a checkpoint first ends its evaluation."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        numbers = []
        for batch in read_batches(Numbers(), list, batch_size=2, num_workers=1):
            worker = batch[0][1]
            assert worker != os.getpid()
            if not numbers:
                os.kill(worker, signal.SIGTERM)
            numbers += [number for number, _ in batch]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert numbers == list(range(12)) and not heard


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_item_is_raised_after_the_batches_before_it(workers: int):
    seen = []
    with pytest.raises(UserError, match="number 7 is bad"):
        for batch in read_batches(Numbers(bad=7), list, batch_size=2, num_workers=workers):
            seen += [number for number, _ in batch]
    assert seen == list(range(6))
