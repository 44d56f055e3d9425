"""Mixtures of styles as training pairs, their scores, and what can be known of them before a training (study.yaml).

`n` samples, `F` width of the encoders' features, `W` width after the principal components, `D` of the shared space, `S` seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from open_clip_zerovl.evaluate.metrics import retrieval_metrics
from scripts.photographs.heads import Heads, Pairs

WIDTH = 256
HELD_OUT = 1000  # test pairs of products; the next ones are not used
NEIGHBOURS = 10
PRODUCTS = "products"
Reduce = Callable[[Tensor], Tensor]


class Store:
    """The features that `styles.py` has stored, or the maps of `stages.py` in the place of a picture's features."""

    def __init__(self, folder: Path) -> None:
        def load(name: str) -> dict[str, Any]:
            return torch.load(folder / f"{name}.pt", weights_only=True)

        self.train, self.validation, self.test = map(load, ("train", "validation", "test"))
        self.products = load("products")


def principal_components(rows: Tensor) -> Reduce:
    """Fit the map to the first `WIDTH` principal components of rows (n, F), at a mean square of one."""
    mean = rows.mean(0)
    covariance = (rows - mean).double().T @ (rows - mean).double() / len(rows)
    _, vectors = torch.linalg.eigh(covariance)
    basis = vectors[:, -WIDTH:].flip(1).float()
    size = ((rows - mean) @ basis).square().mean().sqrt()
    return lambda features: (features - mean) @ basis / size


@dataclass(frozen=True)
class Source:
    """A source of a mixture: its training features, and its style's features of the held-out pairs.

    Attributes:
        images, texts: (n, F).
        test_images, test_texts: (1,000, F); row i of all styles is the same photograph.
    """

    images: Tensor
    texts: Tensor
    test_images: Tensor
    test_texts: Tensor


def sources_of(store: Store, settings: Mapping[str, Any]) -> list[Source]:
    """Divide the photographs among a mixture's sources by turns, the first of `every` to the first source."""
    every = settings.get("every", 2)
    turns = torch.arange(len(store.train["captions"])) % every
    made = []
    for number, style in enumerate(settings["sources"]):
        rows = (turns == 0 if number == 0 else turns > 0).nonzero()[:, 0]
        if style == PRODUCTS:
            train, test = slice(2 * HELD_OUT, 2 * HELD_OUT + len(rows)), slice(HELD_OUT)
            images, texts = store.products["pictures"], store.products["captions"]
            made.append(Source(images[train], texts[train], images[test], texts[test]))
            continue
        look, words = style
        images, texts = store.train["pictures"][look][rows], store.train["styled"][words][rows]
        held_out = store.test["pictures"][look], store.test["styled"][words]
        made.append(Source(images, texts, *held_out))
    return made


class Scored:
    """Training pairs with the inputs of their scores."""

    def __init__(self, store: Store, images: Tensor, texts: Tensor, sizes: list[int]) -> None:
        self.store = store
        self.of_images = principal_components(images) if images.ndim == 2 else lambda maps: maps
        self.of_texts = principal_components(texts.flatten(0, 1))
        self.pairs = Pairs(self.of_images(images), self.of_texts(texts), tuple(sizes))

    def recall(self, heads: Heads, images: Tensor, texts: Tensor) -> list[float]:
        """Score mean recall (RSUM / 6) of each seed on (n, F) pictures and (n, F) or (n, C, F) captions."""
        captions = 1 if texts.ndim == 2 else texts.shape[1]
        owner = torch.arange(len(images)).repeat_interleave(captions)
        with torch.no_grad():
            pictures = heads.encode("image", self.of_images(images))
            words = heads.encode("text", self.of_texts(texts.reshape(len(owner), -1)))
        pictures, words = pictures.nan_to_num(), words.nan_to_num()  # diverged: at chance
        return [
            retrieval_metrics(*of_seed, owner)["rsum"] / 6
            for of_seed in zip(pictures, words, strict=True)
        ]

    def clean(self, heads: Heads, part: dict[str, Any], look: str = "plain") -> list[float]:
        """Score photographs with their five human captions."""
        return self.recall(heads, part["pictures"][look], part["captions"])

    def scores(self, heads: Heads) -> dict[str, list[float]]:
        """Compute each measure of each seed."""
        return {
            "validation": self.clean(heads, self.store.validation),
            "clean": self.clean(heads, self.store.test),
        }


