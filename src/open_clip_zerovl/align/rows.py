"""The features of sources by frozen towers, embedded once, and the pairs that they make.

    ROWS/image-NAME-HASH/    0.images (n, F) --dtype    1.images (n,) identity of each picture
    ROWS/text-NAME-HASH/     0.texts (T, F) --dtype     1.texts (T,) identity of each caption

`n` samples and `T` captions of all sources, `F` width of a tower. An identity is a hash of a picture's pixels
(`data.held_out`), of a caption's text. It is 0 where there is no picture or caption. Equal identities are the same picture or
caption: copies of a held-out picture are not trained on, and `--positives` finds positives.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from open_clip_zerovl.align.encoders import Tower
from open_clip_zerovl.align.request import AlignFlags
from open_clip_zerovl.core.durations import duration
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.identity import digest_of, number_of
from open_clip_zerovl.data.components import kind_of
from open_clip_zerovl.data.held_out import Identities, draw_held_out, identity_of
from open_clip_zerovl.data.retrieval import parse_retrieval_data
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.features.embed import (
    embed,
    estimated_seconds,
    missing_units,
    require_room,
    size_words,
)
from open_clip_zerovl.features.encoder import FrozenModel
from open_clip_zerovl.features.fingerprint import describe_source
from open_clip_zerovl.features.sources import SourceSamples
from open_clip_zerovl.features.store import WEIGHTS, ArraySpec, Manifest, Rows, Store

CAPTIONS = "one-per-epoch"


# ---------------------------------------------------------------------------------------------------------------------
# Embedding
# ---------------------------------------------------------------------------------------------------------------------


class _Identities(FrozenModel):
    """Identities in the place of a model's embeddings."""

    def images(self, pixels: Tensor) -> Tensor:
        """(b, 1) int64 of `picture_identity` -> (b,)."""
        return pixels.flatten()

    def texts(self, captions: list[str]) -> Tensor:
        """b captions -> (b,) int64."""
        return torch.tensor([caption_identity(caption) for caption in captions])


def caption_identity(caption: str) -> int:
    """A hash of 64 bits that is not 0."""
    return number_of(digest_of(caption))


def picture_identity(picture: Image.Image) -> Tensor:
    """A picture's identity as (1,) int64."""
    return torch.tensor([identity_of(picture.convert("RGB"))])


@dataclass(frozen=True)
class Sources:
    """The samples of all sources, those of held-out sets last.

    Attributes:
        opened: the sources.
        training: how many of them are trained on.
    """

    opened: tuple[Source, ...]
    training: int

    @cached_property
    def starts(self) -> np.ndarray:
        """(n + 1,) number of each sample's first caption."""
        return SourceSamples(self.opened, strict=False).caption_starts

    @property
    def begins(self) -> np.ndarray:
        """(S + 1,) number of each source's first sample."""
        return np.cumsum([0, *(source.num_samples for source in self.opened)])

    @property
    def names(self) -> list[str]:
        """Names of the sources that are trained on."""
        return [source.name for source in self.opened[: self.training]]


def open_sources(train_data: str, held_out: str) -> Sources:
    """The sources that are trained on, and those of held-out sets.

    Args:
        held_out: sets as `parse_retrieval_data` takes them, of shards.

    Raises:
        UserError: as `parse_sources` and `parse_retrieval_data`; a held-out set of annotations.
    """
    training = parse_sources(train_data, captions=CAPTIONS)
    held: tuple[Source, ...] = ()
    if held_out:
        sets = parse_retrieval_data(held_out)
        for place in sets.values():
            if (form := kind_of(str(place))).kind == "annotations" or form.beside is not None:
                raise UserError(
                    f"--retrieval-data {place}: align reads held-out pairs from shards (`zerovl data coco` and `f30k` write "
                    "them) or a table beside its pictures"
                )
        places = {
            name: place / "test" if (place / "test").is_dir() else place
            for name, place in sets.items()
        }
        named = "::".join(f"{name}={place}" for name, place in places.items())
        held = parse_sources(named, captions=CAPTIONS, evaluation=True, split="test")
    return Sources((*training, *held), len(training))


