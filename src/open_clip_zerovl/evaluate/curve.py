"""Weights between two models, before (A) and after (B) fine-tuning (WiSE-FT: Wortsman et al., CVPR 2022), and one's choice.

    w(alpha) = A + alpha * (B - A), for each tensor; 0 gives A and 1 gives B, bit for bit

In between each number is computed in float64 and rounded once. `logit_scale` holds a logarithm and is treated like all other
parameters, so that the temperature between two ends is their geometric mean, and lies between them. Running means and variances
of batch norm are averaged like weights. Integers are not averaged: position ids are the same in both, and counts of batches
(`num_batches_tracked`), which nothing reads in evaluation, are those of the nearer end.

A point's `new` is the mean score of the sets of the new ability, `kept` that of the kept sets. The score
of a set is its RSUM; where all new (or all kept) sets have classes, whose pictures share captions, it is zero-shot top-1 in
percent. The chosen weights become a folder that stock open_clip loads; its `interpolation.json` has both ends, all points with
their metrics, the chosen alpha and why.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.checkpoints.card import ModelCard, public_name, run_facts
from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.checkpoints.export import PROBE_TEXTS, write_local_dir
from open_clip_zerovl.checkpoints.loading import (
    NOT_OF_FUNCTION,
    OF_FILES,
    ModelSpec,
    complete_config,
    first_difference,
)
from open_clip_zerovl.core.errors import Say, UserError
from open_clip_zerovl.data.sets import IndexedSet
from open_clip_zerovl.data.splits import TRAINED_ON, Identities, list_of_trained, trained_on
from open_clip_zerovl.evaluate.metrics import DIRECTIONS, RECALL_KS
from open_clip_zerovl.evaluate.retrieval import Loaded, score_set
from open_clip_zerovl.evaluate.settings import CurveFlags, RetrievalSettings
from open_clip_zerovl.evaluate.zero_shot import LabelledSet, score_loaded
from open_clip_zerovl.report.pages import (
    FAINT,
    SOURCE_COLOURS,
    Line,
    colours_of,
    draw_levels,
    line_chart,
)
from open_clip_zerovl.report.tables import text_table
from open_clip_zerovl.report.verdicts import bounds_remarks


@dataclass(frozen=True)
class Ends:
    """Two models with the same tensors.

    Attributes:
        names: how A and B were named.
        spec: A's.
        loaded: A with transform, tokenizer and device, which are B's too; `at` fills it with weights.
        before, after: weights of A and of B, on the CPU.
    """

    names: tuple[str, str]
    spec: ModelSpec
    loaded: Loaded
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    def weights(self, alpha: float) -> dict[str, Tensor]:
        """Compute `weights_between` the two ends."""
        return weights_between(self.before, self.after, alpha)

    def at(self, alpha: float) -> Loaded:
        """Load the weights at `alpha` into the model, and return it with transform, tokenizer and device.

        The next call changes it.
        """
        self.loaded[0].load_state_dict(self.weights(alpha))
        return self.loaded


def open_ends(before: Encoder, after: Encoder) -> Ends:
    """Load two models and check that weights between them make sense.

    Raises:
        UserError: a model that cannot be loaded; two of another architecture, transform or tokenizer (the sentence names the
            first key that differs).
    """
    specs = before.spec(), after.spec()
    names = before.model, after.model
    configs = [complete_config(spec.model_cfg) for spec in specs]
    _require_same(names, "model_cfg", configs[0], configs[1], NOT_OF_FUNCTION)
    loaded = before.load()
    model, _, tokenizer, _ = loaded
    other, _, other_tokenizer, _ = after.load()
    # Compare the built models: a config leaves out values that the model fills in, such as the size of its pictures.
    transforms: list[Any] = [each.visual.preprocess_cfg for each in (model, other)]
    _require_same(names, "preprocess_cfg", transforms[0], transforms[1], frozenset())
    configs = [
        module.text.config.to_dict()
        for module in (model, other)
        if hasattr(getattr(module, "text", None), "config")
    ]
    if len(configs) == 2:
        _require_same(names, "the text tower's config", configs[0], configs[1], OF_FILES)
    weights = [
        {key: value.cpu().clone() for key, value in each.state_dict().items()}
        for each in (model, other)
    ]
    for text in PROBE_TEXTS:
        if not torch.equal(tokenizer([text]), other_tokenizer([text])):
            raise UserError(
                f"the tokenizers of {names[0]} and {names[1]} read {text[:20]!r} differently: their text towers are "
                "not of one kind; give two checkpoints of one model"
            )
    return Ends(names, specs[0], loaded, *weights)


def weights_between(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], alpha: float
) -> dict[str, Tensor]:
    """Compute the weights at `alpha` of the way from `before` to `after`.

    See the module's text for each kind.

    Args:
        before, after: the same names and shapes.
        alpha: 0 to 1.
    """
    if alpha in (0, 1):
        return dict(after if alpha else before)
    mixed = {}
    for key, tensor in before.items():
        if tensor.is_floating_point():
            start = tensor.double()
            mixed[key] = (start + alpha * (after[key].double() - start)).to(tensor.dtype)
        else:
            mixed[key] = tensor if alpha < 0.5 else after[key]
    return mixed


def _require_same(
    names: tuple[str, str],
    part: str,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    ignored: frozenset[str],
) -> None:
    """Refuse two configs and name the first entry in which they differ."""
    difference = first_difference(first, second, ignored)
    if difference is not None:
        key, a, b = difference
        raise UserError(
            f"{names[0]} and {names[1]} are different models: {key} of {part} is {a} in the first and {b} in the second; "
            "give two checkpoints of one model"
        )


ROWS = {
    f"{way}_R@{k}": f"{short} R@{k}"
    for way, short in zip(DIRECTIONS, ("I2T", "T2I"), strict=True)
    for k in RECALL_KS
} | {"rsum": "RSUM", "rsum_chance": "chance"}

Metrics = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Point:
    """One model of the curve.

    Attributes:
        alpha: 0 is the model before, 1 the model after fine-tuning.
        metrics: set -> its recalls as shares, RSUM in percent points, and the counts `images` and `captions`.
        accuracies: set of classes -> its zero-shot `accuracies`.
    """

    alpha: float
    metrics: Metrics
    accuracies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def score(self, name: str) -> float:
        """Return the RSUM of a set, or the zero-shot top-1 in percent of a set of classes."""
        return (
            100 * self.accuracies[name]["top1"]
            if name in self.accuracies
            else self.metrics[name]["rsum"]
        )

    def chance(self, name: str) -> float:
        """Return the score of random orders, or of guessing, on a set.

        Returns:
            NaN if it is not known.
        """
        accuracy = self.accuracies.get(name)
        return (
            self.metrics[name].get("rsum_chance", math.nan)
            if accuracy is None
            else 100 * accuracy["chance"]
        )

    def mean_score(self, names: Sequence[str]) -> float:
        """Return the mean score of some sets."""
        return fmean(map(self.score, names))


@dataclass(frozen=True)
class Curve:
    """Points from before to after, in the order of their alphas, and the one that was chosen.

    Attributes:
        new, kept: names of the sets of the new ability, and of those to be kept (may be empty).
        chosen: the chosen point.
        reason: why, as a sentence.
    """

    points: tuple[Point, ...]
    new: tuple[str, ...]
    kept: tuple[str, ...]
    chosen: Point
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the curve as a dict for JSON."""
        return {
            "new": list(self.new),
            "kept": list(self.kept),
            "chosen": {"alpha": self.chosen.alpha, "reason": self.reason},
            "points": [
                {"alpha": point.alpha, "results": point.metrics}
                | ({"zero_shot": point.accuracies} if point.accuracies else {})
                for point in self.points
            ],
        }

    @property
    def sentence(self) -> str:
        """Write the reason as a sentence."""
        return f"{self.reason[0].upper()}{self.reason[1:]}."

    @property
    def advice(self) -> str | None:
        """Advise on the best point on the new sets, if the rule has not chosen it or it is the model before."""
        before = self.points[0]
        best = max(self.points, key=lambda point: (point.mean_score(self.new), -point.alpha))
        if best.alpha == 0:
            return "No point is better than the model before: more pairs, or another --set lr, may help."
        if best is self.chosen or not self.kept:
            return None
        gain = best.mean_score(self.new) - before.mean_score(self.new)
        share = best.mean_score(self.kept) / (before.mean_score(self.kept) or math.nan)
        return (
            f"Alpha {best.alpha:g} gains {gain:.1f} on the new sets and keeps {100 * share:.0f} % of the old: "
            f"--keep {math.floor(100 * share) / 100:g} or --rule new takes it, and fine-tuning with --keep-data forgets less."
            if math.isfinite(share)
            else f"Alpha {best.alpha:g} gains {gain:.1f} on the new sets: --rule new takes it."
        )

    @property
    def remarks(self) -> list[str]:
        """Write sentences on chance and on the best possible score, of the chosen point."""
        return bounds_remarks(self.chosen.metrics)

    @property
    def heads(self) -> dict[str, str]:
        """Name each set with its kind."""
        kinds = {**dict.fromkeys(self.new, "new"), **dict.fromkeys(self.kept, "kept")}
        return {
            name: f"{name} ({kind}{', top-1 %' if name in self.chosen.accuracies else ''})"
            for name, kind in kinds.items()
        }

    @property
    def labelled(self) -> dict[str, Point]:
        """Return the points before, after and chosen."""
        return {
            "before": self.points[0],
            "after": self.points[-1],
            f"chosen, alpha {self.chosen.alpha:g}": self.chosen,
        }

    def rows(self) -> list[list[str]]:
        """List a row a point: alpha, score of each set, what marks the point.

        Then a row of chance.
        """
        ends = {0.0: "before", 1.0: "after"}
        rows = [
            [
                f"{point.alpha:g}",
                *(f"{point.score(name):.1f}" for name in self.heads),
                ", ".join(
                    filter(None, (ends.get(point.alpha), "chosen" if point is self.chosen else ""))
                ),
            ]
            for point in self.points
        ]
        chance = map(self.chosen.chance, self.heads)
        return [
            *rows,
            ["chance", *("" if math.isnan(value) else f"{value:.1f}" for value in chance), ""],
        ]

    def table(self) -> str:
        """Format the scores as text, one row an alpha, a column a set, the chosen row marked."""
        return "\n".join(
            [text_table(["alpha", *self.heads.values(), ""], self.rows()), *self.remarks]
        )

    def picture(self) -> bytes:
        """Plot the scores by alpha as PNG, a line a set: solid for new sets, dashed for kept ones.

        The chosen alpha is marked.

        Raises:
            UserError: matplotlib is missing.
        """
        alphas = [point.alpha for point in self.points]
        colours = colours_of(list(self.heads), SOURCE_COLOURS)
        # Two measures share no axis: each set is then shown relative to the model before.
        measures = {"top-1 %" if name in self.chosen.accuracies else "RSUM" for name in self.heads}
        mixed = len(measures) > 1
        unit = {
            name: (self.points[0].score(name) or math.nan) / 100 if mixed else 1.0
            for name in self.heads
        }
        lines = [
            Line(head, alphas, [point.score(name) / unit[name] for point in self.points], colours[name],
                 {"marker": "o", "linestyle": "--" if name in self.kept else "-"})
            for name, head in self.heads.items()
        ]  # fmt: skip
        levels = {
            f"{name}: chance": (self.chosen.chance(name) / unit[name], colours[name])
            for name in self.heads
        }

        def finish(axes: Any) -> None:
            axes.axvline(self.chosen.alpha, color=FAINT, linewidth=1, linestyle=":")
            draw_levels(axes, levels)

        return line_chart(
            lines,
            x=f"alpha: 0 before, 1 after fine-tuning; chosen: {self.chosen.alpha:g}",
            y="% of the score before" if mixed else "".join(measures),
            finish=finish,
        )


