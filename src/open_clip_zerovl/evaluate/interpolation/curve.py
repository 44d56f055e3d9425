"""Scores of the models between two ends, and the rule that chooses one of them.

A point's `new` is the mean RSUM of the sets of the new ability, `kept` that of the sets whose ability is to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.interpolation.names import RULES

Metrics = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Point:
    """One model of the curve.

    Attributes:
        alpha: 0 is the model before, 1 the model after fine-tuning.
        metrics: set -> its recalls as shares, RSUM in percent points, and the counts `images` and `captions`.
    """

    alpha: float
    metrics: Metrics

    def mean_rsum(self, names: Sequence[str]) -> float:
        """The mean RSUM of some sets."""
        return sum(self.metrics[name]["rsum"] for name in names) / len(names)


@dataclass(frozen=True)
class Curve:
    """Points from before to after, in the order of their alphas, and the one that was chosen.

    Attributes:
        new, kept: names of the sets of the new ability, and of those to be kept (may be empty).
        chosen: of the points.
        reason: why, as a sentence.
    """

    points: tuple[Point, ...]
    new: tuple[str, ...]
    kept: tuple[str, ...]
    chosen: Point
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "new": list(self.new),
            "kept": list(self.kept),
            "chosen": {"alpha": self.chosen.alpha, "reason": self.reason},
            "points": [{"alpha": point.alpha, "results": point.metrics} for point in self.points],
        }

    def table(self) -> str:
        """A text table of RSUM, one row an alpha, a column a set; the chosen row is marked."""
        names = [*self.new, *self.kept]
        heads = [*(f"{name} (new)" for name in self.new), *(f"{name} (kept)" for name in self.kept)]
        widths = [max(8, len(head)) for head in heads]
        lines = ["alpha  " + "  ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
        for point in self.points:
            cells = (f"{point.metrics[name]['rsum']:{width}.1f}" for name, width in zip(names, widths, strict=True))
            said = {0.0: "before", 1.0: "after"}.get(point.alpha, "")
            marks = ", ".join(filter(None, (said, "chosen" if point is self.chosen else "")))
            lines.append(f"{point.alpha:<5g}  {'  '.join(cells)}{f'  {marks}' if marks else ''}")
        return "\n".join(lines)


def choose(
    points: Sequence[Point], new: Sequence[str], kept: Sequence[str], rule: str | None = None, *, kept_share: float
) -> Curve:
    """Choose a point of a curve that holds both ends.

    Args:
        points: in the order of their alphas.
        rule: `kept`: the best new score among the points whose kept score is at least `kept_share` of that before (alpha 0
            is always among them). `mean`: the best mean of the new and the kept score. `new`: the best new score. None:
            `kept` where there are kept sets, else `new`. Of equal points the one nearest to the model before is taken.

    Raises:
        UserError: an unknown rule, or one that needs kept sets without them.
    """
    rule = rule or ("kept" if kept else "new")
    require_possible(rule, bool(kept))
    allowed, score, reason = list(points), lambda point: point.mean_rsum(new), "the best mean RSUM on the new sets"
    if rule == "kept":
        least = kept_share * points[0].mean_rsum(kept)
        allowed = [point for point in points if point.alpha == 0 or point.mean_rsum(kept) >= least]
        reason += (
            f" among the {len(allowed)} of {len(points)} points that keep at least {100 * kept_share:g} % of the RSUM before "
            f"on the kept sets ({least:.1f} of {points[0].mean_rsum(kept):.1f})"
        )
    elif rule == "mean":

        def score(point: Point) -> float:
            return (point.mean_rsum(new) + point.mean_rsum(kept)) / 2

        reason = "the best mean of the RSUM on new and on kept sets"
    chosen = max(allowed, key=lambda point: (score(point), -point.alpha))
    return Curve(tuple(points), tuple(new), tuple(kept), chosen, f"alpha {chosen.alpha:g} has {reason}")


def require_possible(rule: str | None, has_kept: bool) -> None:
    """UserError for an unknown rule, or one that needs kept sets without them."""
    if rule is not None and rule not in RULES:
        raise UserError(f"there is no rule {rule!r}; give one of {', '.join(RULES)}")
    if rule in ("kept", "mean") and not has_kept:
        raise UserError(f"--rule {rule} weighs the kept sets, and there are none; give --kept, or --rule new")
