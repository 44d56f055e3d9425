"""The front matter of a model card: what a hub lists a model by, with its base models, data sets and scores.

`model-index` has the form in which the trainers of transformers and sentence-transformers write it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from open_clip.pretrained import get_pretrained_cfg

from open_clip_zerovl.core.files import reading
from open_clip_zerovl.models.local_dir import LOCAL_DIR

CARD_FILE = "README.md"
#: Entries that describe weights, so that they stay where the same weights are written for another library.
OF_WEIGHTS = ("base_model", "datasets", "model-index")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_DATA_SET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)")
_RECALL = re.compile(r"(?:(.+)_)?(image_to_text|text_to_image)_R@(\d+)")
_RSUM = re.compile(r"(?:(.+)_)?(rsum)")
_ACCURACY = re.compile(r"(.+)[_-](top\d+|mean_per_class)")
_RETRIEVAL = {"type": "image-text-retrieval", "name": "Image-text retrieval"}
_CLASSES = {"type": "zero-shot-image-classification", "name": "Zero-shot image classification"}


def read_front_matter(folder: Path) -> dict[str, Any]:
    """Read the OF_WEIGHTS entries of a folder's card.

    Returns:
        {} without a card or front matter.

    Raises:
        UserError: it is not YAML.
    """
    file = folder / CARD_FILE
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    front = re.match(r"---\n(.*?)^---$", text, re.MULTILINE | re.DOTALL)
    if front is None:
        return {}
    with reading(file, "mend the lines between its first two ---"):
        entries = yaml.safe_load(front[1]) or {}
        return {name: entries[name] for name in OF_WEIGHTS if name in entries}


def repositories_of(name: str) -> list[str]:
    """Name the hub's repositories of a model or encoder: its own, or the base models of an exported folder.

    Args:
        name: as `load_model` or `zerovl align` takes it.

    Returns:
        [] for a model that no repository is known of.
    """
    folder = Path(name.partition(":")[2] if name.startswith((LOCAL_DIR, "hf:")) else name)
    if folder.expanduser().exists():
        known = read_front_matter(folder.expanduser()).get("base_model", [])
        return [known] if isinstance(known, str) else list(known)
    kind, colon, rest = name.partition(":")
    if colon and kind == "timm":
        import timm

        cfg = timm.models.get_pretrained_cfg(rest)
        return [cfg.hf_hub_id] if cfg is not None and cfg.hf_hub_id else []
    if colon:
        return [rest] if kind in ("hf", "hf-hub") and _REPOSITORY.fullmatch(rest) else []
    model, _, tag = name.rpartition("/")
    repository = (get_pretrained_cfg(model.replace("/", "-"), tag) or {}).get("hf_hub", "")
    return [repository.rstrip("/")] if repository else []


def front_matter(
    title: str,
    metrics: Mapping[str, float],
    params: Mapping[str, Any],
    base_models: Sequence[str],
) -> dict[str, Any]:
    """Make the OF_WEIGHTS entries of a run's weights.

    Args:
        title: name of the model.
        metrics: as in `ModelCard`.
        params: of the run; its start and its data count.
        base_models: further models on which these weights stand.
    """
    started = [params.get("init_from"), params.get("model")]
    if params.get("pretrained"):
        started.append(f"{params.get('model')}/{params['pretrained']}")
    names = [*base_models, *(str(name) for name in started if name)]
    repositories = dict.fromkeys(
        repository for name in names for repository in repositories_of(name)
    )
    data_sets = dict.fromkeys(_DATA_SET.findall(str(params.get("train_data") or "")))
    results = _results(metrics)
    entries = {
        "base_model": list(repositories),
        "datasets": list(data_sets),
        "model-index": [{"name": title, "results": results}] if results else [],
    }
    return {name: entry for name, entry in entries.items() if entry}


def _results(metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """Group the scores by task and set, with chance in a score's name."""
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for name, value in metrics.items():
        if match := _RECALL.fullmatch(name):
            task, data, factor = _RETRIEVAL, match[1], 100
            kind, words = f"{match[2]}_recall_at_{match[3]}", f"{match[2]} R@{match[3]} in %"
        elif match := _RSUM.fullmatch(name):
            task, data, factor = _RETRIEVAL, match[1], 1
            kind, words = "rsum", "RSUM of 600"
        elif match := _ACCURACY.fullmatch(name):
            task, data, factor = _CLASSES, match[1], 100
            kind, words = match[2], f"{match[2]} in %"
        else:
            continue
        if (chance := metrics.get(f"{name}_chance")) is not None:
            words += f" (chance {factor * chance:.1f})"
        data = data or "validation pairs"
        entry = results.setdefault(
            (task["type"], data),
            {
                "task": task,
                "dataset": {"type": data.replace(" ", "-"), "name": data},
                "metrics": [],
            },
        )
        score = {"type": kind, "value": round(factor * value, 2), "name": words.replace("_", " ")}
        entry["metrics"].append(score)
    return list(results.values())


def as_text(entries: Mapping[str, Any]) -> str:
    """Write entries as the lines between a card's first two ---."""

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True  # tasks are repeated, not named

    return yaml.dump(dict(entries), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
