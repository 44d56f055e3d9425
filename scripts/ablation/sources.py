"""Sources that only some conditions have: two contexts (A.5), clusters (A.6), repeated captions, mixtures; and teachers."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.shards.members import Sample, read_samples
from open_clip_zerovl.shards.writing import write_source
from scripts.paper.context_bias import caption_length, with_frame

CONTEXT_SOURCE = "twemoji"  # keyword lists of 1 to 13 words: the widest spread of caption lengths
CONTEXTS = ("long", "short")
FRAME_PX = 4  # pictures are 64 px wide
VIEWS = 4  # of each picture, for teachers
MIXTURES = ("apart", "alike", "large")


def pairs_of(data: Path, source: str) -> list[Sample]:
    """A source's pairs in the order of its shards. UserError if there are none."""
    shards = sorted((data / source).glob("*.tar"))
    if not shards:
        raise UserError(
            f"{data / source} holds no shards; write them with `python -m scripts.drawn emoji --out {data}`"
        )
    return [pair for shard in shards for pair in read_samples(shard)]


def write_contexts(data: Path, out: Path) -> None:
    """Writes one source in two halves, `OUT/long` with frames and `OUT/short` without, unless they exist.

    `OUT/context.json` holds the length from which on a caption is long.
    """
    if (out / "context.json").is_file():
        return
    pairs = pairs_of(data, CONTEXT_SOURCE)  # shuffled on disk: their order is kept
    lengths = {pair.key: caption_length(_caption(pair)) for pair in pairs}
    longer = sorted(lengths, key=lambda key: (lengths[key], key))[len(pairs) // 2 :]
    halves = {
        "long": [_framed_pair(pair) for pair in pairs if pair.key in {*longer}],
        "short": [pair for pair in pairs if pair.key not in {*longer}],
    }
    for context, half in halves.items():
        write_source(out / context, half, shard_size=256)
    write_atomically(out / "context.json", json.dumps({"long_from": lengths[longer[0]]}) + "\n")


def _caption(pair: Sample) -> str:
    return pair.files["txt"].decode().strip()


def _framed_pair(pair: Sample) -> Sample:
    buffer = io.BytesIO()
    with_frame(Image.open(io.BytesIO(pair.files["png"])), FRAME_PX).save(buffer, "PNG")
    return Sample(pair.key, {**pair.files, "png": buffer.getvalue()})


def write_groups(data: Path, out: Mapping[str, Path]) -> None:
    """Writes sources again, each into its folder unless it exists: half of the captions are the name of the picture's group.

    Every second pair in the order of the keys keeps its own caption. A group is one of about ten ("Food & Drink"), so that a
    batch holds the same caption several times.
    """
    for source, folder in out.items():
        if (folder / "sizes.json").is_file():
            continue
        pairs = pairs_of(data, source)
        renamed = set(sorted(pair.key for pair in pairs)[::2])
        write_source(
            folder,
            [_with_group(pair) if pair.key in renamed else pair for pair in pairs],
            shard_size=256,
        )


def _with_group(pair: Sample) -> Sample:
    group = json.loads(pair.files["json"])["group"]
    return Sample(pair.key, {**pair.files, "txt": group.encode()})


def write_mixture(data: Path, kind: str, sources: Sequence[str], out: Mapping[str, Path]) -> None:
    """Writes a mixture of known construction, each of its sources into its folder unless it exists.

    Args:
        kind: "apart": each source keeps its share of the concepts and has none in common with another; "alike": one source in
            parts of other groups of pictures, of one style; "large": the first source whole, of each other one pair in 18.
        sources: the miniature's sources that it is made of.
        out: the mixture's sources, and their folders.
    """
    for place, (name, folder) in enumerate(out.items()):
        if (folder / "sizes.json").is_file():
            continue
        pairs = pairs_of(data, sources[0] if kind == "alike" else name)
        if kind == "large":
            few = set(sorted(pair.key for pair in pairs)[::18])
            kept = [pair for pair in pairs if place == 0 or pair.key in few]
        else:
            of = {
                pair.key: json.loads(pair.files["json"])["group" if kind == "alike" else "concept"]
                for pair in pairs
            }
            kept = [pair for pair in pairs if zlib.crc32(of[pair.key].encode()) % len(out) == place]
        write_source(folder, kept, shard_size=256)


def write_clusters(
    data: Path, sources: Sequence[str], checkpoint: Path, out: Path, choice: str, *, seed: int
) -> None:
    """Runs `zerovl cluster` on the union of the sources, with a checkpoint's features; replaces an earlier result.

    Args:
        choice: `image-8` is eight clusters of image features.

    Raises:
        UserError: the command fails.
    """
    features, count = choice.split("-")
    union = out.with_name(f"{out.name}-union")
    for folder in (out, union):
        shutil.rmtree(folder, ignore_errors=True)
    sizes: dict[str, int] = {}
    union.mkdir(parents=True)
    for source in sources:
        for name, size in json.loads(
            (data / source / "sizes.json").read_text(encoding="utf-8")
        ).items():
            sizes[f"{source}-{name}"] = size
            (union / f"{source}-{name}").symlink_to((data / source / name).resolve())
    write_atomically(union / "sizes.json", json.dumps(sizes, indent=1) + "\n")
    try:
        _zerovl(
            "cluster", str(checkpoint), "--data", f"emoji={union}", "--out", str(out), "--features", features,
            "--clusters", count, "--reshard", "--preview", "0", "--seed", str(seed), "--device", "cpu",
        )  # fmt: skip
    finally:
        shutil.rmtree(union, ignore_errors=True)


def shared_information(out: Path) -> float:
    """Normalised mutual information of the clusters of `write_clusters` and the sources, 0 (unrelated) to 1 (the same)."""
    from sklearn.metrics import normalized_mutual_info_score

    pairs = [
        (folder.name, json.loads(sample.files["json"])["source"])
        for folder in sorted(out.glob("cluster-*"))
        for shard in sorted(folder.glob("*.tar"))
        for sample in read_samples(shard)
    ]
    clusters, sources = zip(*pairs, strict=True)
    return float(normalized_mutual_info_score(sources, clusters))


def write_embeddings(
    checkpoint: Path, train_data: str, out: Path, *, aug_cfg: Sequence[str], seed: int
) -> None:
    """Runs `zerovl teacher` with one teacher on views of the student's augmentation; replaces an earlier result.

    Raises:
        UserError: the command fails.
    """
    shutil.rmtree(out, ignore_errors=True)
    _zerovl(
        "teacher", str(checkpoint), "--train-data", train_data, "--out", str(out), "--views", str(VIEWS),
        "--image-size", "32", "--aug-cfg", *aug_cfg, "--seed", str(seed), "--device", "cpu",
    )  # fmt: skip


def _zerovl(command: str, *arguments: str) -> None:
    """One command of the tool in a process of its own, with one thread. UserError with its last line if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "open_clip_zerovl.cli", command, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise UserError(
            f"zerovl {command} ended with status {done.returncode}: {words[-1] if words else 'no message'}"
        )