def embed_tower(
    tower: Tower,
    sources: Sources,
    folder: Path,
    flags: AlignFlags | None = None,
    *,
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
) -> Store:
    """Embed the sources by a tower, or go on where an earlier call stopped; finished rows are only opened.

    Args:
        folder: ROWS.
        flags: precision, batch, workers and part of the work.
        say: is called with the line about size and time.

    Raises:
        UserError: too little room, a tower that makes no numbers of a sample, data that cannot be read at all.
    """
    flags = flags or AlignFlags()
    batch_size, part = flags.encode_batch, flags.part
    frozen = tower.frozen(device)
    image = tower.side == "image"
    count, captions = int(sources.begins[-1]), int(sources.starts[-1])
    rows, kind = (count, "images") if image else (captions, "texts")
    arrays: dict[str, ArraySpec] = {
        f"0.{kind}": (flags.dtype, (rows, tower.width)),
        f"1.{kind}": ("int64", (rows,)),
    }
    described = [describe_source(source) for source in sources.opened]
    if not image:
        samples_at = np.cumsum([0, *(size for source in sources.opened for size in source.sizes)])
        per_file = iter(np.diff(sources.starts[samples_at]).tolist())
        for source, entry in zip(sources.opened, described, strict=True):
            entry["captions"] = [next(per_file) for _ in source.sizes]
    fingerprints = list(frozen.fingerprints.values())
    facts: dict[str, Any] = {"use": "align", "model": [tower.name], WEIGHTS: fingerprints}
    if image:
        facts["identities"] = "pixels"  # of thumbnails in an earlier release
    manifest = Manifest(facts, described, arrays)
    name = re.sub(r"[^A-Za-z0-9]+", "-", tower.name)[-40:].strip("-")
    place = folder / f"{tower.side}-{name}-{flags.dtype}-{fingerprints[0][:8]}"
    if not place.exists():
        require_room(folder, manifest)
    store = Store.create(place, manifest, cache=True, by_sample=image)
    samples = SourceSamples(sources.opened, images=image, captions=not image, strict=False)
    units = missing_units(store, samples.sizes, part)
    left = sum(samples.sizes[file] for unit in units for file in unit)
    if left:
        seconds = estimated_seconds(frozen, samples, units, batch_size)
        size = size_words(manifest.bytes)
        say(
            f"{tower.name}: {left:,} of {count:,} samples to encode, about {duration(seconds)}, {size} in {place}"
        )
        ids = _Identities("identities", picture_transform=picture_identity if image else None)
        embed(
            store,
            [frozen, ids],
            samples,
            batch_size=batch_size,
            workers=flags.workers,
            part=part,
            desc=tower.side,
        )
    else:
        say(f"{tower.name}: its features of {count:,} samples are in {place}")
    return store