def choose(
    points: Sequence[Point],
    new: Sequence[str],
    kept_sets: Sequence[str],
    rule: str | None = None,
    *,
    kept_share: float,
) -> Curve:
    """Choose a point of a curve that holds both ends.

    Args:
        points: in the order of their alphas.
        rule: `kept`: the best new score among the points whose kept score is at least `kept_share` of that before (alpha 0
            is always among them). `mean`: the best mean of the new and the kept score. `new`: the best new score. None:
            `kept` if there are kept sets, else `new`. A tie goes to the point nearest to the model before.

    Raises:
        UserError: a rule that needs kept sets, without them.
    """
    rule = rule or ("kept" if kept_sets else "new")
    require_possible(rule, kept_sets, new)
    measures = [
        "zero-shot top-1" if all(name in points[0].accuracies for name in names) else "RSUM"
        for names in (new, kept_sets)
    ]
    six_times = measures == ["zero-shot top-1", "RSUM"]  # RSUM is the sum of six recalls
    allowed, score = list(points), lambda point: point.mean_score(new)
    reason = f"the best {measures[0].replace('RSUM', 'mean RSUM')} on the new sets"
    if rule == "kept":
        least = kept_share * points[0].mean_score(kept_sets)
        allowed = [
            point for point in points if point.alpha == 0 or point.mean_score(kept_sets) >= least
        ]
        kept_before = points[0].mean_score(kept_sets)
        reason += (
            f" among the {len(allowed)} of {len(points)} points that keep at least {100 * kept_share:g} % of the "
            f"{measures[1]} before on the kept sets ({least:.1f} of {kept_before:.1f})"
        )
    elif rule == "mean":

        def score(point: Point) -> float:
            return (6 if six_times else 1) * point.mean_score(new) + point.mean_score(kept_sets)

        both = f"the {measures[1]} on new and on kept"
        if six_times:
            both = "six times top-1 on the new sets and the RSUM on the kept"
        reason = f"the best mean of {both} sets"
    chosen = max(allowed, key=lambda point: (score(point), -point.alpha))
    return Curve(
        tuple(points), tuple(new), tuple(kept_sets), chosen, f"alpha {chosen.alpha:g} has {reason}"
    )


