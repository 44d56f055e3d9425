"""The paper's runs (`recipes.yaml`): each run's difference from the base, and the paper's hardware, hours and results.

`recipes.py` starts them. A source is a folder under DATA and is named after its first part: `coco/train` is the source `coco`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

Flags = Mapping[str, "str | None"]

NOT_GIVEN = "not given"
MEASURED = ("I2T R@1", "I2T R@10", "T2I R@1", "T2I R@10")


@dataclass(frozen=True)
class Recipe:
    """One run of the paper.

    Attributes:
        paper: where the paper reports it.
        result: the paper's number, in the unit of `metric`.
        effective_batch: N over all GPUs and DGA steps.
        flags: those that differ from BASE (for a linear probe: all flags).
        hardware, time: the paper's.
        metric: what `result` measures.
        sources: folders under DATA that it trains on.
        samples: samples of the whole run, if the paper counts steps and not epochs.
        dga: whether K may exceed 1; False needs GPUs that hold the batch.
        needs: flags that have no default and must be given with --set.
        finetuned_on: the retrieval set under DATA on which the run is scored.
        recalls: the paper's on that set in percent, in the order of `MEASURED`.
        program: "training", or "linear-probe" for `scripts.paper.probe`, whose two sources are its training and test set; one
            source is a dataset that brings its split.
    """

    paper: str
    result: str
    effective_batch: int
    flags: Flags = field(default_factory=dict)
    hardware: str = NOT_GIVEN
    time: str = NOT_GIVEN
    metric: str = "RSUM of COCO 5K / Flickr30K 1K, zero-shot"
    sources: Sequence[str] = ("sbu", "vg", "cc3m", "cc12m")
    samples: int | None = None
    dga: bool = True
    needs: Sequence[str] = ()
    finetuned_on: str | None = None
    recalls: Sequence[float] = ()
    program: str = "training"


_TABLE = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text(encoding="utf-8"))
BASE: Flags = _TABLE["base"]
RECIPES = {name: Recipe(**one) for name, one in _TABLE["recipes"].items()}


def find_recipe(name: str) -> str | None:
    """Find a recipe by its name with or without the make targets' `train-`: "train-debiased" is `debiased`.

    Returns:
        None if there is none.
    """
    return next(
        (
            known
            for known in (name, name.removeprefix("train-"), f"train-{name}")
            if known in RECIPES
        ),
        None,
    )


def described(name: str) -> str:
    """Describe a recipe in a few lines: paper, metric, hardware, time, data, batch, differences from the base, command."""
    recipe = RECIPES[name]
    given = [
        f"--{flag}" + (f" {value}" if value else "")
        for flag, value in recipe.flags.items()
        if value is not None
    ]
    removed = [f"no --{flag}" for flag, value in recipe.flags.items() if value is None]
    needed = "".join(f" ARGS='--set {flag}=...'" for flag in recipe.needs[:1])
    target = name if name.startswith(("train-", "finetune-")) else f"train-{name}"
    length = f"{recipe.samples // recipe.effective_batch:,} steps of " if recipe.samples else ""
    recalls = ", ".join(
        f"{kind} {value}" for kind, value in zip(MEASURED, recipe.recalls, strict=False)
    )
    lines = {
        "paper": recipe.paper,
        "metric": f"{recipe.metric}: {recipe.result}" + (f" ({recalls})" if recalls else ""),
        "hardware": recipe.hardware,
        "time": recipe.time,
        "data": " ".join(f"DATA/{source}" for source in recipe.sources),
        "batch": f"{length}{recipe.effective_batch:,}" + ("" if recipe.dga else ", without DGA"),
        "flags": ", ".join([*given, *removed]),
        "command": f"make {target} DATA=DIR{needed}",
    }
    return "\n".join([name, *(f"  {key:9} {value}" for key, value in lines.items())])