class OneSource(Scored):
    """All plain training photographs with their five captions."""

    def __init__(self, store: Store) -> None:
        train = store.train
        images, texts = train["pictures"]["plain"], train["captions"]
        super().__init__(store, images, texts, [len(images)])


class Mixture(Scored):
    """Two sources of the protocol."""

    def __init__(self, store: Store, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.sources = sources_of(store, settings)
        images = torch.cat([source.images for source in self.sources])
        texts = torch.cat([source.texts for source in self.sources])[:, None]
        super().__init__(store, images, texts, [len(source.images) for source in self.sources])

    def scores(self, heads: Heads) -> dict[str, list[float]]:
        """Compute also `pool`, `within`, `unseen`, and `cross` where both pictures and captions differ."""
        first, second = self.sources
        photographs = PRODUCTS not in self.settings["sources"]
        turn = slice(1, None, 2) if photographs else slice(0, None, 2)
        pool_images = torch.cat([first.test_images[::2], second.test_images[turn]])
        pool_texts = torch.cat([first.test_texts[::2], second.test_texts[turn]])
        within = [
            self.recall(heads, source.test_images, source.test_texts) for source in self.sources
        ]
        measured = super().scores(heads) | {
            "pool": self.recall(heads, pool_images, pool_texts),
            "within": _means(within),
            "unseen": self.clean(heads, self.store.test, "poster"),
        }
        if photographs and all(a != b for a, b in zip(*self.settings["sources"], strict=True)):
            crossed = [
                self.recall(heads, first.test_images, second.test_texts),
                self.recall(heads, second.test_images, first.test_texts),
            ]
            measured["cross"] = _means(crossed)
        return measured

    def signs(self) -> dict[str, float]:
        """Compute what is known before a training: source probes in percent, the captions' mixing, and their product."""
        rows = min(1000, *self.pairs.sizes)
        draw = torch.Generator().manual_seed(0)
        chosen = [torch.randperm(size, generator=draw)[:rows] for size in self.pairs.sizes]
        images = [source.images[part] for source, part in zip(self.sources, chosen, strict=True)]
        texts = [source.texts[part] for source, part in zip(self.sources, chosen, strict=True)]
        picture, caption = source_probe(images, draw), source_probe(texts, draw)
        mixing = neighbours_mixing(texts)
        shortcut = max(0.0, 2 * min(picture, caption) - 1) * mixing
        probes = {"picture": 100 * picture, "caption": 100 * caption}
        return probes | {"mixing": mixing, "sign": shortcut}


def _means(values: list[list[float]]) -> list[float]:
    return [sum(of_seed) / len(of_seed) for of_seed in zip(*values, strict=True)]


def source_probe(sources: list[Tensor], draw: torch.Generator) -> float:
    """Measure the share of held-out rows whose source a ridge regression tells, of two sources of one size (chance 0.5)."""
    rows, truth = torch.cat(sources), torch.arange(len(sources)).repeat_interleave(len(sources[0]))
    rows = (rows - rows.mean(0)) / (rows.std(0) + 1e-6)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1).double()
    order = torch.randperm(len(rows), generator=draw)
    seen, held = order[: 7 * len(order) // 10], order[7 * len(order) // 10 :]
    wanted = F.one_hot(truth).double()
    normal = rows[seen].T @ rows[seen] + 0.1 * len(seen) * torch.eye(rows.shape[1]).double()
    weights = torch.linalg.solve(normal, rows[seen].T @ wanted[seen])
    return float(((rows[held] @ weights).argmax(1) == truth[held]).double().mean())


def neighbours_mixing(sources: list[Tensor]) -> float:
    """Measure the share of other sources among nearest neighbours after centring, over the share that chance expects."""
    centred = torch.cat([F.normalize(rows - rows.mean(0), dim=-1) for rows in sources])
    truth = torch.arange(len(sources)).repeat_interleave(len(sources[0]))
    cosines = centred @ centred.T
    cosines.fill_diagonal_(-2)
    other = truth[cosines.topk(NEIGHBOURS).indices] != truth[:, None]
    return float(other.double().mean()) * len(sources) / (len(sources) - 1)
