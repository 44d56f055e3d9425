"""What the ablation makes of its data: two contexts of a source (A.5), clusters (A.6), repeated captions, teachers."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.evaluate.bias.pools import SourceFeatures
from open_clip_zerovl.evaluate.retrieval.metrics import retrieval_metrics
from open_clip_zerovl.shards.members import Sample, read_samples
from open_clip_zerovl.shards.writing import write_source
from scripts.drawn.make import DrawnSample
from scripts.emoji.runs import Encoder, Pool, signs_of_bias
from scripts.paper.context_bias import caption_length, with_frame

CONTEXT_SOURCE = "twemoji"  # keyword lists of 1 to 13 words: the widest spread of caption lengths
CONTEXTS = ("long", "short")
FRAME_PX = 4  # pictures are 64 px wide


# ---------------------------------------------------------------------------------------------------------------------
# A.5: two contexts
# ---------------------------------------------------------------------------------------------------------------------


def context_data(out: Path) -> str:
    """The `--train-data` value for the sources of `write_contexts`."""
    return "::".join(f"{context}={out / context}" for context in CONTEXTS)


def write_contexts(data: Path, out: Path) -> None:
    """Writes one source in two halves, `OUT/long` with frames and `OUT/short` without, unless they exist."""
    if (out / "context.json").is_file():
        return
    pairs = pairs_of(data, CONTEXT_SOURCE)  # shuffled on disk: their order is kept
    by_length = sorted(range(len(pairs)), key=lambda i: (caption_length(_caption(pairs[i])), pairs[i].key))
    longer = set(by_length[len(pairs) // 2 :])
    halves: Mapping[str, list[Sample]] = {
        "long": [_framed_pair(pair) for i, pair in enumerate(pairs) if i in longer],
        "short": [pair for i, pair in enumerate(pairs) if i not in longer],
    }
    for context, half in halves.items():
        write_source(out / context, half, shard_size=256)
    shortest = min(caption_length(_caption(pairs[i])) for i in longer)
    facts = {"source": CONTEXT_SOURCE, "pairs": {c: len(half) for c, half in halves.items()}, "long_from": shortest}
    write_atomically(out / "context.json", json.dumps(facts) + "\n")


def pairs_of(data: Path, source: str) -> list[Sample]:
    """A source's pairs in the order of its shards. UserError where there are none."""
    shards = sorted((data / source).glob("*.tar"))
    if not shards:
        raise UserError(
            f"{data / source} holds no shards; write them with `python -m scripts.drawn emoji --out {data}`"
        )
    return [pair for shard in shards for pair in read_samples(shard)]


def _caption(pair: Sample) -> str:
    return pair.files["txt"].decode().strip()


def _framed_pair(pair: Sample) -> Sample:
    buffer = io.BytesIO()
    with_frame(Image.open(io.BytesIO(pair.files["png"])), FRAME_PX).save(buffer, "PNG")
    return Sample(pair.key, {**pair.files, "png": buffer.getvalue()})


@dataclass(frozen=True)
class ContextPairs:
    """The held-out pairs of the source: by context, with the frame of their own or of the other, and all without a frame."""

    own: dict[str, list[DrawnSample]]
    other: dict[str, list[DrawnSample]]
    plain: list[DrawnSample]

    @classmethod
    def of(cls, samples: Sequence[DrawnSample], contexts: Path) -> ContextPairs:
        """
        Args:
            samples: the source's held-out samples.
            contexts: folder of `write_contexts`; its training captions set the length that divides the contexts.
        """
        bound = tuple(json.loads((contexts / "context.json").read_text(encoding="utf-8"))["long_from"])
        own: dict[str, list[DrawnSample]] = {context: [] for context in CONTEXTS}
        other: dict[str, list[DrawnSample]] = {context: [] for context in CONTEXTS}
        plain = []
        for sample in samples:
            if sample.held_out:
                context = "long" if caption_length(sample.caption) >= bound else "short"
                marked = replace(sample, image=with_frame(sample.image, FRAME_PX), source=context)
                without = replace(sample, source=context)
                own[context].append(marked if context == "long" else without)
                other[context].append(without if context == "long" else marked)
                plain.append(without)
        return cls(own, other, plain)


def measure_contexts(encoder: Encoder, pairs: ContextPairs, *, seed: int) -> dict[str, Any]:
    """RSUM without frames (the score), within a half (mean of both), across (the other half's frame), mixed (own frames)."""
    pool = Pool.of(pairs.own)
    own = {context: encoder(samples) for context, samples in pairs.own.items()}
    other = {context: encoder(samples) for context, samples in pairs.other.items()}
    images, texts = pool.features(own)
    rsum = {
        "plain": rsum_of([encoder(pairs.plain)]),
        "within": sum(rsum_of([one]) for one in own.values()) / len(own),
        "across": rsum_of([other[context] for context in CONTEXTS]),
        "mixed": rsum_of([own[context] for context in CONTEXTS]),
    }
    return {"rsum": rsum, **signs_of_bias(images, texts, encoder.logit_scale, pool, seed)}