def require_possible(
    rule: str | None, kept_sets: Collection[str], new: Collection[str] = ()
) -> None:
    """Refuse a rule that needs kept sets without them, and a set that is both new and kept."""
    if both := sorted({*new} & {*kept_sets}):
        raise UserError(f"the set {both[0]} is both new and kept; give it once, or two names")
    if rule in ("kept", "mean") and not kept_sets:
        raise UserError(
            f"--rule {rule} needs retrieval sets of the ability to keep; give --kept, or --rule new"
        )


def recall_table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Format recalls in percent and RSUM of several models side by side, as text.

    Args:
        columns: head -> metrics by the names of ROWS. A metric that a column lacks leaves its cell empty.
    """
    rows = [
        [label, *(_cell(key, metrics) for metrics in columns.values())]
        for key, label in ROWS.items()
    ]
    return text_table(["", *columns], rows)


def _cell(key: str, metrics: Mapping[str, float]) -> str:
    return f"{metrics[key] * (100 if '_R@' in key else 1):.1f}" if key in metrics else ""


def score_curve(
    ends: Ends,
    encoder: Encoder,
    flags: CurveFlags,
    new: Mapping[str, IndexedSet],
    kept_sets: Mapping[str, IndexedSet],
    *,
    classes: Mapping[str, LabelledSet] | None = None,
    say: Say | None = None,
) -> Curve:
    """Score the models between two ends and choose one.

    The checkpoints' own transform is used.

    Args:
        encoder: how many images at once, by how many loader processes.
        new, kept_sets: retrieval sets of the new ability, and of the ability to keep.
        classes: all new sets as labelled ones, whose zero-shot top-1 then chooses. All kept sets too if they have classes.
        say: is called with a line for each point.

    Raises:
        UserError: sets that cannot choose, and the errors of `score_set`.
    """
    require_possible(flags.rule, kept_sets, new)
    points = []
    for alpha in sorted({0.0, 1.0, *flags.alphas}):
        loaded = ends.at(alpha)
        metrics: dict[str, Mapping[str, float]] = {}
        for name, dataset in {**new, **kept_sets}.items():
            scored = score_set(loaded, name, dataset, RetrievalSettings(), encoder=encoder)
            assert scored is not None  # one process scores
            metrics[name] = scored.metrics
        guessed = {
            name: score_loaded(loaded, labelled, encoder=encoder, name=name)
            for name, labelled in (classes or {}).items()
        }
        point = Point(alpha, metrics, guessed)
        points.append(point)
        if say is not None:
            say(
                f"alpha {alpha:g}: "
                + ", ".join(f"{name} {point.score(name):.1f}" for name in metrics)
            )
    return choose(points, [*new], [*kept_sets], flags.rule, kept_share=flags.kept_share)


def write_between(
    ends: Ends, curve: Curve, out: str | os.PathLike[str], *, trained: Identities | None = None
) -> Path:
    """Export the chosen model with its curve and the pictures on which its ends were trained, in place of an earlier export.

    Args:
        trained: the pictures on which `after` was trained, beside those that the ends' own folders name.

    Raises:
        UserError: a destination that holds something else, weights that do not load again as they were.
    """
    alpha = curve.chosen.alpha
    weights = ends.weights(alpha)
    before, after = (public_name(name) for name in ends.names)
    card = ModelCard(
        ends.spec,
        weights,
        origin=f"Weights between {before} (alpha 0) and {after} (alpha 1) at alpha {alpha:g}, as in WiSE-FT.",
        **run_facts(Path(ends.names[1])),
        base_models=ends.names,
        metrics={
            f"{name}_{key}": value
            for name, row in curve.chosen.metrics.items()
            for key, value in row.items()
            if key in ("rsum", "rsum_chance") or "_R@" in key
        },
        notes=[curve.sentence],
    )
    content = {"before": ends.names[0], "after": ends.names[1], **curve.as_dict()}
    extra_files: dict[str, bytes | str] = {
        "interpolation.json": json.dumps(content, indent=2) + "\n"
    }
    seen = trained_on(ends.names)
    if seen is not None or trained is not None:
        extra_files[TRAINED_ON] = list_of_trained(seen, trained)
    origin = "..".join(ends.names)
    return write_local_dir(
        origin, weights, ends.spec, out, card=card, force=True, extra_files=extra_files
    )
