"""The demo's data: four emoji sets as four sources, which draw and caption the same concepts in different styles.

This is section 3.1 in small: sources differ in the style of their pictures and captions, so that in a batch of several sources
a model can tell pairs apart by their source instead of by their content.

On disk (see docs/data.md):

    <source>/train-00000.tar ..., sizes.json, LICENSE      training pairs
    test/<source>/  val/<source>/                          the pairs held out of that source, for CLIP_benchmark
    test-across/<source>/  val-across/<source>/            every held-out concept as that source has it
    bert/                                                  vocabulary and configuration of a small text tower
    README.md, manifest.json                               the data card; what this data was made from
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from open_clip_zerovl.datasets.drawings import is_blank, rasterise
from open_clip_zerovl.datasets.emoji_card import data_card
from open_clip_zerovl.datasets.emoji_sources import LICENCES, PACKAGES, SOURCES, Emoji, licence_text, read_sources
from open_clip_zerovl.datasets.fetch import fetch_npm_package
from open_clip_zerovl.datasets.vocabulary import write_bert
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.files import write_atomically
from open_clip_zerovl.tar.members import Sample, read_samples
from open_clip_zerovl.tar.shards import (
    read_retrieval_set,
    write_retrieval_set,
    write_shard,
    write_source,
)

SPLITS = ("test", "val")

#: Raised by one when the same packages and settings give other files than before.
_FORMAT = 1

_CACHE = ".cache"
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class EmojiSample:
    """One source's pair of a held-out concept.

    Attributes:
        group: the emoji's category.
        held_out: whether this pair is held out of its own source's training; False for the pair of another source.
    """

    image: Image.Image
    caption: str
    concept: str
    source: str
    group: str
    held_out: bool


def prepare_emoji(
    out: str | Path,
    *,
    px: int = 64,
    seed: int = 0,
    shard_size: int = 256,
    held_out_per_source: int = 200,
    vocab_size: int = 2048,
    progress: bool = True,
    force: bool = False,
) -> dict[str, Any]:
    """Fetch, draw, split and write the demo's data; nothing is done where it is complete and has these settings.

    Packages and drawn pictures are kept in `OUT/.cache`, so that a call after an interruption goes on. The data is written
    aside and moved into place when whole.

    Args:
        out: a new or empty folder, or one that this function wrote.
        px: width and height of the pictures, in pixels.
        seed: decides which concepts are held out and the order of the training samples.
        shard_size: training samples a shard, at most.
        held_out_per_source: pairs held out of each source for the test, and as many for validation.
        vocab_size: entries of the text tower's vocabulary, at most.
        progress: print progress bars and a last line.
        force: draw and write again even if nothing changed; packages are not fetched again.

    Returns:
        The data card: settings, package versions, and per source counts, licence and example captions.

    Raises:
        UserError: a setting out of range, a folder that holds other things, no npm, a package that cannot be fetched,
            or too few concepts for the split.
    """
    out = Path(out)
    settings = {
        "px": px,
        "seed": seed,
        "shard_size": shard_size,
        "held_out_per_source": held_out_per_source,
        "vocab_size": vocab_size,
    }
    _check_settings(settings)
    fingerprint = _fingerprint(settings)
    manifest = _read_manifest(out)
    if not force and manifest is not None and manifest["fingerprint"] == fingerprint and _is_whole(out, manifest):
        if progress:
            print(f"The emoji data in {out} is complete and made with these settings: nothing to do.")
        return manifest["card"]
    _check_ours(out)
    (out / _CACHE).mkdir(parents=True, exist_ok=True)
    if force:
        shutil.rmtree(out / _CACHE / "pictures", ignore_errors=True)
    card = _build(out, settings, fingerprint, progress)
    if progress:
        pairs = ", ".join(f"{source} {card['sources'][source]['train']}" for source in SOURCES)
        print(f"The emoji data is in {out}. Training pairs: {pairs}. See {out / 'README.md'}.")
    return card


def _build(out: Path, settings: Mapping[str, int], fingerprint: str, progress: bool) -> dict[str, Any]:
    """Fetch, draw and split the emoji, and write everything to `out`; returns the data card."""
    cache, px = out / _CACHE, settings["px"]
    tarballs = _fetch_packages(cache / "packages", progress)
    emoji = read_sources(tarballs)
    pictures = {source: _draw(source, emoji[source], px, cache, progress) for source in SOURCES}
    # Pairs whose drawing comes out blank are left out, and counted.
    blank = {source: [c for c, png in pictures[source].items() if is_blank(png)] for source in SOURCES}
    emoji = {source: {c: e for c, e in emoji[source].items() if c not in blank[source]} for source in SOURCES}
    split = split_concepts(emoji, held_out_per_source=settings["held_out_per_source"], seed=settings["seed"])
    staging = cache / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    counts = _write_all(staging, emoji, pictures, split, settings, tarballs)
    card = data_card(settings, emoji, counts, split, blank)
    write_atomically(staging / "README.md", card.pop("text"))
    _put_in_place(staging, out, {"fingerprint": fingerprint, "card": card})
    return card


def _check_settings(settings: Mapping[str, int]) -> None:
    """UserError for a setting out of range."""
    for name, value in settings.items():
        least = 0 if name == "seed" else 1
        if value < least:
            raise UserError(f"{name} is {value}: it must be {least} or more.")


def _fetch_packages(folder: Path, progress: bool) -> dict[str, Path]:
    """The tarball of each package of PACKAGES."""
    tarballs = {}
    bar = tqdm(PACKAGES.items(), desc="fetch packages", unit="package", disable=not progress)
    for key, package in bar:
        bar.set_postfix_str(str(package))
        tarballs[key] = fetch_npm_package(package, folder)
    return tarballs


def _put_in_place(staging: Path, out: Path, manifest: dict[str, Any]) -> None:
    """Move everything in `staging` to `out`, then write the manifest with the files' sizes.

    While files are moved there is no manifest, so that a killed call leaves data that counts as incomplete.
    """
    files = {
        path.relative_to(staging).as_posix(): path.stat().st_size
        for path in sorted(staging.rglob("*"))
        if path.is_file()
    }
    (out / _MANIFEST).unlink(missing_ok=True)
    for path in sorted(staging.iterdir()):
        if (out / path.name).is_dir():
            shutil.rmtree(out / path.name)
        path.replace(out / path.name)
    staging.rmdir()
    write_atomically(out / _MANIFEST, json.dumps({**manifest, "files": files}, indent=1) + "\n")


def split_concepts(
    concepts: Mapping[str, Mapping[str, Any]], *, held_out_per_source: int, seed: int
) -> dict[str, dict[str, list[str]]]:
    """Choose which concepts each source holds out: `{"test" | "val": {source: [concept, ...]}}`.

    A concept is held out of one source and for one split at most; it stays in the training sets of the other sources. Test
    concepts exist in every source, so that each can be retrieved across sources. Validation takes the remaining ones of these,
    the smallest source first; where they run out, a source takes concepts that only some sources have.

    The result depends on the arguments only, not on the order of the mappings.

    Raises:
        UserError: the sources do not hold enough concepts.
    """
    sources = sorted(concepts, key=lambda source: (len(concepts[source]), source))
    shared = set.intersection(*(set(concepts[source]) for source in sources))
    rng = np.random.default_rng(seed)
    order = [str(c) for c in rng.permutation(sorted(shared))]
    others = [str(c) for c in rng.permutation(sorted(set().union(*concepts.values()) - shared))]
    wanted = held_out_per_source * len(sources)
    if len(order) < wanted:
        raise UserError(
            f"The test set needs {wanted} concepts that all sources have, and there are {len(order)}: "
            "lower held_out_per_source."
        )
    split: dict[str, dict[str, list[str]]] = {"test": {}, "val": {}}
    for name in SPLITS:
        for source in sources:
            chosen, order = order[:held_out_per_source], order[held_out_per_source:]
            missing = held_out_per_source - len(chosen)
            # A concept that only this source has would leave nothing to compare across sources.
            extra = [c for c in others if c in concepts[source] and sum(c in concepts[s] for s in sources) > 1][
                :missing
            ]
            if len(extra) < missing:
                raise UserError(
                    f"The {name} set needs {held_out_per_source} concepts of {source} that another source has too, "
                    f"and there are {len(chosen) + len(extra)} left: lower held_out_per_source."
                )
            others = [c for c in others if c not in extra]
            split[name][source] = sorted(chosen + extra)
    return split


def load_emoji_split(out: str | Path, split: str) -> dict[str, list[EmojiSample]]:
    """Source -> its pairs of all held-out concepts of a split, sorted by concept.

    Of 800 held-out concepts, 200 are held out of each source (`EmojiSample.held_out`). A source's pairs of the other 600 are in
    its training set; they are the partners for retrieval across sources. In `val` a source may lack a few concepts.

    Args:
        out: the folder written by `prepare_emoji`.
        split: "test" or "val".

    Raises:
        UserError: another split, or a folder without this data.
    """
    if split not in SPLITS:
        raise UserError(f"The split {split!r} is unknown: take one of {', '.join(SPLITS)}.")
    samples: dict[str, list[EmojiSample]] = {}
    for source in SOURCES:
        samples[source] = []
        for sample in read_retrieval_set(Path(out) / f"{split}-across" / source):
            facts = json.loads(sample.files["json"])
            image = Image.open(io.BytesIO(sample.files["png"])).convert("RGB")
            caption = sample.files["txt"].decode().strip()
            samples[source].append(
                EmojiSample(image, caption, facts["concept"], source, facts["group"], facts["held_out"] == split)
            )
    return samples


def _fingerprint(settings: Mapping[str, int]) -> str:
    made_from = {"format": _FORMAT, "settings": settings, "packages": {k: str(p) for k, p in PACKAGES.items()}}
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _read_manifest(out: Path) -> dict[str, Any] | None:
    path = out / _MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _is_whole(out: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether every file of the manifest exists and has its size."""
    return all((out / name).is_file() and (out / name).stat().st_size == n for name, n in manifest["files"].items())


