"""The features of sources by frozen towers, made once, and the pairs that they make.

    ROWS/image-NAME-DIGEST/     a file for each shard (`features.embed`): rows (n, F), identity of each picture
    ROWS/text-NAME-DIGEST/      rows (T, F), identity of each caption

`n` samples and `T` captions of all sources, `F` width of a tower. An identity is a hash of a picture's pixels
(`data.splits`), of a caption's text. It is 0 where there is no picture or caption. Equal identities are the same picture or
caption: copies of a held-out picture are not trained on, and `--positives` finds positives.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.align.encoders import Tower
from open_clip_zerovl.align.request import AlignFlags
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import digest_of, number_of
from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.data.names import PER_EPOCH
from open_clip_zerovl.data.sets import parse_retrieval_data
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.data.splits import Identities, draw_held_out, identity_of
from open_clip_zerovl.features.embed import FeatureStore, embed
from open_clip_zerovl.features.sources import SourceSamples
from open_clip_zerovl.report.tables import size_words
from open_clip_zerovl.sampling.schedule import source_schedule

# ---------------------------------------------------------------------------------------------------------------------
# Embedding
# ---------------------------------------------------------------------------------------------------------------------


def caption_identity(caption: str) -> int:
    """Hash a caption to 64 bits that are not 0."""
    return number_of(digest_of(caption))


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
        """Number each sample's first caption (n + 1,)."""
        return SourceSamples(self.opened, "text").caption_starts

    @property
    def begins(self) -> np.ndarray:
        """Number each source's first sample (S + 1,)."""
        return np.cumsum([0, *(source.num_samples for source in self.opened)])

    @property
    def names(self) -> list[str]:
        """Name the sources that are trained on."""
        return [source.name for source in self.opened[: self.training]]


def open_sources(train_data: str, held_out: str) -> Sources:
    """Open the sources that are trained on, and those of held-out sets.

    Args:
        held_out: sets as `parse_retrieval_data` takes them, of shards.

    Raises:
        UserError: as `parse_sources` and `parse_retrieval_data`.
    """
    training = parse_sources(train_data, captions=PER_EPOCH)
    held: tuple[Source, ...] = ()
    if held_out:
        places = {
            name: place / "test" if (place / "test").is_dir() else place
            for name, place in parse_retrieval_data(held_out).items()
        }
        named = "::".join(f"{name}={place}" for name, place in places.items())
        held = parse_sources(named, captions=PER_EPOCH, evaluation=True, split="test")
    return Sources((*training, *held), len(training))


