"""Models measured on the same pairs: one is described, several are compared; numbers, table, sentences.

Measured are retrieval within sources, across them, in one pool of all and in sources that were in no training (`pools`), the
source probe, and log p of negatives (`measures`), each with an interval over queries (`resampling`). An interval over queries
says nothing about other seeds, so that only several runs of each side, in the same order of seeds, give a verdict.

Legend: `N` held-out pairs of all sources, `D` embedding width, `U` units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch

from open_clip_zerovl.evaluate.compare.measures import (
    log_p_by_query,
    probe_groups,
    source_probe_guesses,
)
from open_clip_zerovl.evaluate.compare.pools import (
    POOL_NOTES,
    SourceFeatures,
    SourcePools,
    source_pools,
)
from open_clip_zerovl.evaluate.compare.resampling import (
    Interval,
    Measure,
    interval,
    mean_over,
    resampled,
)
from open_clip_zerovl.report.tables import text_table
from open_clip_zerovl.report.verdicts import CONFIDENCE, student

SMALL_POOL = 50  # pictures; in a smaller pool recall at 10 tells little
ONE_RUN = (
    "One run each: the intervals cover held-out pairs only, and another seed may turn any difference. Runs of several seeds "
    "(A=MODEL,MODEL,MODEL B=MODEL,MODEL,MODEL) give a verdict."
)


@dataclass(frozen=True)
class Kind:
    """Title, note and number format of a measure.

    Attributes:
        title: in tables.
        note: the ability that it rewards, in a sentence or two.
        better: 1 where a larger number is better, -1 where a smaller one is; 0 where neither is.
        form: format of its numbers.
    """

    title: str
    note: str
    better: int
    form: str = "{:.1f}"

    def number(self, value: float, over: Interval, signed: bool = False) -> str:
        """`12.3 [11.0 to 13.5]`."""
        form = self.form.replace(":", ":+") if signed else self.form
        return f"{form.format(value)} [{self.range(over, signed)}]"

    def range(self, over: Interval, signed: bool = True) -> str:
        """`11.0 to 13.5`."""
        form = self.form.replace(":", ":+") if signed else self.form
        return f"{form.format(over[0])} to {form.format(over[1])}"


_PROBE = (
    "how often a linear probe guesses the source from one embedding. Lower means that less of the source was kept; do not "
    "expect chance level: sources differ in content."
)
_LOG_P = "The lower, the less such pairs still teach; other sources far below the own one are pushed away as a whole."
KINDS = {
    **{
        kind: Kind(f"RSUM {kind}", note, 0 if kind == "mixed" else 1)
        for kind, note in POOL_NOTES.items()
    },
    "probe_images": Kind("probe, images %", f"Source probe on images, in percent: {_PROBE}", -1),
    "probe_texts": Kind("probe, texts %", f"Source probe on texts, in percent: {_PROBE}", -1),
    "log_p_same": Kind(
        "log p, same source",
        f"Mean log p of negatives of the query's source. {_LOG_P}",
        0,
        "{:.2f}",
    ),
    "log_p_other": Kind(
        "log p, other source", f"Mean log p of negatives of other sources. {_LOG_P}", 0, "{:.2f}"
    ),
}


def kind_of(name: str) -> Kind:
    """The kind of a measure: one of KINDS, or `top-1 SET` of a labelled set."""
    return KINDS.get(name) or Kind(
        f"{name}, %", f"Zero-shot {name}, in percent; intervals are over its pictures.", 1
    )


@dataclass(frozen=True)
class RunMeasures:
    """The measurements of one run.

    Attributes:
        measures: kind -> its number, as a function of the drawn units.
        pools: the pools behind it.
        labelled_chance: kind of a labelled set -> percent of a model that guesses.
    """

    measures: Mapping[str, Measure]
    pools: SourcePools
    labelled_chance: Mapping[str, float] = field(default_factory=dict)


def measure_run(
    features: Mapping[str, SourceFeatures],
    logit_scale: float,
    unseen: Mapping[str, SourceFeatures] | None = None,
    labelled: Mapping[str, tuple[torch.Tensor, int]] | None = None,
    *,
    seed: int = 0,
) -> RunMeasures:
    """Measure one run.

    Args:
        features: source -> its pairs, two sources or more for the probe and log p.
        logit_scale: the factor `model.logit_scale.exp()`.
        unseen: sources that were in no training.
        labelled: labelled set -> (N,) right guesses of its N pictures as 0..1, number of classes.
        seed: seed of the probe's folds.

    Raises:
        UserError: what `source_pools`, the probe and log p refuse.
    """
    pools = source_pools(features, unseen)
    units, unit = pools.units, pools.unit_of
    measures = {}
    for kind, pools_of_kind in pools.kinds.items():
        terms = []
        for pool in pools_of_kind.values():
            terms += [(pool.image_units, pool.images), (pool.text_units, pool.texts)]
        measures[kind] = mean_over(terms, units, 100 / len(pools_of_kind))
    rows = {name: pairs.held_out_rows() for name, pairs in features.items()}
    images = torch.cat([pairs.image_features[rows[name]] for name, pairs in features.items()])
    texts = torch.cat([pairs.text_features[rows[name]] for name, pairs in features.items()])
    sources = [name for name in features for _ in rows[name]]
    groups = probe_groups(
        [pairs.concepts[row] for name, pairs in features.items() for row in rows[name]]
    )
    for kind, embeddings in (("probe_images", images), ("probe_texts", texts)):
        guesses = source_probe_guesses(embeddings, sources, concepts=groups, seed=seed)
        measures[kind] = mean_over([(unit, torch.from_numpy(guesses))], units, 100.0)
    log_p = log_p_by_query(images, texts, sources, logit_scale).sum(dim=1)  # over both directions
    for group, kind in enumerate(("log_p_same", "log_p_other")):
        measures[kind] = mean_over([(unit, log_p[:, group])], units)
    chance = {}
    for name, (right, classes) in (labelled or {}).items():
        measures[f"top-1 {name}"] = mean_over(
            [(torch.arange(len(right)), right)], len(right), 100.0
        )
        chance[f"top-1 {name}"] = 100 / classes
    return RunMeasures(measures, pools, chance)


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
        value: difference of the means over runs.
        over_queries: its interval over queries, for these runs.
        over_seeds: Student's t interval over the paired differences of runs; None for a single run a side.
    """

    value: float
    over_queries: Interval
    over_seeds: Interval | None

    @property
    def decided(self) -> bool:
        """True if there are several runs a side, and neither interval contains zero."""
        if self.over_seeds is None:
            return False
        return all(low > 0 or high < 0 for low, high in (self.over_queries, self.over_seeds))


