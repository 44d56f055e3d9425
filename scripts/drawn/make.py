"""Drawings of npm packages as sources: fetched, drawn, split, and written as shards.

A `DrawnData` (`emoji.EMOJI`) describes the data.
On disk (see docs/datasets.md):

    <source>/train-00000.tar ..., sizes.json, LICENSE      training pairs
    test/<source>/  val/<source>/                          the pairs held out of that source, for CLIP_benchmark
    test-across/<source>/  val-across/<source>/            every held-out concept as that source has it
    bert/                                                  vocabulary and configuration of a small text tower
    README.md, manifest.json                               the data card; the inputs of this data
"""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template
from tqdm import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.shards.tar import Sample, read_samples
from open_clip_zerovl.shards.writing import write_retrieval_set, write_shard, write_source
from scripts.drawn.data import SPLITS, Drawing, Drawings, DrawnData, Split
from scripts.drawn.drawings import is_blank, rasterise
from scripts.drawn.packages import fetch_npm_package
from scripts.drawn.vocabulary import write_bert

_CACHE = ".cache"
_MANIFEST = "manifest.json"


def prepare_drawn(
    data: DrawnData,
    out: str | Path,
    *,
    px: int = 64,
    seed: int = 0,
    shard_size: int = 256,
    held_out_per_source: int | None = None,
    vocab_size: int = 2048,
) -> dict[str, Any]:
    """Fetch, draw, split and write the data; nothing is done if it is complete and has these settings.

    Packages and drawn pictures are kept in `OUT/.cache`, so that a call after an interruption goes on. The data is written
    aside and moved into place when whole.

    Args:
        data: what to make.
        out: a new or empty folder, or one that this function wrote.
        px: width and height of the pictures, in pixels.
        seed: decides which concepts are held out and the order of the training samples.
        shard_size: training samples a shard, at most.
        held_out_per_source: pairs held out of each source for the test, and as many for validation; the data's own number
            where it is None.
        vocab_size: entries of the text tower's vocabulary, at most.

    Returns:
        The data card: settings, package versions, and per source counts, licence and example captions.

    Raises:
        UserError: a folder that holds other things, no npm, a package that cannot be fetched, or too few concepts for
            the split.
    """
    out = Path(out)
    held_out = data.held_out_per_source if held_out_per_source is None else held_out_per_source
    settings = {
        "px": px, "seed": seed, "shard_size": shard_size, "held_out_per_source": held_out, "vocab_size": vocab_size,
    }  # fmt: skip
    made_from = {
        "settings": settings,
        "packages": {k: str(p) for k, p in data.packages.items()},
    }
    fingerprint = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    manifest = _read_manifest(out)
    if manifest is not None and manifest["fingerprint"] == fingerprint and _is_whole(out, manifest):
        print(
            f"The {data.name} data in {out} is complete and made with these settings: nothing to do."
        )
        return manifest["card"]
    if out.is_dir() and any(out.iterdir()) and not (out / _CACHE).is_dir() and manifest is None:
        raise UserError(f"{out} is not empty and holds no {data.name} data: give a new folder.")
    (out / _CACHE).mkdir(parents=True, exist_ok=True)
    card = _build(data, out, settings, fingerprint)
    pairs = ", ".join(f"{source} {card['sources'][source]['train']}" for source in data.sources)
    print(f"The {data.name} data is in {out}. Training pairs: {pairs}. See {out / 'README.md'}.")
    return card


def write_pairs(data: DrawnData, out: str | Path, folder: Path) -> int:
    """Write the training pairs of `prepare_drawn` as pictures and `pairs.csv` (filepath, title, site); returns their number."""
    rows = [("filepath", "title", "site")]
    for source in data.sources:
        for sample in (
            one
            for shard in sorted((Path(out) / source).glob("*.tar"))
            for one in read_samples(shard)
        ):
            picture = Path("pictures", source, f"{sample.key}.png")
            (folder / picture).parent.mkdir(parents=True, exist_ok=True)
            (folder / picture).write_bytes(sample.files["png"])
            rows.append((str(picture), sample.files["txt"].decode(), source))
    with open(folder / "pairs.csv", "w", encoding="utf-8", newline="") as table:
        csv.writer(table).writerows(rows)
    return len(rows) - 1


def _build(
    data: DrawnData, out: Path, settings: Mapping[str, int], fingerprint: str
) -> dict[str, Any]:
    """Fetch, draw and split, and write everything to `out`; returns the data card."""
    cache = out / _CACHE
    bar = tqdm(data.packages.items(), desc="fetch packages", unit="package")
    tarballs = {key: fetch_npm_package(package, cache / "packages") for key, package in bar}
    drawings: Drawings = data.read(tarballs)
    pictures = {
        source: _draw(data, source, drawings[source], settings["px"], cache)
        for source in data.sources
    }
    # Pairs whose drawing comes out blank are left out, and counted.
    blank = {
        source: [c for c, png in pictures[source].items() if is_blank(png)]
        for source in data.sources
    }
    drawings = {
        source: {c: e for c, e in drawings[source].items() if c not in blank[source]}
        for source in data.sources
    }
    split = data.split(
        drawings, held_out_per_source=settings["held_out_per_source"], seed=settings["seed"]
    )
    staging = cache / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    counts = _write_all(data, staging, drawings, pictures, split, settings, tarballs)
    card = _data_card(data, settings, drawings, counts, split, blank)
    template = Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8")
    write_atomically(
        staging / "README.md",
        Template(template, keep_trailing_newline=True).render(data=data, **card),
    )
    _put_in_place(staging, out, {"fingerprint": fingerprint, "card": card})
    return card


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


