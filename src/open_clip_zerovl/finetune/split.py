"""Holds pictures out of a fine-tuning: all samples of a picture are on one side.

OUT/data/pictures/CONTENT.npz         the identity of each sample's picture (`data.splits`), for a later call
OUT/data/excluded.npy                 the identities of the pictures that are not trained on
OUT/data/rest/NAME-DIGEST/            the shards of a source without the samples whose pictures are held out
OUT/data/held-out/test/0.tar ...      where no held-out set was given: a part of the pictures with all their captions, in
                                      CLIP_benchmark's layout
OUT/data/split.json                   written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import Say, UserError
from open_clip_zerovl.core.files import (
    atomic_file,
    digest_of,
    read_arrays,
    scratch_folder,
    write_atomically,
)
from open_clip_zerovl.core.processes import usable_cores
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.data.names import CLASS_NAMES, PER_EPOCH, TEMPLATES
from open_clip_zerovl.data.reader import samples_of
from open_clip_zerovl.data.sets import IndexedSet
from open_clip_zerovl.data.sources import Source, content_of_source, parse_sources
from open_clip_zerovl.data.splits import (
    Identities,
    as_keys,
    draw_held_out,
    identity_of,
    seen_sentence,
    trained_on,
)
from open_clip_zerovl.finetune.data import (
    DATA_FLAG,
    HELD_OUT,
    HELD_OUT_FLAG,
    SOURCES,
    DataArguments,
    open_sources,
)
from open_clip_zerovl.finetune.request import SOURCE_WEIGHTS, FinetuneRequest
from open_clip_zerovl.shards.files import SIZES_FILE, write_retrieval_set, write_shard
from open_clip_zerovl.shards.pictures import BadPicture
from open_clip_zerovl.shards.tar import Sample

SPLIT_FILE, EXCLUDED_FILE = "split.json", "excluded.npy"
HELD_OUT_SHARE = 0.1  # of the pictures
_AT_ONCE = 256  # pictures in memory
_ANNOUNCED = 2_000  # pictures from which on their decoding is announced


@dataclass(frozen=True)
class Split:
    """Training data and held-out sets of a fine-tuning.

    Attributes:
        sources: flag -> its training data, without the samples whose pictures are held out or scored.
        new: the held-out sets, as `parse_retrieval_data` reads them.
        held_out: the identities of their pictures.
        trained: of the pictures that are trained on; None if they were not looked at.
        notes: sentences for the report.
    """

    sources: Mapping[str, str]
    new: str
    held_out: Identities
    trained: Identities | None
    notes: tuple[str, ...]

    @property
    def train_data(self) -> str:
        """Return the data of --data."""
        return self.sources[DATA_FLAG]


def hold_out(
    arguments: DataArguments,
    out: Path,
    *,
    seed: int,
    model: str,
    share: float = HELD_OUT_SHARE,
    role: str = "held-out",
    begun: bool = False,
    compare: bool = True,
    say: Say = lambda line: None,
) -> Split:
    """Hold the pictures of every set that is scored out of the training data, and a share of --data if no set is given for it.

    Args:
        out: folder of the lists.
        model: the starting model; pictures on which it was trained are not drawn.
        role: of the held-out pictures, in notes.
        begun: the training has begun, so that the pictures stay out that an earlier call has left out, and no others.
        compare: False trains on pictures of given sets, too.

    Raises:
        UserError: too few pictures, two sources of one name, or data that cannot be read.
    """
    scored = {name: set_identities(dataset, out) for name, dataset in arguments.scored().items()}
    sources = {flag: text for flag, text in arguments.given.items() if flag in SOURCES}
    new = arguments.held_out
    held_out = [rows for name, rows in scored.items() if name.startswith(HELD_OUT_FLAG)]
    if new and not compare:
        return Split(sources, new, np.concatenate(held_out), None, ())
    identities = source_identities(open_sources("::".join(sources.values())), out, say)
    seen, notes = trained_on([model]), []
    if not new:
        to_draw_from = open_sources(sources[DATA_FLAG])
        pictures = np.concatenate([identities[source.name] for source in to_draw_from])
        drawn = draw_held_out(pictures, seed=seed, share=share, trained_on=seen)
        new, held_out = _write_held_out(to_draw_from, identities, drawn, out), [drawn]
        scored[HELD_OUT_FLAG] = drawn
        notes.append(
            f"{role.capitalize()} pictures: {len(drawn):,} of the data, by their pixels and seed {seed}."
        )
    pictures_to_score = np.concatenate([*scored.values()])
    excluded = _excluded(pictures_to_score, out, begun)
    left_out = {
        name: np.flatnonzero((rows != 0) & np.isin(rows, excluded))
        for name, rows in identities.items()
    }
    count = sum(map(len, left_out.values()))
    if count and arguments.held_out:
        notes.append(f"Left out: {count:,} samples, whose pictures are in the sets to score.")
    if sentence := seen_sentence(pictures_to_score, seen, model, role):
        notes.append(f"{sentence}.")
    trained = np.unique(
        np.concatenate([np.delete(rows, left_out[name]) for name, rows in identities.items()])
    )
    for name, rows in scored.items():
        if sentence := seen_sentence(rows, trained, "The model of this folder"):
            notes.append(f"{name}: {sentence}.")
    rest = {flag: _rest_of(text, left_out, out, say) for flag, text in sources.items()}
    return Split(rest, new, np.concatenate(held_out), trained, tuple(notes))


def _excluded(scored: Identities, out: Path, begun: bool) -> Identities:
    """Keep the pictures on disk that a training has left out."""
    file = out / EXCLUDED_FILE
    if begun:
        return np.load(file) if file.is_file() else np.empty(0, np.int64)
    with atomic_file(file) as content:
        np.save(content, np.unique(scored))
    return scored


def _rest_of(data: str, left_out: Mapping[str, np.ndarray], out: Path, say: Say) -> str:
    """Write the shards of sources that lose samples anew, and leave components that lose none as they are."""
    components = []
    for component in data.split("::"):
        sources = open_sources(component)
        if any(len(left_out[source.name]) for source in sources):
            components += [
                f"{source.name}={_write_rest(source, left_out[source.name], out, say)}"
                for source in sources
            ]
        else:
            components.append(component)
    return "::".join(components)


def _write_rest(source: Source, left_out: np.ndarray, out: Path, say: Say) -> Path:
    """Write a source without some samples, unless an earlier call has, and return its folder.

    Raises:
        UserError: no sample is left.
    """
    count = source.num_samples - len(left_out)
    if not count:
        raise UserError(
            f"all pictures of source {source.name!r} are held out; give it more pictures, or leave the source out"
        )
    place = out / "rest" / f"{source.name}-{digest_of(content_of_source(source), left_out)[:12]}"
    if place.is_dir():
        return place
    say(f"writing the {count:,} samples of {source.name} that are trained on into {place}")
    is_trained_on = np.ones(source.num_samples, bool)
    is_trained_on[left_out] = False
    place.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(place.parent, ".writing-") as scratch:
        folder, sizes = scratch / place.name, {}
        shard_of = np.repeat(np.arange(len(source.sizes)), source.sizes)
        rest = _numbered(source, is_trained_on)
        for shard, of_shard in groupby(rest, lambda numbered: shard_of[numbered[0]]):
            # a foreign tar may have a key twice
            samples = (Sample(f"{number:08d}", each.files) for number, each in of_shard)
            name = f"{shard:05d}.tar"
            sizes[name] = write_shard(folder / name, samples)
        write_atomically(folder / SIZES_FILE, json.dumps(sizes))
        _copy_classes([source], folder)
        folder.rename(place)
    return place


# ---------------------------------------------------------------------------------------------------------------------
# Identities
# ---------------------------------------------------------------------------------------------------------------------


def source_identities(
    sources: Sequence[Source], out: Path, say: Say = lambda line: None
) -> dict[str, Identities]:
    """Identify each sample's picture, source by source, with 0 where there is no picture or no caption.

    Raises:
        UserError: a shard or table that cannot be read.
    """

    def identity(sample: Sample) -> int:
        if sample.image is None or not sample.captions:
            return 0
        try:
            return identity_of(decode_image(sample.image))
        except BadPicture:
            return 0

    return {
        source.name: _identities(
            content_of_source(source), out, source.num_samples, _announced(source, say), identity
        )
        for source in sources
    }


def set_identities(dataset: IndexedSet, out: Path) -> Identities:
    """Identify a set's pictures.

    Raises:
        UserError: a picture that cannot be read.
    """
    return _identities(
        dataset.content(),
        out,
        len(dataset),
        enumerate(range(len(dataset))),
        lambda number: identity_of(dataset.image(number)),
    )


def _identities(
    content: str,
    out: Path,
    count: int,
    numbered: Iterable[tuple[int, Any]],
    identity: Callable[[Any], int],
) -> Identities:
    """Read the identities (n,) that an earlier call has stored for the same content, else make them.

    Args:
        numbered: (number, thing) of the things with an identity, which the others, 0, have not.
    """
    file = out / "pictures" / f"{content}.npz"
    with suppress(OSError, ValueError, KeyError):  # absent, or damaged: its zip has checksums
        return read_arrays(file)["identities"]
    identities, things = np.zeros(count, np.int64), iter(numbered)
    with ThreadPoolExecutor(usable_cores()) as pool:
        while block := dict(islice(things, _AT_ONCE)):
            identities[[*block]] = [*pool.map(identity, block.values())]
    with atomic_file(file) as handle:
        np.savez(handle, identities=identities)
    return identities


def _announced(source: Source, say: Say) -> Iterator[tuple[int, Sample]]:
    if source.num_samples >= _ANNOUNCED:
        say(f"comparing the pictures of {source.name} ({source.num_samples:,} samples)")
    yield from _numbered(source)


def _numbered(source: Source, wanted: np.ndarray | None = None) -> Iterator[tuple[int, Sample]]:
    """Yield the samples of a source with their numbers.

    Args:
        wanted: (n,) mask of the samples to yield; None for all.
    """
    for shard, begin in enumerate(source.starts[:-1].tolist()):
        end = begin + source.sizes[shard]
        if wanted is None or wanted[begin:end].any():
            for number, sample in zip(range(begin, end), samples_of(source, shard), strict=False):
                if wanted is None or wanted[number]:
                    yield number, sample


# ---------------------------------------------------------------------------------------------------------------------
# The held-out set
# ---------------------------------------------------------------------------------------------------------------------


def _write_held_out(
    sources: Sequence[Source], identities: Mapping[str, Identities], drawn: Identities, out: Path
) -> str:
    """Write the pictures that were drawn, with the captions of all their samples, or find those of an earlier call."""
    sets, file = f"{HELD_OUT}={out / HELD_OUT}", out / SPLIT_FILE
    keys = as_keys(drawn)
    made_of = digest_of(keys, [content_of_source(source) for source in sources])
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("of") == made_of:
        return sets
    shutil.rmtree(out / HELD_OUT, ignore_errors=True)  # of a call that was killed
    pictures: dict[int, bytes] = {}
    labels: dict[int, dict[str, bytes]] = {}
    captions: dict[int, dict[str, None]] = {}
    for source in sources:
        rows = identities[source.name]
        for row, sample in _numbered(source, np.isin(rows, drawn)):
            pictures[rows[row]] = sample.image or b""
            captions.setdefault(rows[row], {}).update(dict.fromkeys(sample.captions))
            if "cls" in sample.files:
                labels[rows[row]] = {"cls": sample.files["cls"]}
    samples = []
    for key, identity in zip(keys, drawn.tolist(), strict=True):
        text = {"txt": "\n".join(captions[identity]).encode()}
        picture = {_suffix(pictures[identity]): pictures[identity]}
        samples.append(Sample(key, {**picture, **text, **labels.get(identity, {})}))
    write_retrieval_set(out / HELD_OUT, samples)
    _copy_classes(sources, out / HELD_OUT)
    write_atomically(file, json.dumps({"of": made_of, "held_out": keys}, indent=1) + "\n")
    return sets


def _copy_classes(sources: Sequence[Source], folder: Path) -> None:
    """Copy the names and templates of classes into a folder if all sources share them."""
    places = [source.class_folder for source in sources]
    names = {None if place is None else (place / CLASS_NAMES).read_bytes() for place in places}
    if len(names) > 1 or places[0] is None:
        return
    for file in (CLASS_NAMES, TEMPLATES):
        if (places[0] / file).is_file():
            shutil.copyfile(places[0] / file, folder / file)


def _suffix(picture: bytes) -> str:
    """Find the suffix of a picture's format, by its first bytes."""
    if picture.startswith(b"\x89PNG"):
        return "png"
    return "webp" if picture[:4] == b"RIFF" and picture[8:12] == b"WEBP" else "jpg"


