"""Samples a second and core of our loader and of open_clip's.

    python -m scripts.bench.loader [--sizes 384x256,640x480,1280x854] [--workers 1,2,4] [--out FILE.json]

Both loaders read the same shards of synthetic JPEGs with the same transform (a random crop of 60-100 % of the area to 224 px,
bicubic, normalised) and the same tokenizer, a BERT's. In the rows "augmented" both also apply AutoAugment after the crop and
word augmentation before the tokenizer. Runs are interleaved and medians compared, because other programs share the machine.
*per core* means per CPU second of the worker processes: it decides how many cores feed a GPU, and other programs hardly change
it. *floor* is the rate of our loader per core if it only decoded and transformed pictures, measured in the same rounds.
The first batches, in which workers start and fill their shuffle windows, are left out. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import io
import logging
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated as A
from typing import Any

import numpy as np
import torch
from open_clip.tokenizer import HFTokenizer
from open_clip.transform import image_transform
from open_clip_train.data import get_wds_dataset
from PIL import Image

from open_clip_zerovl.data.images import crop_of, pictures, split_normalize, with_auto_augment
from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.mixture import Mixture, Preprocessing
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.data.tokens import WordAugment
from open_clip_zerovl.sampling.schedule import Batching
from open_clip_zerovl.shards.files import write_source
from open_clip_zerovl.shards.tar import Sample
from scripts.bench.harness import write, write_bert
from scripts.program import program
from scripts.tables import markdown_table

NEEDED_PER_SECOND = 3300  # samples that eight GPUs take in the paper's recipe
BATCH = 32
SHARDS = 8
CAPTION = "a small brown dog that runs over wet sand with a red ball in its mouth"


def photograph(seed: int, width_px: int, height_px: int) -> bytes:
    """Make a JPEG with about the spectrum of a photograph (amplitude falls with the frequency), and so about its bytes."""
    rng = np.random.default_rng(seed)
    rows, columns = np.fft.fftfreq(height_px)[:, None], np.fft.rfftfreq(width_px)[None]
    falling = 1 / np.maximum(np.hypot(rows, columns), 1 / width_px) ** 1.4
    channels = []
    grey = rng.normal(size=(height_px, width_px))
    for _ in range(3):
        noise = np.fft.rfft2(grey + 0.3 * rng.normal(size=(height_px, width_px)))
        channel = np.fft.irfft2(noise * falling, s=(height_px, width_px))
        channels.append((channel - channel.mean()) / channel.std() * 50 + 120)
    buffer = io.BytesIO()
    Image.fromarray(np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8)).save(
        buffer, "JPEG", quality=85
    )
    return buffer.getvalue()


@dataclass(frozen=True)
class Work:
    """The work of both loaders on a sample.

    Attributes:
        transform: open_clip's, PIL image -> normalised floats.
        words: of captions, before the tokenizer.
    """

    transform: Any
    tokenizer: Any
    words: WordAugment | None = None


def ours(shards: str, work: Work, workers: int) -> Iterator[Any]:
    """Make this package's loader, with normalisation left to the device."""
    mixture = Mixture(
        parse_sources(f"bench={shards}", "8"),
        Batching(BATCH, workers=workers),
        Preprocessing(
            split_normalize(work.transform)[0],
            work.tokenizer,
            augment_caption=work.words,
        ),
    )
    return iter(MixtureLoader(mixture, workers=workers))


def stock(shards: str, work: Work, workers: int) -> Iterator[Any]:
    """Make open_clip's loader of webdataset shards, with resampling so that it does not end."""
    args = argparse.Namespace(
        train_data=shards, train_num_samples=1_000_000, dataset_resampled=True, train_data_upsampling_factors=None, seed=0,
        workers=workers, world_size=1, batch_size=BATCH,
    )  # fmt: skip
    draws = random.Random(0)

    def tokenizer(caption: str) -> torch.Tensor:
        return work.tokenizer(caption if work.words is None else work.words(caption, draws))

    return iter(get_wds_dataset(args, work.transform, True, tokenizer=tokenizer).dataloader)


LOADERS: dict[str, Callable[..., Iterator[Any]]] = {"open_clip": stock, "ours": ours}


def floor(encoded: list[bytes], transform: Any) -> float:
    """Measure the pictures a CPU second that decoding and the transform allow, in this process."""
    shown, decode = pictures(split_normalize(transform)[0])
    crop = crop_of(transform)
    begin, count = time.process_time(), 0
    while time.process_time() - begin < 1:
        shown(decode(encoded[count % len(encoded)], crop))
        count += 1
    return count / (time.process_time() - begin)


def cpu_seconds_of_children() -> float:
    """Measure the CPU time of this process's living children (the loader workers)."""
    ticks = 0
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for child in children:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime, stime
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(batches: Iterator[Any], seconds: float, warm_up: int) -> tuple[float, float]:
    """Measure samples per second, and per CPU second of the workers, after some batches to warm up."""
    for _ in range(warm_up):
        next(batches)
    cpu, begin, count = cpu_seconds_of_children(), time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        count += len(next(batches)[0])
    return count / (time.perf_counter() - begin), count / (cpu_seconds_of_children() - cpu)