@dataclass(frozen=True)
class Comparison:
    """One side or several on the same pairs.

    Attributes:
        sides: kind of measure -> side -> its numbers.
        differences: kind -> side other than the first -> its difference from the first.
        single: "noto", "noto->twemoji" or an unseen source -> side -> RSUM, the mean over runs; first "chance".
        pool_sizes: the same names, and "mixed" -> pictures of the pool.
        chance: kind -> the number of a model that guesses; of the probe the largest source's share of the pairs.
        chance_upper: kind of RSUM, or of a labelled set -> two standard deviations above chance.
        draws: number of draws behind the intervals over queries.
        units: number of drawn units with queries: concepts, and pairs without one.
    """

    sides: Mapping[str, Mapping[str, Side]]
    differences: Mapping[str, Mapping[str, Difference]]
    single: Mapping[str, Mapping[str, float]]
    pool_sizes: Mapping[str, int]
    chance: Mapping[str, float]
    chance_upper: Mapping[str, float]
    draws: int
    units: int

    @property
    def names(self) -> list[str]:
        """The sides, in the order given."""
        return list(self.sides["within"])

    @property
    def seeds(self) -> int:
        """Runs of each side."""
        return len(next(iter(self.sides["within"].values())).runs)

    @property
    def notes(self) -> list[str]:
        """A note for each measure: the ability that it rewards."""
        return [kind_of(kind).note for kind in self.sides]

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain numbers."""
        return {
            "measures": {
                kind: {
                    "note": kind_of(kind).note,
                    "chance": self.chance[kind],
                    "sides": {name: asdict(side) for name, side in sides.items()},
                    "differences_from_the_first": {
                        name: asdict(difference)
                        for name, difference in self.differences[kind].items()
                    },
                }
                for kind, sides in self.sides.items()
            },
            "rsum_of_single_pools": self.single,
            "pool_sizes": self.pool_sizes,
            "probe_chance": self.chance["probe_images"],
            "intervals": {
                "level": CONFIDENCE,
                "draws": self.draws,
                "units": self.units,
                "seeds": self.seeds,
            },
        }

    def header(self) -> list[str]:
        """Column titles of `rows`."""
        first, *rest = self.names
        differences = [f"{name} - {first}" for name in rest]
        over_seeds = [f"{title}, over seeds" for title in differences if self.seeds > 1]
        return ["", "chance", *self.names, *differences, *over_seeds]

    def rows(self) -> list[list[str]]:
        """A row a measure: chance, its number and interval on each side, then the differences from the first side."""
        rows = []
        for kind, sides in self.sides.items():
            form, differences = kind_of(kind), self.differences[kind].values()
            row = [form.title, form.form.format(self.chance[kind])]
            row += [*(form.number(side.value, side.interval) for side in sides.values())]
            row += [
                form.number(difference.value, difference.over_queries, signed=True)
                for difference in differences
            ]
            rows.append(
                row
                + [
                    form.range(difference.over_seeds)
                    for difference in differences
                    if difference.over_seeds is not None
                ]
            )
        return rows

    def table(self) -> str:
        """The rows for a terminal."""
        return text_table(self.header(), self.rows())

    def at_chance(self, kind: str) -> list[str]:
        """Sides whose RSUM or top-1 a random order reaches; [] for measures without such a bound."""
        upper = self.chance_upper.get(kind, -math.inf)
        return [name for name, side in self.sides[kind].items() if side.value <= upper]

    def verdicts(self) -> list[str]:
        """A sentence for each measure with sides at chance, and for each difference from the first side over several seeds.

        A side at chance is called neither better nor worse, in no measure. One run a side gives no verdict, but `ONE_RUN`.
        """
        first, sentences = self.names[0], []
        collapsed = self.at_chance("within")
        for kind, differences in self.differences.items():
            guessing = self.at_chance(kind)
            if guessing:
                scores = [f"{name} ({self.sides[kind][name].value:.1f})" for name in guessing]
                bounds = f"guessing has {self.chance[kind]:.1f}, and reaches {self.chance_upper[kind]:.1f}"
                sentences.append(
                    f"{kind_of(kind).title}: at chance: {', '.join(scores)}; {bounds}."
                )
            for name, difference in differences.items():
                if self.seeds > 1 and not {first, name} & {*guessing}:
                    better = 0 if {first, name} & {*collapsed} else kind_of(kind).better
                    sentences.append(
                        _verdict(replace(kind_of(kind), better=better), name, first, difference)
                    )
        if self.seeds == 1 and len(self.names) > 1:
            sentences.append(ONE_RUN)
        return sentences

    def how_intervals_are_made(self) -> str:
        """A description of the intervals, in sentences."""
        drawn = (
            f"{self.draws:,} draws of {self.units:,} concepts (a pair without one counts by itself)"
        )
        over = f"Brackets: 95 % intervals over queries, from {drawn}"
        if self.seeds == 1:
            return f"{over}."
        few = (
            " With two it reaches 12.7 standard errors to each side: take three runs or more."
            if self.seeds == 2
            else ""
        )
        paired = f"Student's t of the {self.seeds} paired differences.{few}"
        return f"{over}, for the mean of {self.seeds} runs; over seeds: {paired}"

    def warnings(self, *, concepts: bool) -> list[str]:
        """Sentences on pools that are missing or small.

        Args:
            concepts: True if a field that names concepts was given.
        """
        sentences = []
        if "across" not in self.sides:
            why = (
                "no two sources share one of its values"
                if concepts
                else "--concept names the field by which samples match"
            )
            sentences.append(f"RSUM across sources was not measured: {why}.")
        small = ", ".join(
            f"{name} ({size})" for name, size in self.pool_sizes.items() if size < SMALL_POOL
        )
        if small:
            sentences.append(
                f"Small pools, in which recall at 10 tells little: {small}; raise --samples, or give more pairs."
            )
        return sentences


def _verdict(kind: Kind, name: str, first: str, difference: Difference) -> str:
    over_seeds = difference.over_seeds or (-math.inf, math.inf)
    number = f"{kind.number(difference.value, over_seeds, signed=True)} over seeds"
    if not difference.decided:
        return f"{kind.title}: undecided between {name} and {first} ({number})."
    words = ("better", "worse") if kind.better else ("higher", "lower")
    return f"{kind.title}: {name} is {words[difference.value * (kind.better or 1) < 0]} than {first} ({number})."


def _guessing_upper(chance: float, measure: Measure) -> float:
    """Two standard deviations above chance, in percent, of a model that guesses the class of each picture."""
    return chance + 2 * math.sqrt(chance * (100 - chance) / measure.counts.sum())


def compare_runs(
    sides: Mapping[str, Sequence[RunMeasures]], *, draws: int = 1000, seed: int = 0
) -> Comparison:
    """Compare the runs of the sides, measured on the same pairs; runs of equal place are of equal seed.

    Args:
        draws: number of draws of units, for the intervals over queries.
        seed: seed of the draws.
    """
    first, *others = sides
    some = sides[first][0]
    labelled = [*some.labelled_chance]
    of_pairs = [*filter(some.measures.__contains__, KINDS)]
    on_draws: dict[str, np.ndarray] = {}
    for same_units in (of_pairs, *([kind] for kind in labelled)):
        every = {
            f"{name} {i} {kind}": run.measures[kind]
            for name, runs in sides.items()
            for i, run in enumerate(runs)
            for kind in same_units
        }
        on_draws |= resampled(every, draws, seed)
    numbers: dict[str, dict[str, Side]] = {}
    differences: dict[str, dict[str, Difference]] = {}
    for kind in (*of_pairs, *labelled):
        numbers[kind], drawn = {}, {}
        for name, side_runs in sides.items():
            drawn[name] = np.mean(
                [on_draws[f"{name} {i} {kind}"] for i in range(len(side_runs))], axis=0
            )
            runs = tuple(run.measures[kind].value for run in side_runs)
            numbers[kind][name] = Side(float(np.mean(runs)), interval(drawn[name]), runs)
        base = numbers[kind][first]
        differences[kind] = {}
        for name in others:
            over_seeds = student(np.subtract(numbers[kind][name].runs, base.runs).tolist())
            differences[kind][name] = Difference(
                numbers[kind][name].value - base.value,
                interval(drawn[name] - drawn[first]),
                over_seeds.interval,
            )
    sizes = {name: pool.size for name, pool in some.pools.single.items()}
    mixed, kinds = len(some.pools.unit_of), some.pools.kinds
    return Comparison(
        sides=numbers,
        differences=differences,
        single={
            pool: {"chance": ranked.chance}
            | {
                name: float(np.mean([run.pools.single[pool].rsum for run in runs]))
                for name, runs in sides.items()
            }
            for pool, ranked in some.pools.single.items()
        },
        pool_sizes={**sizes, "mixed": mixed},
        chance={
            **{
                kind: fmean(pool.chance for pool in pools.values()) for kind, pools in kinds.items()
            },
            **dict.fromkeys(
                ("probe_images", "probe_texts"),
                100 * max(pool.size for pool in kinds["within"].values()) / mixed,
            ),
            **dict.fromkeys(("log_p_same", "log_p_other"), -math.log(mixed)),
            **some.labelled_chance,
        },
        # The spread of a mean of pools: their deviations from chance, as if independent.
        chance_upper={
            kind: fmean(pool.chance for pool in pools.values())
            + math.hypot(*(pool.chance_upper - pool.chance for pool in pools.values())) / len(pools)
            for kind, pools in kinds.items()
        }
        | {
            kind: _guessing_upper(chance, some.measures[kind])
            for kind, chance in some.labelled_chance.items()
        },
        draws=draws,
        units=int(
            sum(some.measures[kind].counts.sum(axis=0) for kind in of_pairs).astype(bool).sum()
        ),
    )
