"""Loaders of small sources, as tests of the data room make them."""

from __future__ import annotations

from typing import Any

from torchvision import transforms

from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.mixture import Mixture, Preprocessing, Sampling
from open_clip_zerovl.data.schedule import Batching
from open_clip_zerovl.data.sources import Source, parse_sources
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
    """A loader with all bad samples allowed.

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
