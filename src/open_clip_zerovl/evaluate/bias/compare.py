"""Models compared on one's own sources: two or more, or several runs of each, side by side (`zerovl compare`).

Measured are retrieval within sources, across them, in one pool of all and in sources that were in no training (`pools`), the
source probe, and log p of negatives (`measures`), each with an interval over queries; where several runs of each side are
given, in the same order of seeds, differences also have an interval over seeds (`resampling`).

Legend: `N` held-out pairs of all sources, `D` embedding width, `U` units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.bias.measures import log_p_by_query, probe_groups, source_probe_guesses
from open_clip_zerovl.evaluate.bias.pools import POOL_NOTES, PoolHits, SourceFeatures, SourcePools, source_pools
from open_clip_zerovl.evaluate.bias.resampling import (
    Interval,
    Measure,
    interval,
    interval_over_seeds,
    mean_over,
    resampled,
)


@dataclass(frozen=True)
class Kind:
    """What one measure is.

    Attributes:
        title: in tables.
        note: what it rewards, in a sentence or two.
        better: 1 where a larger number is better, -1 where a smaller one is; 0 where neither is.
        form: of its numbers.
    """

    title: str
    note: str
    better: int
    form: str = "{:.1f}"


_PROBE = (
    "how often a linear probe guesses the source from one embedding. Lower means that less of the source was kept; chance "
    "is not to be expected, since sources do differ."
)
_LOG_P = "The lower, the less such pairs still teach; other sources far below the own one are pushed away as a whole."
KINDS = {
    "within": Kind("RSUM within", POOL_NOTES["within"], 1),
    "across": Kind("RSUM across", POOL_NOTES["across"], 1),
    "mixed": Kind("RSUM mixed", POOL_NOTES["mixed"], 0),
    "unseen": Kind("RSUM unseen", POOL_NOTES["unseen"], 1),
    "probe_images": Kind("probe, images %", f"Source probe on images, in percent: {_PROBE}", -1),
    "probe_texts": Kind("probe, texts %", f"Source probe on texts, in percent: {_PROBE}", -1),
    "log_p_same": Kind("log p, same source", f"Mean log p of negatives of the query's source. {_LOG_P}", 0, "{:.2f}"),
    "log_p_other": Kind("log p, other source", f"Mean log p of negatives of other sources. {_LOG_P}", 0, "{:.2f}"),
}


@dataclass(frozen=True)
class RunMeasures:
    """What was measured of one run.

    Attributes:
        measures: kind -> its number, as a function of the drawn units.
        pools: the pools behind it.
    """

    measures: Mapping[str, Measure]
    pools: SourcePools


def measure_run(
    features: Mapping[str, SourceFeatures],
    logit_scale: float,
    unseen: Mapping[str, SourceFeatures] | None = None,
    *,
    seed: int = 0,
) -> RunMeasures:
    """Measure one run.

    Args:
        features: source -> its pairs, two sources or more for the probe and log p.
        logit_scale: the factor `model.logit_scale.exp()`.
        unseen: sources that were in no training.
        seed: of the probe's folds.

    Raises:
        UserError: what `source_pools`, the probe and log p refuse.
    """
    pools = source_pools(features, unseen)
    units = pools.units
    measures = {kind: _rsum(own, units) for kind, own in pools.kinds().items()}
    rows = {name: one.held_out_rows() for name, one in features.items()}
    images = torch.cat([one.image_features[rows[name]] for name, one in features.items()])
    texts = torch.cat([one.text_features[rows[name]] for name, one in features.items()])
    sources = [name for name in features for _ in rows[name]]
    concepts = [one.concepts[row] for name, one in features.items() for row in rows[name]]
    for kind, own in (("probe_images", images), ("probe_texts", texts)):
        guesses = source_probe_guesses(own, sources, concepts=probe_groups(concepts), seed=seed)
        measures[kind] = mean_over([(torch.from_numpy(guesses), pools.unit_of)], units, [100.0])
    sums, counts, _, _ = log_p_by_query(images, texts, sources, logit_scale)
    for group, kind in enumerate(("log_p_same", "log_p_other")):
        measures[kind] = Measure(
            _per_unit(sums[:, group], pools.unit_of, units),
            _per_unit(counts[:, group], pools.unit_of, units),
            np.ones(1),
        )
    return RunMeasures(measures, pools)


def _rsum(pools: Sequence[PoolHits], units: int) -> Measure:
    """The mean RSUM of some pools."""
    means = [pair for one in pools for pair in ((one.images, one.image_units), (one.texts, one.text_units))]
    return mean_over(means, units, [100 / len(pools)] * len(means))


def _per_unit(values: Tensor, unit: Tensor, units: int) -> np.ndarray:
    """(1, U) values (2, N) of both directions, summed in each unit."""
    return torch.zeros(units, dtype=torch.float64).index_add_(0, unit, values.sum(dim=0)).numpy()[None]


@dataclass(frozen=True)
class Side:
    """One measure of one side: the mean over its runs, its interval over queries, and the value of each run."""

    value: float
    interval: Interval
    runs: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """A side minus the first one.

    Attributes:
        value: of the means over runs.
        over_queries: its interval over queries, for these runs.
        over_seeds: Student's t interval over the paired differences of runs; None for a single run a side.
    """

    value: float
    over_queries: Interval
    over_seeds: Interval | None

    @property
    def told_apart(self) -> bool:
        """Whether no interval holds zero."""
        return all(low > 0 or high < 0 for low, high in (self.over_queries, self.over_seeds or self.over_queries))


@dataclass(frozen=True)
class Comparison:
    """Sides on the same pairs.

    Attributes:
        sides: kind of measure -> side -> its numbers.
        differences: kind -> side other than the first -> its difference from the first.
        single: "noto", "noto->twemoji" or an unseen source -> side -> RSUM, the mean over runs.
        pool_sizes: the same names, and "mixed" -> pictures of the pool.
        probe_chance: the largest source's share of the pairs, in percent.
        draws: of the intervals over queries.
        units: what was drawn and has queries: concepts, and pairs without one.
    """

    sides: Mapping[str, Mapping[str, Side]]
    differences: Mapping[str, Mapping[str, Difference]]
    single: Mapping[str, Mapping[str, float]]
    pool_sizes: Mapping[str, int]
    probe_chance: float
    draws: int
    units: int

    @property
    def names(self) -> list[str]:
        """The sides, in the order given."""
        return list(next(iter(self.sides.values())))

    @property
    def seeds(self) -> int:
        """Runs of each side."""
        return len(next(iter(self.sides["within"].values())).runs)

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain numbers."""
        return {
            "measures": {
                kind: {
                    "note": KINDS[kind].note,
                    "sides": {
                        name: {"value": side.value, "interval": side.interval, "runs": side.runs}
                        for name, side in own.items()
                    },
                    "differences_from_the_first": {
                        name: {"value": d.value, "over_queries": d.over_queries, "over_seeds": d.over_seeds}
                        for name, d in self.differences[kind].items()
                    },
                }
                for kind, own in self.sides.items()
            },
            "rsum_of_single_pools": self.single,
            "pool_sizes": self.pool_sizes,
            "probe_chance": self.probe_chance,
            "intervals": {"level": 0.95, "draws": self.draws, "units": self.units, "seeds": self.seeds},
        }