def embed_tower(
    tower: Tower,
    sources: Sources,
    folder: Path,
    flags: AlignFlags | None = None,
    *,
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
) -> FeatureStore:
    """Make the features of sources by a tower that are not stored yet.

    Args:
        folder: ROWS.
        flags: precision, batch, workers and part of the work.
        say: is called with the line about their size.

    Raises:
        UserError: a tower that makes no numbers of a sample, data that cannot be read at all, features that cannot be written.
    """
    flags = flags or AlignFlags()
    batch_size, dtype = flags.encode_batch, getattr(torch, flags.dtype)
    frozen = tower.frozen(device)
    samples = SourceSamples(sources.opened, tower.side)
    name = re.sub(r"[^A-Za-z0-9]+", "-", tower.name)[-40:].strip("-")
    digest = frozen.fingerprints[tower.side][:16]
    place = folder / f"{tower.side}-{name}-{flags.dtype}-{digest}"
    store = FeatureStore(place, samples.contents, samples.counts)
    total = f"{store.begins[-1]:,} {'pictures' if tower.side == 'image' else 'captions'}"
    if not (missing := store.missing):
        say(f"{tower.name}: the features of its {total} are in {place}")
        return store
    left = sum(samples.counts[part] for part in missing)
    size = size_words(left * tower.width * dtype.itemsize)
    say(f"{tower.name}: {left:,} of {total} to encode, {size} in {place}")
    embed(
        store,
        frozen,
        samples,
        width=tower.width,
        dtype=dtype,
        identify=identity_of if tower.side == "image" else caption_identity,
        batch_size=batch_size,
        workers=flags.workers,
        share=flags.part,
        desc=tower.side,
    )
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
        """Take some of the pictures, by a mask (I,)."""
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
        """Count samples, held-out pairs, and samples that are left out, in a line."""
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
    """Make the pairs of some sources, with given sets, or a share of the pictures, held out.

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


def unit_scale(store: FeatureStore, wanted: np.ndarray) -> float:
    """Compute 1 / the root of the mean square of some wanted rows' entries.

    Features of any size thus train with one learning rate; the exported head takes the factor into its first layer.
    """
    some = store.take(np.sort(wanted[:: max(1, len(wanted) // 8192)])).float()
    return 1.0 / max(float(some.square().mean().sqrt()), 1e-12)


def shared_ids(stores: Sequence[FeatureStore]) -> np.ndarray:
    """Identify each picture, or each caption, with 0 where a tower has not seen it."""
    seen = np.logical_and.reduce([store.ids != 0 for store in stores])
    return np.where(seen, stores[0].ids, 0)


class Features:
    """Stored features on a device where they fit, else mapped, which an index reads as float32 on the device.

    Args:
        scale: by which all rows are multiplied.

    Attributes:
        mapped: whether they are too many for the memory.
    """

    def __init__(
        self, store: FeatureStore, scale: float, device: torch.device, room: int | None
    ) -> None:
        self._store, self.scale, self._device = store, scale, device
        self.width = store.width
        self.mapped = room is not None and store.size_bytes >= room
        self._held = None if self.mapped else torch.cat(list(store.blocks())).to(device)

    def __getitem__(self, index: Tensor) -> Tensor:
        """Read the rows of an index (b,) to the device: (b, F)."""
        if self._held is not None:
            return self._held.index_select(0, index).float().mul_(self.scale)
        # Each file is read in one direction.
        wanted, back = np.unique(index.cpu().numpy(), return_inverse=True)
        rows = self._store.take(wanted).to(self._device)[torch.from_numpy(back).to(self._device)]
        return rows.float().mul_(self.scale)


# ---------------------------------------------------------------------------------------------------------------------
# The order: the pairs of each step as a pure function of (seed, epoch)
# ---------------------------------------------------------------------------------------------------------------------


def epoch_order(
    sizes: Sequence[int],
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    names: Sequence[str] | None = None,
) -> np.ndarray:
    """Draw the samples of an epoch's T steps of N pairs, (T, N) numbers among all m.

    Each step mixes the sources. A source's samples are an endless cycle, of which an epoch takes the next stretch, in an order
    of its own: each sample at most once an epoch.

    Args:
        sizes: (S,) samples of each source, which lie one source after another.

    Raises:
        UserError: as `source_schedule`: an epoch without a step.
    """
    schedule = source_schedule(
        sizes, batch_size, strategy="random", seed=seed, epoch=epoch, names=names
    )
    begins = np.cumsum([0, *sizes])[:-1]
    taken = []
    for source, (size, begin, count) in enumerate(
        zip(sizes, schedule.begin, schedule.taken, strict=True)
    ):
        stretch = (begin + np.arange(count)) % size
        taken.append(
            begins[source] + stream(seed, Purpose.ALIGN_ORDER, epoch, source).permutation(stretch)
        )
    mixed = stream(seed, Purpose.ALIGN_ORDER, epoch, -1).permutation(np.concatenate(taken))
    return mixed.reshape(schedule.steps, batch_size)


def epoch_captions(first: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Choose the caption that each of m samples shows in an epoch: all of them in turn, from a place of its own on.

    Args:
        first: (m + 1,) where each sample's captions begin.
    """
    counts = np.diff(first)
    shift = stream(seed, Purpose.ALIGN_CAPTION).integers(0, 1 << 30, size=len(counts))
    return first[:-1] + (shift + epoch) % counts
