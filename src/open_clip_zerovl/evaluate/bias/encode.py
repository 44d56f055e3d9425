"""Models and the pairs on which `zerovl bias` and `zerovl compare` measure them: names, samples, embeddings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.evaluate.bias.measures import check_source_probe, probe_groups
from open_clip_zerovl.evaluate.bias.samples import SourceSample, read_source_samples
from open_clip_zerovl.models.configs import ClipModel

log = logging.getLogger(__name__)


def name_models(models: Sequence[str]) -> dict[str, str]:
    """Names of models, given as `NAME=MODEL` or taken from the path.

        ["random=a.pt", "logs/run/checkpoints/epoch_9.pt"]  ->  {"random": "a.pt", "run": "logs/run/checkpoints/epoch_9.pt"}

    Raises:
        UserError: two models of one name, or one without a name.
    """
    named: dict[str, str] = {}
    for entry in models:
        name, equals, path = entry.partition("=")
        if not equals or "/" in name:
            name, path = "", entry
        if not name:
            place = Path(path.removeprefix("local-dir:"))
            name = place.parent.parent.name if place.parent.name == "checkpoints" else place.stem
        if not name or not path or name in named:
            raise UserError(f"model {entry!r} needs a name of its own; write NAME={path or 'MODEL'}")
        named[name] = path
    return named


def name_sides(models: Sequence[str]) -> dict[str, list[str]]:
    """Sides and their runs, from `A=run1,run2` or a single model that `name_models` names.

    Raises:
        UserError: fewer than two sides, sides of different numbers of runs, a side without a name or with one that is taken.
    """
    sides: dict[str, list[str]] = {}
    for entry in models:
        ((name, paths),) = name_models([entry]).items()
        runs = [paths] if os.path.exists(paths) else paths.split(",")
        if name in sides or not all(runs) or (len(runs) > 1 and not entry.startswith(f"{name}=")):
            raise UserError(
                f"{entry!r} needs a name of its own and its runs; write NAME=MODEL, or NAME=RUN1,RUN2 for several seeds"
            )
        sides[name] = runs
    check_sides({name: len(runs) for name, runs in sides.items()})
    return sides


def check_sides(runs: dict[str, int]) -> None:
    """UserError for fewer than two sides, or sides of different numbers of runs. `runs`: side -> its runs."""
    if len(runs) < 2:
        raise UserError("a comparison needs two sides or more; name them A=MODEL B=MODEL")
    if len(set(runs.values())) != 1:
        counts = ", ".join(f"{name} has {count}" for name, count in runs.items())
        raise UserError(
            f"runs are paired by their seeds, and {counts}; give each side as many, in the same order of seeds"
        )


def read_samples(
    sources: Sequence[Source], limit: int, concept_field: str | None, held_out_field: str | None = None
) -> tuple[list[SourceSample], dict[str, int]]:
    """`read_source_samples`, with a warning for each source of which samples were passed over."""
    samples, skipped = read_source_samples(sources, limit, concept_field=concept_field, held_out_field=held_out_field)
    for name, count in skipped.items():
        if count:
            log.warning("Source %s: %d samples without a readable picture and a caption were passed over.", name, count)
    return samples, skipped


def check_probe(samples: Sequence[SourceSample]) -> None:
    """`check_source_probe` of samples. UserError as there, before anything is encoded."""
    check_source_probe([sample.source for sample in samples], probe_groups([sample.concept for sample in samples]))


def rows_by_source(samples: Sequence[SourceSample]) -> dict[str, list[int]]:
    """Source -> the indices of its samples."""
    rows: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        rows.setdefault(sample.source, []).append(row)
    return rows


def encode(encoder: Encoder, samples: Sequence[SourceSample], name: str) -> tuple[Tensor, Tensor, float]:
    """image_features, text_features (N, D) of the samples and the factor `logit_scale.exp()`."""
    model, preprocess, tokenizer, device = encoder.load()
    size = encoder.batch_size
    pair = embed_samples(model, preprocess, tokenizer, samples, batch_size=size, device=device, name=name)
    scale = model.logit_scale
    assert isinstance(scale, Tensor)
    return *pair, scale.exp().item()


@torch.no_grad()
def embed_samples(
    model: ClipModel,
    preprocess: Callable[[Any], Tensor],
    tokenizer: Callable[[list[str]], Tensor],
    samples: Sequence[SourceSample],
    *,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
    name: str = "embedding",
) -> tuple[Tensor, Tensor]:
    """L2-normalised image_features and text_features (N, D) of the samples, float32, on the CPU.

    Args:
        model: an open_clip model in eval mode, on `device`.
        name: for the progress bar.

    Raises:
        BadImage: a picture that cannot be decoded; `read_source_samples` yields none such.
    """
    images, texts = [], []
    for start in tqdm(range(0, len(samples), batch_size), desc=name, unit="batch", leave=False):
        batch = samples[start : start + batch_size]
        pixels = torch.stack([preprocess(sample.picture()) for sample in batch])
        tokens = tokenizer([sample.caption for sample in batch])
        images.append(model.encode_image(pixels.to(device), normalize=True).float().cpu())
        texts.append(model.encode_text(tokens.to(device), normalize=True).float().cpu())
    return torch.cat(images), torch.cat(texts)
