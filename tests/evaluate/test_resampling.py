"""Intervals by resampling: those of statistics, by units, on the same draws for all measures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from open_clip_zerovl.evaluate.metrics import Measure, mean_over, resampled


def test_the_interval_of_a_mean_is_that_of_statistics_and_covers_as_often_as_it_says():
    """The mean of n values: the interval is 2 * 1.96 * s / sqrt(n) wide, and 95 of 100 hold the truth (binomial: 88 to 100)."""
    rng, held = np.random.default_rng(0), 0
    for trial in range(100):
        values = torch.from_numpy(rng.exponential(size=200))
        measure = mean_over([(torch.arange(200), values)], 200)
        drawn = resampled({"m": measure}, 400, seed=trial)["m"]
        low, high = np.quantile(drawn, (0.025, 0.975))
        held += low < 1 < high
        assert high - low == pytest.approx(2 * 1.96 * values.std().item() / 200**0.5, rel=0.25)
    assert 87 <= held <= 100


def test_queries_of_one_concept_are_drawn_together():
    """Twenty copies of each of 10 values are no more evidence than the 10; drawn one by one they would seem so."""
    values = torch.from_numpy(np.random.default_rng(1).normal(size=10)).repeat_interleave(20)
    together = mean_over([(torch.arange(10).repeat_interleave(20), values)], 10)
    alone = mean_over([(torch.arange(200), values)], 200)
    wide, narrow = (
        np.ptp(np.quantile(resampled({"m": m}, 1000, 0)["m"], (0.025, 0.975)))
        for m in (together, alone)
    )
    assert wide > 3 * narrow


def test_draws_are_seeded_and_the_same_for_all_measures(monkeypatch):
    values = torch.from_numpy(np.random.default_rng(2).normal(size=50))
    one = mean_over([(torch.arange(50), values)], 50)
    shifted = mean_over([(torch.arange(50), values + 1)], 50)
    drawn = resampled({"one": one, "shifted": shifted}, 300, 5)
    assert np.allclose(drawn["shifted"] - drawn["one"], 1)  # a paired difference has no spread here
    assert np.array_equal(drawn["one"], resampled({"one": one}, 300, 5)["one"])
    assert not np.array_equal(drawn["one"], resampled({"one": one}, 300, 6)["one"])
    monkeypatch.setattr("open_clip_zerovl.evaluate.metrics._DRAWS_AT_ONCE_BYTES", 8 * 50 * 7)
    assert np.allclose(
        np.sort(drawn["one"]).mean(),
        np.sort(resampled({"one": one}, 300, 5)["one"]).mean(),
        atol=0.02,
    )
    empty = Measure(np.zeros((1, 3)), np.array([[0.0, 0.0, 4.0]]), np.ones(1))
    assert np.isnan(empty.weighted(np.array([[1.0, 1.0, 0.0]]))).all()
