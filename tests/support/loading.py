"""Loaders of small sources, as tests of the data room make them."""

from __future__ import annotations

from typing import Any

import torch
from torchvision import transforms

from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.mixture import Mixture, Preprocessing
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.sampling.schedule import Batching, Sampling
from support.tars import ids_of

_OF_MIXTURE = ("rank", "seed", "on_bad_sample", "cache", "shuffle_window_samples")


def loader_of(
    sources: str | tuple[Source, ...],
    batching: Batching | int = 4,
    *,
    workers: int = 0,
    strategy: str | Sampling = "debiased",
    transform: Any = None,
    tokenizer: Any = ids_of,
    captions: str | None = None,
    preprocessing: dict[str, Any] | None = None,
    **options: Any,
) -> MixtureLoader:
    """Make a loader with all bad samples allowed.

    Args:
        sources: or `--train-data`.
        batching: or B, of a run with one rank and K = 1.
        strategy: of sampling, or all of it.
        transform, tokenizer, preprocessing: for `Preprocessing`; pictures as they are and the numbers in captions by default.
        options: of `Mixture` and of `MixtureLoader`.
    """
    if isinstance(sources, str):
        sources = parse_sources(sources, captions=captions)
    if isinstance(batching, int):
        batching = Batching(batching, workers=max(1, workers))
    mixture = Mixture(
        sources,
        batching,
        Preprocessing(transform or transforms.PILToTensor(), tokenizer, **preprocessing or {}),
        sampling=strategy if isinstance(strategy, Sampling) else Sampling(strategy),
        **{name: options.pop(name) for name in _OF_MIXTURE if name in options},
    )
    return MixtureLoader(mixture, workers=workers, **{"max_bad_share": 1.0, **options})


def epoch_of(
    sources: str | tuple[Source, ...], batching: Batching, epoch: int = 0, **options: Any
) -> list[list[tuple[torch.Tensor, ...]]]:
    """Load one epoch of all ranks as [rank][micro-batch], where a bad sample is an error.

    Args:
        options: of `loader_of`.
    """
    ranks = []
    for rank in range(batching.world_size):
        loader = loader_of(sources, batching, rank=rank, on_bad_sample="fail", **options)
        loader.set_epoch(epoch)
        ranks.append(list(loader))
    return ranks


def steps_of(ranks: list[list[tuple[torch.Tensor, ...]]], dga_steps: int = 1) -> list[list[int]]:
    """List the IDs of each optimizer step, over all ranks and micro-batches."""
    return [
        [
            number
            for rank in ranks
            for _, ids in rank[begin : begin + dga_steps]
            for number in ids.tolist()
        ]
        for begin in range(0, len(ranks[0]), dga_steps)
    ]