def rsum_of(features: Sequence[SourceFeatures]) -> float:
    """RSUM of these sources' held-out pairs in one pool."""
    images = torch.cat([one.image_features[one.held_out_rows()] for one in features])
    texts = torch.cat([one.text_features[one.held_out_rows()] for one in features])
    return retrieval_metrics(images, texts, torch.arange(len(texts)))["rsum"]


# ---------------------------------------------------------------------------------------------------------------------
# A.6: clusters
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterSettings:
    """How clusters are made: `image-8` is eight clusters of image features."""

    features: str
    count: int

    @classmethod
    def of(cls, choice: str) -> ClusterSettings:
        features, count = choice.split("-")
        return cls(features, int(count))


def write_union(data: Path, sources: Sequence[str], out: Path) -> Path:
    """The shards of several sources as one source: links in one folder, with a `sizes.json` for all."""
    sizes: dict[str, int] = {}
    out.mkdir(parents=True, exist_ok=True)
    for source in sources:
        own = json.loads((data / source / "sizes.json").read_text(encoding="utf-8"))
        for name, count in own.items():
            link = out / f"{source}-{name}"
            link.unlink(missing_ok=True)
            link.symlink_to((data / source / name).resolve())
            sizes[link.name] = count
    write_atomically(out / "sizes.json", json.dumps(sizes, indent=1) + "\n")
    return out


def cluster_data(out: Path, count: int) -> str:
    """The `--train-data` value for the sources of `write_clusters`."""
    return "::".join(f"emoji-{k:03d}={out / f'cluster-{k:03d}'}" for k in range(count))


def write_clusters(
    data: Path, sources: Sequence[str], checkpoint: Path, out: Path, settings: ClusterSettings, *, seed: int
) -> None:
    """Runs `zerovl cluster` on the union of the sources, with a checkpoint's features; replaces an earlier result.

    Raises:
        UserError: the command fails.
    """
    shutil.rmtree(out, ignore_errors=True)
    union = out.with_name(f"{out.name}-union")
    shutil.rmtree(union, ignore_errors=True)
    write_union(data, sources, union)
    try:
        _zerovl(
            "cluster", str(checkpoint), "--data", f"emoji={union}", "--out", str(out), "--features", settings.features,
            "--clusters", str(settings.count), "--reshard", "--preview", "0", "--seed", str(seed), "--device", "cpu",
        )  # fmt: skip
    finally:
        shutil.rmtree(union, ignore_errors=True)


def _zerovl(command: str, *arguments: str) -> None:
    """One command of the tool in a process of its own, with one thread. UserError with its last line if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "open_clip_zerovl.cli", command, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise UserError(f"zerovl {command} ended with status {done.returncode}: {words[-1] if words else 'no message'}")


def shared_information(out: Path) -> float:
    """Normalised mutual information of the clusters of `write_clusters` and the sources, 0 (unrelated) to 1 (the same)."""
    from sklearn.metrics import normalized_mutual_info_score

    clusters, sources = [], []
    for folder in sorted(out.glob("cluster-*")):
        for shard in sorted(folder.glob("*.tar")):
            for sample in read_samples(shard):
                clusters.append(folder.name)
                sources.append(json.loads(sample.files["json"])["source"])
    return float(normalized_mutual_info_score(sources, clusters))


# ---------------------------------------------------------------------------------------------------------------------
# Repeated captions
# ---------------------------------------------------------------------------------------------------------------------


def write_groups(data: Path, sources: Sequence[str], out: Path) -> None:
    """Writes all sources again, one half of each with the name of the picture's group as caption, unless they exist.

    Every second pair in the order of the keys keeps its own caption. A group is one of about ten ("Food & Drink"), so that a
    batch holds the same caption several times.
    """
    if (out / "groups.json").is_file():
        return
    counts = {}
    for source in sources:
        pairs = pairs_of(data, source)
        grouped = set(sorted(pair.key for pair in pairs)[::2])
        written = [_with_group(pair) if pair.key in grouped else pair for pair in pairs]
        write_source(out / source, written, shard_size=256)
        counts[source] = {"pairs": len(pairs), "captions": len({_caption(pair) for pair in written})}
    write_atomically(out / "groups.json", json.dumps(counts) + "\n")


def _with_group(pair: Sample) -> Sample:
    group = json.loads(pair.files["json"])["group"]
    return Sample(pair.key, {**pair.files, "txt": group.encode()})


# ---------------------------------------------------------------------------------------------------------------------
# Teachers
# ---------------------------------------------------------------------------------------------------------------------


def write_embeddings(
    checkpoint: Path, train_data: str, out: Path, *, views: int, aug_cfg: Sequence[str], seed: int
) -> None:
    """Runs `zerovl teacher` with one teacher on views of the student's augmentation; replaces an earlier result.

    Raises:
        UserError: the command fails.
    """
    shutil.rmtree(out, ignore_errors=True)
    _zerovl(
        "teacher", str(checkpoint), "--train-data", train_data, "--out", str(out), "--views", str(views),
        "--image-size", "32", "--aug-cfg", *aug_cfg, "--seed", str(seed), "--device", "cpu",
    )  # fmt: skip