@dataclass(frozen=True)
class Prepared:
    """Inputs of the training.

    Attributes:
        arguments: all data arguments.
        before: the model as a folder.
        train_data: for `--train-data`.
        split: the held-out sets, and the pictures of both sides.
        sources: opened.
        notes: sentences for the report.
        factors: for `--train-data-upsampling-factors`: a weight for each source of old pairs.
    """

    arguments: DataArguments
    before: str
    train_data: str
    split: Split
    sources: tuple[Source, ...]
    notes: tuple[str, ...]
    factors: str | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Old pairs beside the new ones: new (weight 1) + old (weight w), share = w * old / (new + w * old)
# ---------------------------------------------------------------------------------------------------------------------


def check_keeping(request: FinetuneRequest) -> None:
    """Refuse --keep flags that contradict each other or training flags.

    Raises:
        UserError: they do.
    """
    if request.keep_share is not None and request.keep_data is None:
        raise UserError(
            f"--keep-share {request.keep_share:g} needs --keep-data NAME=SHARDS, the old pairs"
        )
    if request.keep_data is not None and SOURCE_WEIGHTS in request.given:
        raise UserError(
            f"--set {SOURCE_WEIGHTS} and --keep-share both decide the weights of the sources; give one of them"
        )


def with_old_pairs(
    request: FinetuneRequest, train_data: str, old_data: str | None
) -> tuple[tuple[Source, ...], str, str | None, list[str]]:
    """Add --keep-data to the new pairs.

    The samples are those of the training: with --set captions=all each caption of a picture is one.

    Returns:
        The sources, `--train-data`, `--train-data-upsampling-factors`, and how many old pairs there are and what they cost.

    Raises:
        UserError: old pairs that cannot be opened, or with the name of a new source.
    """
    captions = request.given.get("captions", PER_EPOCH)
    new = parse_sources(train_data, captions=captions)
    if old_data is None:
        return new, train_data, None, []
    old = parse_sources(old_data, captions=captions)
    share, samples = request.share_kept, sum(source.num_samples for source in new)
    weight = share / (1 - share) * samples / sum(source.num_samples for source in old)
    factors = "::".join(f"{source.name}={weight!r}" for source in old)
    both = f"{train_data}::{old_data}"
    counts = {source.name: source.num_samples * weight for source in old}
    shown = ", ".join(f"{count:,.0f} of {name}" for name, count in counts.items())
    note = (
        f"An epoch has {samples:,} new pairs and {share:.0%} old ones ({shown}): "
        f"{1 + sum(counts.values()) / samples:.2f} times the samples."
    )
    return parse_sources(both, factors, captions=captions), both, factors, [note]
