"""A wait for data is told while it lasts, with what is being read, and again later; a run that does not wait says nothing."""

from __future__ import annotations

import time

import pytest
import torch

from open_clip_zerovl.data import workers as workers_module
from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.mixture import Mixture, Preprocessing
from open_clip_zerovl.data.schedule import Batching
from open_clip_zerovl.data.sources import parse_sources
from support.tars import write_source


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(workers_module, "FIRST_WARNING_SECONDS", 0.2)
    monkeypatch.setattr(workers_module, "NEXT_WARNING_SECONDS", 0.3)


def loader_of(tmp_path, transform, workers) -> MixtureLoader:
    sources = parse_sources(f"far={write_source(tmp_path / 'far', 0, 6, 6)}")
    wanted = Preprocessing(transform, lambda texts: torch.zeros(len(texts), 1))
    return MixtureLoader(
        Mixture(sources, Batching(2, 1, 1, max(1, workers)), wanted), workers=workers, stall_timeout_seconds=60
    )


class Slow:
    """A picture takes half a second."""

    def __call__(self, image) -> torch.Tensor:
        time.sleep(0.5)
        return torch.zeros(1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wait_is_told_while_it_lasts(tmp_path, short, caplog, workers):
    batches = iter(loader_of(tmp_path, Slow(), workers))
    next(batches)
    told = [record.getMessage() for record in caplog.records if "Waiting for data" in record.getMessage()]
    assert len(told) >= 2, told  # 0.2 and 0.5 s into a wait of a second
    reader = "loader worker 0" if workers else "the process"
    assert f"no batch has come for 0 s from {reader} of rank 0" in told[0]
    assert any(f"while reading shard {tmp_path}/far/00000.tar of source 'far'" in line for line in told)
    assert ("it is given 60 s (--loader-timeout)" in told[0]) == (workers > 0)
    del batches


def test_handling_a_batch_is_no_wait_and_the_thread_ends(tmp_path, short, caplog):
    for _ in loader_of(tmp_path, lambda image: torch.zeros(1), 0):
        time.sleep(0.4)
    time.sleep(0.2)
    assert not [record for record in caplog.records if "Waiting for data" in record.getMessage()]
    assert not [thread for thread in workers_module.threading.enumerate() if thread.name == "stall watchdog"]