# ---------------------------------------------------------------------------------------------------------------------
# Pairs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """Held-out pictures, each with all captions of the samples that show it. The captions lie picture by picture.

    Attributes:
        images: (I,) rows of the pictures.
        texts: (T,) rows of their captions.
        text_to_image: (T,) number of each caption's picture.
    """

    images: np.ndarray
    texts: np.ndarray
    text_to_image: np.ndarray

    def part(self, wanted: np.ndarray) -> HeldOut:
        """Some of the pictures, by a mask (I,)."""
        captions = wanted[self.text_to_image]
        number = np.cumsum(wanted) - 1
        return HeldOut(
            self.images[wanted], self.texts[captions], number[self.text_to_image[captions]]
        )


@dataclass(frozen=True)
class Pairs:
    """The samples that are trained on, source by source, and those that are held out.

    Attributes:
        images: (m,) row of each sample's picture.
        texts: rows of all their captions, sample by sample.
        first: (m + 1,) where each sample's captions begin in `texts`.
        sizes: samples of each source that has any.
        names: the names of these sources.
        held_out: of which no picture is among `images`.
        lost: samples without a picture or without a caption.
        copies: samples left out because their picture is held out.
    """

    images: np.ndarray
    texts: np.ndarray
    first: np.ndarray
    sizes: list[int]
    names: list[str]
    held_out: HeldOut
    lost: int
    copies: int

    def words(self) -> str:
        """The numbers of samples, held-out pairs, and samples that are left out."""
        held = self.held_out
        line = f"{len(self.images):,} samples; held out {len(held.images):,} pictures with {len(held.texts):,} captions"
        for count, why in (
            (self.lost, "without picture or caption"),
            (self.copies, "whose picture is held out"),
        ):
            line += f"; {count:,} {why} left out" if count else ""
        return line


def make_pairs(
    sources: Sources,
    picture_ids: np.ndarray,
    caption_ids: np.ndarray,
    *,
    seed: int,
    share: float = 0.1,
    trained_on: Identities | None = None,
) -> Pairs:
    """The pairs of some sources; given sets, or a share of the pictures, are held out.

    Args:
        picture_ids, caption_ids: (n,) and (T,), 0 where there is none.
        seed, share, trained_on: of `draw_held_out`, which chooses the held-out pictures if no sets are given.

    Raises:
        UserError: too few pictures, or no picture in the sets.
    """
    begins, n = sources.begins, len(picture_ids)
    sample_of = np.repeat(np.arange(n), np.diff(sources.starts))
    there = np.flatnonzero(caption_ids)
    captions = np.bincount(sample_of[there], minlength=n)
    usable = (picture_ids != 0) & (captions > 0)
    trained = np.arange(n) < begins[sources.training]
    if sources.training < len(sources.opened):
        held = usable & ~trained
    else:
        drawn = draw_held_out(picture_ids[usable], seed=seed, share=share, trained_on=trained_on)
        held = usable & np.isin(picture_ids, drawn)
    if not held.any():
        raise UserError(
            "the held-out sets have no picture with a caption; give other sets, or leave --retrieval-data out"
        )
    chosen = usable & trained & ~np.isin(picture_ids, picture_ids[held])
    copies = int((usable & trained & ~held).sum() - chosen.sum())
    counts = [int(chosen[begin:end].sum()) for begin, end in itertools.pairwise(begins)]
    filled = [(name, size) for name, size in zip(sources.names, counts, strict=False) if size]
    if not filled:
        raise UserError("every picture of the data is held out; give more data")
    _, first_rows, number = np.unique(picture_ids[held], return_index=True, return_inverse=True)
    of_held = np.full(n, -1)
    of_held[held] = number
    texts = there[held[sample_of[there]]]
    texts = texts[np.argsort(of_held[sample_of[texts]], kind="stable")]
    out = HeldOut(np.flatnonzero(held)[first_rows], texts, of_held[sample_of[texts]])
    return Pairs(
        np.flatnonzero(chosen),
        there[chosen[sample_of[there]]],
        np.concatenate([[0], np.cumsum(captions[chosen])]),
        [size for _, size in filled],
        [name for name, _ in filled],
        out,
        int((~usable & trained).sum()),
        copies,
    )


def unit_scale(rows: Rows, wanted: np.ndarray) -> float:
    """1 / the root of the mean square of some wanted rows' entries.

    Features of any size thus train with one learning rate; the exported head takes the factor into its first layer.
    """
    some = rows[np.sort(wanted[:: max(1, len(wanted) // 8192)])].float()
    return 1.0 / max(float(some.square().mean().sqrt()), 1e-12)


def shared_ids(kind: str, stores: Sequence[Store]) -> np.ndarray:
    """Identity of each sample's picture ("images") or each caption ("texts"), 0 where a tower has not seen it."""
    ids = stores[0].rows[f"1.{kind}"].read(slice(None))
    for store in stores[1:]:
        seen = torch.cat([block != 0 for block in store.rows[f"1.{kind}"].blocks()])
        ids[~seen.numpy()] = 0
    return ids


class Features:
    """The rows of a store on a device where they fit, else mapped; `features[index]` are float32 on the device.

    Args:
        rows: (n, F).
        scale: by which all rows are multiplied.

    Attributes:
        mapped: whether they are too many for the memory.
    """

    def __init__(self, rows: Rows, scale: float, device: torch.device, room: int | None) -> None:
        self._rows, self.scale, self._device = rows, scale, device
        self.width = rows.array.shape[1]
        self.mapped = room is not None and rows.array.nbytes >= room
        self._held = None if self.mapped else torch.cat(list(rows.blocks())).to(device)

    def __getitem__(self, index: Tensor) -> Tensor:
        """The rows of an index (b,) on the device: (b, F)."""
        if self._held is not None:
            return self._held.index_select(0, index).float().mul_(self.scale)
        wanted, back = np.unique(
            index.cpu().numpy(), return_inverse=True
        )  # the map is read in one direction
        rows = self._rows[wanted].to(self._device)[torch.from_numpy(back).to(self._device)]
        return rows.float().mul_(self.scale)