def compare_runs(sides: Mapping[str, Sequence[RunMeasures]], *, draws: int = 1000, seed: int = 0) -> Comparison:
    """Compare the runs of two or more sides, measured on the same pairs; runs of equal place are of equal seed.

    Args:
        draws: of units, for the intervals over queries.
        seed: of the draws.

    Raises:
        UserError: fewer than two sides, or sides of different numbers of runs.
    """
    check_sides({name: len(runs) for name, runs in sides.items()})
    first, *others = sides
    every = {
        f"{name} {i} {kind}": measure
        for name, runs in sides.items()
        for i, run in enumerate(runs)
        for kind, measure in run.measures.items()
    }
    on_draws = resampled(every, draws, seed)
    kinds = [kind for kind in KINDS if kind in sides[first][0].measures]
    numbers: dict[str, dict[str, Side]] = {}
    differences: dict[str, dict[str, Difference]] = {}
    for kind in kinds:
        runs = {name: tuple(run.measures[kind].value for run in own) for name, own in sides.items()}
        drawn = {
            name: np.mean([on_draws[f"{name} {i} {kind}"] for i in range(len(own))], axis=0)
            for name, own in sides.items()
        }
        numbers[kind] = {name: Side(float(np.mean(runs[name])), interval(drawn[name]), runs[name]) for name in sides}
        differences[kind] = {
            name: Difference(
                numbers[kind][name].value - numbers[kind][first].value,
                interval(drawn[name] - drawn[first]),
                interval_over_seeds(np.subtract(runs[name], runs[first]).tolist()),
            )
            for name in others
        }
    pools = sides[first][0].pools
    return Comparison(
        sides=numbers,
        differences=differences,
        single={
            pool: {
                name: float(np.mean([named_pools(run.pools)[pool].rsum for run in runs]))
                for name, runs in sides.items()
            }
            for pool in named_pools(pools)
        },
        pool_sizes={**{name: pool.size for name, pool in named_pools(pools).items()}, "mixed": pools.mixed.size},
        probe_chance=100 * max(pool.size for pool in pools.within.values()) / pools.mixed.size,
        draws=draws,
        units=int(sum(measure.counts.sum(axis=0) for measure in sides[first][0].measures.values()).astype(bool).sum()),
    )


def check_sides(runs: Mapping[str, int]) -> None:
    """UserError for fewer than two sides, or sides of different numbers of runs. `runs`: side -> its runs."""
    if len(runs) < 2:
        raise UserError("a comparison needs two sides or more; name them A=MODEL B=MODEL")
    if len(set(runs.values())) != 1:
        told = ", ".join(f"{name} has {count}" for name, count in runs.items())
        raise UserError(
            f"runs are paired by their seeds, and {told}; give each side as many, in the same order of seeds"
        )


def named_pools(pools: SourcePools) -> dict[str, PoolHits]:
    """The single pools by name: "noto", "noto->twemoji", an unseen source."""
    across = {f"{name}->{partner}": pool for (name, partner), pool in pools.across.items()}
    return {**pools.within, **across, **pools.unseen}