def _kinds(folder: Path) -> dict[str, Work]:
    """Make the rows' kinds of work."""
    words = [*CAPTION.split(), *"0123456789", *(f"##{digit}" for digit in "0123456789")]
    write_bert(folder / "bert", "tiny", 0.1, words=words)
    tokenizer = HFTokenizer(str(folder / "bert"), context_length=25)
    plain = image_transform(224, True, aug_cfg={"scale": (0.6, 1.0)})
    return {
        "plain": Work(plain, tokenizer),
        "augmented": Work(with_auto_augment(plain), tokenizer, WordAugment(tokenizer)),
    }


def _data(size: str, folder: Path, per_shard: int) -> tuple[list[bytes], str]:
    """Make encoded pictures of a size ("384x256"), and write shards that repeat them."""
    width, height = map(int, size.split("x"))
    encoded = [photograph(seed, width, height) for seed in range(16)]
    samples = [
        Sample(f"{n:09d}", {"jpg": encoded[n % len(encoded)], "txt": f"{CAPTION} {n}".encode()})
        for n in range(SHARDS * per_shard)
    ]
    write_source(folder / size, samples, shard_size=per_shard)
    return encoded, f"{folder / size}/train-{{00000..{SHARDS - 1:05d}}}.tar"


def compare(
    sizes: list[str], workers: list[int], seconds: float, repeats: int, per_shard: int, folder: Path
) -> list[dict[str, Any]]:
    """Measure the rows of the table."""
    rows = []
    for size in sizes:
        encoded, shards = _data(size, folder, per_shard)
        for kind, work in _kinds(folder).items():
            for count in workers:
                row = {"size": size, "kind": kind, "workers": count}
                rows.append(row | _row(seconds, repeats, shards, encoded, work, count))
                print(*_cells(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _row(
    seconds: float, repeats: int, shards: str, encoded: list[bytes], work: Work, workers: int
) -> dict[str, Any]:
    """Measure both loaders and the floor, in turns."""
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in LOADERS}
    floors = []
    for repeat in range(repeats):
        for name in list(LOADERS)[:: 1 if repeat % 2 == 0 else -1]:
            batches = LOADERS[name](shards, work, workers)
            rates[name].append(measure(batches, seconds, 4 * workers))
            del batches
        floors.append(floor(encoded, work.transform))
    row: dict[str, Any] = {
        name: {
            "per_second": statistics.median(wall for wall, _ in pairs),
            "per_core": statistics.median(cpu for _, cpu in pairs),
        }
        for name, pairs in rates.items()
    }
    row["floor"] = statistics.median(floors)
    row["ratio_per_core"] = row["ours"]["per_core"] / row["open_clip"]["per_core"]
    row["ratio_per_second"] = row["ours"]["per_second"] / row["open_clip"]["per_second"]
    row["cores_needed"] = {
        name: math.ceil(NEEDED_PER_SECOND / row[name]["per_core"]) for name in LOADERS
    }
    return row


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["size"], row["kind"], str(row["workers"]),
        *(f"{row[name]['per_second']:.0f} ({row[name]['per_core']:.0f})" for name in ("open_clip", "ours")),
        f"{row['floor']:.0f}", f"{row['ratio_per_core']:.2f}", f"{row['ratio_per_second']:.2f}",
        f"{row['cores_needed']['open_clip']}, {row['cores_needed']['ours']}",
    ]  # fmt: skip


HEADER = (
    "JPEG", "work", "workers", "open_clip, samples/s (per core)", "ours, samples/s (per core)", "floor per core",
    "ratio per core", "ratio in time", f"cores for {NEEDED_PER_SECOND:,} samples/s: open_clip, ours",
)  # fmt: skip


def loader(
    *,
    sizes: A[str, "of the JPEGs, in pixels"] = "384x256,640x480,1280x854",
    workers: A[str, "loader processes"] = "1,2,4",
    seconds: A[float, "of each measurement"] = 3,
    repeats: A[int, "measurements of each loader, interleaved"] = 3,
    per_shard: A[int, "samples in each of the 8 shards"] = 400,
    out: A[Path | None, "all numbers; the table goes into FILE.md", "FILE.json"] = None,
) -> None:
    """Measure both loaders, and print the table."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    kinds_of_workers = list(map(int, workers.split(",")))
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(
            sizes.split(","), kinds_of_workers, seconds, repeats, per_shard, Path(folder)
        )
    results = {"batch_size": BATCH, "cores": os.cpu_count(), "rows": rows}
    write(results, markdown_table(HEADER, list(map(_cells, rows))), out)


if __name__ == "__main__":
    sys.exit(program(loader))
