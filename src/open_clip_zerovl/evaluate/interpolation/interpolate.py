"""Weights between two models as a folder that stock open_clip loads, and the curve they were chosen by.

Files of the folder beside those of an export:

    interpolation.json    both ends, all points with their metrics, the chosen alpha and why
    interpolation.png     RSUM by alpha
    interpolation.html    the same with tables, as one page
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from open_clip_zerovl.checkpoints.between import Ends
from open_clip_zerovl.checkpoints.card import ModelCard, run_facts
from open_clip_zerovl.checkpoints.export import write_local_dir
from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import Say, UserError
from open_clip_zerovl.data.held_out import Identities, list_of_trained, trained_on
from open_clip_zerovl.data.indexed import IndexedSet
from open_clip_zerovl.data.retrieval import open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.evaluate.interpolation.curve import Curve, Point, choose, require_possible
from open_clip_zerovl.evaluate.retrieval.score import RetrievalSettings, score_set
from open_clip_zerovl.evaluate.settings import CurveFlags
from open_clip_zerovl.evaluate.zero_shot.score import score_loaded
from open_clip_zerovl.evaluate.zero_shot.sets import LabelledSet
from open_clip_zerovl.models.local_dir import TRAINED_ON
from open_clip_zerovl.report.html import render


@dataclass(frozen=True)
class CurveSettings(CurveFlags):
    """Sets to score, and the rule that chooses a point.

    Attributes:
        new, kept: retrieval sets (form: `parse_retrieval_data`) of the new ability, and of the ability to keep.
        retrieval: split and captions of all sets.

    Raises:
        UserError: a rule that needs kept sets, without them.
    """

    new: str
    kept: str | None = None
    retrieval: RetrievalSettings = field(default_factory=RetrievalSettings)

    def __post_init__(self) -> None:
        require_possible(self.rule, bool(self.kept))

    def open(self) -> tuple[dict[str, IndexedSet], tuple[str, ...], tuple[str, ...]]:
        """Open all sets by name, with the names of the new ones and of the kept ones.

        Raises:
            UserError: a name given twice.
        """
        new_sets = parse_retrieval_data(self.new)
        kept_sets = parse_retrieval_data(self.kept) if self.kept else {}
        both = sorted(new_sets.keys() & kept_sets.keys())
        if both:
            raise UserError(f"the set {both[0]} is both new and kept; give it once, or two names")
        sets = {
            name: open_retrieval_set(path, self.retrieval.split)
            for name, path in {**new_sets, **kept_sets}.items()
        }
        return sets, tuple(new_sets), tuple(kept_sets)


def score_curve(
    ends: Ends,
    encoder: Encoder,
    settings: CurveSettings,
    *,
    classes: Mapping[str, LabelledSet] | None = None,
    say: Say | None = None,
) -> Curve:
    """Score the models between two ends and choose one.

    The checkpoints' own transform is used.

    Args:
        encoder: how many images at once, by how many loader processes.
        classes: all new sets as labelled ones, whose zero-shot top-1 then chooses; all kept sets too if they have classes.
        say: is called with a line for each point.

    Raises:
        UserError: sets that cannot be read, and the errors of `score_set`.
    """
    sets, new_sets, kept_sets = settings.open()
    points = []
    for alpha in sorted({0.0, 1.0, *settings.alphas}):
        loaded = (ends.at(alpha), ends.preprocess, ends.tokenizer, ends.device)
        metrics: dict[str, Mapping[str, float]] = {}
        for name, dataset in sets.items():
            scored = score_set(loaded, name, dataset, settings.retrieval, encoder=encoder)
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
    return choose(points, new_sets, kept_sets, settings.rule, kept_share=settings.kept_share)


def write_between(
    ends: Ends,
    alpha: float,
    out: str | os.PathLike[str],
    *,
    curve: Curve | None = None,
    trained: Identities | None = None,
    precision: str | None = None,
    force: bool = False,
) -> Path:
    """Export the model at `alpha`, with the curve it was chosen by, and the pictures on which its ends were trained.

    Args:
        trained: the pictures on which `after` was trained, beside those that the ends' own folders name.

    Raises:
        UserError: a destination that holds something else, weights that do not load again as they were.
    """
    weights = ends.weights(alpha)
    before, after = (_public(name) for name in ends.names)
    metrics = {
        f"{name}_{key}": value
        for name, row in (curve.chosen.metrics if curve is not None else {}).items()
        for key, value in row.items()
        if key in ("rsum", "rsum_chance") or "_R@" in key
    }
    card = ModelCard(
        ends.spec,
        weights,
        origin=f"Weights between {before} (alpha 0) and {after} (alpha 1) at alpha {alpha:g}, as in WiSE-FT.",
        **run_facts(Path(ends.names[1])),
        base_models=ends.names,
        metrics=metrics,
        notes=[] if curve is None else [curve.sentence],
    )
    chosen = (
        {"chosen": {"alpha": alpha, "reason": "as asked"}} if curve is None else curve.as_dict()
    )
    content = {"before": ends.names[0], "after": ends.names[1], **chosen}
    extra_files: dict[str, bytes | str] = {
        "interpolation.json": json.dumps(content, indent=2) + "\n"
    }
    seen = trained_on(ends.names)
    if seen is not None or trained is not None:
        extra_files[TRAINED_ON] = list_of_trained(seen, trained)
    if curve is not None:
        extra_files["interpolation.png"] = picture = curve.picture()
        extra_files["interpolation.html"] = render(
            "curve.html",
            title="Weights between two models",
            names=ends.names,
            curve=curve,
            picture=picture,
        )
    return write_local_dir(
        "..".join(ends.names),
        weights,
        ends.spec,
        out,
        card=card,
        precision=precision,
        force=force,
        extra_files=extra_files,
    )


def _public(name: str) -> str:
    """Return a model's name without the folders above it.

    For a checkpoint the names of its run and its file.
    """
    path = Path(name.removeprefix("local-dir:"))
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}/{path.name}"
    return path.name if path.exists() else name