def _check_ours(out: Path) -> None:
    """UserError for a folder with anything that this module did not write."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give a folder for the emoji data.")
    if out.is_dir() and any(out.iterdir()) and not (out / _CACHE).is_dir() and not (out / _MANIFEST).is_file():
        raise UserError(f"{out} is not empty and holds no emoji data: give a new folder.")


def _draw(source: str, emoji: Mapping[str, Emoji], px: int, cache: Path, progress: bool) -> dict[str, bytes]:
    """Concept -> PNG, kept in the cache as one tar a source."""
    packages = "+".join(PACKAGES[key].file_name.removesuffix(".tgz") for key in LICENCES[source].packages)
    drawn = cache / "pictures" / f"{source}-{px}px-format{_FORMAT}-{packages}.tar"
    if not drawn.is_file():
        bar = tqdm(emoji.items(), desc=f"draw {source}", unit="picture", disable=not progress)
        write_shard(drawn, (Sample(concept, {"png": rasterise(e.svg, px)}) for concept, e in bar))
    return {sample.key: sample.files["png"] for sample in read_samples(drawn)}


def _write_all(
    folder: Path,
    emoji: Mapping[str, Mapping[str, Emoji]],
    pictures: Mapping[str, Mapping[str, bytes]],
    split: Mapping[str, Mapping[str, list[str]]],
    settings: Mapping[str, int],
    tarballs: Mapping[str, Path],
) -> dict[str, dict[str, int]]:
    """Write shards, held-out sets, licences and the text tower; return counts per source."""
    held_out_in = {
        source: {concept: name for name in SPLITS for concept in split[name][source]} for source in emoji
    }  # concept -> split

    def sample(source: str, concept: str) -> Sample:
        entry = emoji[source][concept]
        facts = {
            "concept": concept,
            "source": source,
            "group": entry.group,
            "held_out": held_out_in[source].get(concept),
        }
        return Sample(
            f"{source}-{concept.lower()}",
            {
                "png": pictures[source][concept],
                "txt": entry.caption.encode(),
                "json": json.dumps(facts, sort_keys=True).encode(),
            },
        )

    counts: dict[str, dict[str, int]] = {}
    captions = []
    for i, source in enumerate(SOURCES):
        train = [concept for concept in sorted(emoji[source]) if concept not in held_out_in[source]]
        captions += [emoji[source][concept].caption for concept in train]
        # Shuffled on disk, so that a shard is a random sample of its source.
        order = np.random.default_rng([settings["seed"], 1 + i]).permutation(len(train))
        sizes = write_source(
            folder / source, [sample(source, train[j]) for j in order], shard_size=settings["shard_size"]
        )
        licence = licence_text(source, tarballs)
        write_atomically(folder / source / "LICENSE", licence)
        counts[source] = {"pairs": len(emoji[source]), "train": len(train), "shards": len(sizes)}
        for name in SPLITS:
            every = sorted(concept for held in split[name].values() for concept in held)
            have = [sample(source, concept) for concept in every if concept in emoji[source]]
            own = [sample(source, concept) for concept in split[name][source]]
            counts[source][name] = write_retrieval_set(folder / name / source, own)
            counts[source][f"{name}_across"] = write_retrieval_set(folder / f"{name}-across" / source, have)
            # The licence goes wherever the pictures go.
            write_atomically(folder / name / source / "LICENSE", licence)
            write_atomically(folder / f"{name}-across" / source / "LICENSE", licence)
    write_bert(folder / "bert", captions, vocab_size=settings["vocab_size"])
    return counts
