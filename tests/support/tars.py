"""Webdataset sources for tests: every sample's identity is written into its pixels and its caption."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    """Encode a picture as the bytes of a file, in one of Pillow's formats."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png(color: tuple[int, int, int], px: int = 8) -> bytes:
    """Encode a PNG of one colour."""
    return encoded(Image.new("RGB", (px, px), color))


def noise_jpeg(seed: int, width_px: int, height_px: int, quality: int = 85) -> bytes:
    """Encode a JPEG with large shapes and a little noise, about as large in bytes as a photograph of its size."""
    rng = np.random.default_rng(seed)
    shapes = rng.integers(0, 256, (height_px // 16 + 2, width_px // 16 + 2, 3), dtype=np.uint8)
    pixels = np.asarray(
        Image.fromarray(shapes).resize((width_px, height_px), Image.Resampling.BICUBIC),
        dtype=np.int16,
    )
    pixels = (pixels + rng.normal(0, 4, pixels.shape)).clip(0, 255).astype(np.uint8)
    return encoded(Image.fromarray(pixels), "JPEG", quality=quality)


def add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """Write a tar of (name, content) members, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            add_file(tar, name, content)
    return path


def ids_of(captions: list[str]) -> torch.Tensor:
    """Return (B,) the IDs of `write_source`'s captions, in a tokenizer's place."""
    return torch.tensor([int(caption.split()[-1]) for caption in captions])


def write_source(
    folder: Path,
    first_id: int,
    count: int,
    per_shard: int,
    *,
    px: int = 8,
    sizes: bool = True,
    caption: str = "sample",
) -> str:
    """Write shards whose captions are `caption ID` with IDs from `first_id` on, and return a --train-data component."""
    table = {}
    for begin in range(0, count, per_shard):
        ids = range(first_id + begin, first_id + min(begin + per_shard, count))
        members = []
        for number in ids:
            members += [
                (
                    f"{number:08d}.png",
                    png((number % 256, number // 256 % 256, number // 65536), px),
                ),
                (f"{number:08d}.txt", f"{caption} {number}".encode()),
            ]
        shard = write_tar(folder / f"{begin // per_shard:05d}.tar", members)
        table[shard.name] = len(ids)
    if sizes:
        (folder / "sizes.json").write_text(json.dumps(table))
    last = (count - 1) // per_shard
    return f"{folder}/{{00000..{last:05d}}}.tar" if last else f"{folder}/00000.tar"