def _draw(
    data: DrawnData, source: str, drawings: Mapping[str, Drawing], px: int, cache: Path
) -> dict[str, bytes]:
    """Concept -> PNG, kept in the cache as one tar a source."""
    packages = "+".join(
        data.packages[key].file_name.removesuffix(".tgz") for key in data.sources[source].packages
    )
    drawn = cache / "pictures" / f"{source}-{px}px-{packages}.tar"
    if not drawn.is_file():
        bar = tqdm(drawings.items(), desc=f"draw {source}", unit="picture")
        write_shard(drawn, (Sample(concept, {"png": rasterise(e.svg, px)}) for concept, e in bar))
    return {sample.key: sample.files["png"] for sample in read_samples(drawn)}


def _write_all(
    data: DrawnData,
    folder: Path,
    drawings: Drawings,
    pictures: Mapping[str, Mapping[str, bytes]],
    split: Split,
    settings: Mapping[str, int],
    tarballs: Mapping[str, Path],
) -> dict[str, dict[str, int]]:
    """Write shards, held-out sets, licences and the text tower; return counts per source."""
    held_out_in = {
        source: {concept: name for name in SPLITS for concept in split[name][source]}
        for source in drawings
    }  # concept -> split

    def sample(source: str, concept: str) -> Sample:
        entry = drawings[source][concept]
        held_out = held_out_in[source].get(concept)
        facts = {"concept": concept, "source": source, "group": entry.group, "held_out": held_out}
        files = {"png": pictures[source][concept], "txt": entry.caption.encode()}
        return Sample(
            f"{source}-{concept.lower()}",
            {**files, "json": json.dumps(facts, sort_keys=True).encode()},
        )

    counts: dict[str, dict[str, int]] = {}
    captions = []
    for i, (source, described) in enumerate(data.sources.items()):
        train = [
            concept for concept in sorted(drawings[source]) if concept not in held_out_in[source]
        ]
        captions += [drawings[source][concept].caption for concept in train]
        # Shuffled on disk, so that a shard is a random sample of its source.
        order = np.random.default_rng([settings["seed"], 1 + i]).permutation(len(train))
        shuffled = [sample(source, train[j]) for j in order]
        sizes = write_source(folder / source, shuffled, shard_size=settings["shard_size"])
        counts[source] = {"pairs": len(drawings[source]), "train": len(train), "shards": len(sizes)}
        sets = {name: split[name][source] for name in SPLITS}
        for name in SPLITS:
            every = sorted(concept for held in split[name].values() for concept in held)
            sets[f"{name}-across"] = [concept for concept in every if concept in drawings[source]]
        for name, concepts in sets.items():
            pairs = [sample(source, concept) for concept in concepts]
            counts[source][name.replace("-", "_")] = write_retrieval_set(
                folder / name / source, pairs
            )
        # The licence goes wherever the pictures go.
        for place in (folder, *(folder / name for name in sets)):
            write_atomically(
                place / source / "LICENSE", described.licence_text(data.packages, tarballs)
            )
    write_bert(folder / "bert", captions, vocab_size=settings["vocab_size"])
    return counts


def _data_card(
    data: DrawnData,
    settings: Mapping[str, int],
    drawings: Drawings,
    counts: Mapping[str, Mapping[str, int]],
    split: Split,
    blank: Mapping[str, list[str]],
) -> dict[str, Any]:
    """The facts of README.md (`card.md.j2`)."""
    shared = set.intersection(*(set(drawings[source]) for source in data.sources))
    held = {name: [c for concepts in own.values() for c in concepts] for name, own in split.items()}
    return {
        "settings": dict(settings),
        "packages": {key: str(package) for key, package in data.packages.items()},
        "sources": {
            source: {
                **counts[source],
                "blank": blank[source],
                "examples": {
                    c: drawings[source][c].caption for c in data.examples if c in drawings[source]
                },
            }
            for source in data.sources
        },
        "concepts_in_every_source": len(shared),
        "held_out_concepts": {name: len(own) for name, own in held.items()},
        "held_out_concepts_in_every_source": {
            name: len(shared.intersection(own)) for name, own in held.items()
        },
    }


def _read_manifest(out: Path) -> dict[str, Any] | None:
    path = out / _MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _is_whole(out: Path, manifest: Mapping[str, Any]) -> bool:
    """True if every file of the manifest exists and has its size."""
    return all(
        (out / name).is_file() and (out / name).stat().st_size == n
        for name, n in manifest["files"].items()
    )
