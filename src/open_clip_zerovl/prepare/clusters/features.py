"""Features of every sample of a source by any open_clip model (A.6), in a memory-mapped file.

`n` samples, `D` width of the features.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, get_worker_info
from tqdm import tqdm

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.images import BadImage, decode_image
from open_clip_zerovl.data.samples import samples_of
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.stats import Fault
from open_clip_zerovl.data.workers import read_batches
from open_clip_zerovl.shards.index import open_index
from open_clip_zerovl.shards.members import Sample, ShardError, image_of


class _Samples(IterableDataset):
    """(position, transformed picture, caption) of every sample of a source; a worker reads whole shards.

    The worker also builds each shard's index, while the shard is in memory. Training on the clusters finds its samples by the
    indexes (`data.clusters`); if loader workers had to build them, the first batches of a run would wait for that.
    """

    def __init__(self, source: Source, preprocess: Callable[[Any], torch.Tensor] | None) -> None:
        self.source, self.preprocess = source, preprocess

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, str] | UserError]:
        worker = get_worker_info()
        index, count = (worker.id, worker.num_workers) if worker else (0, 1)
        starts = np.concatenate(([0], np.cumsum(self.source.sizes)))
        for number, shard in enumerate(self.source.shards):
            if number % count != index:
                continue
            begin, seen = int(starts[number]), 0
            for sample in samples_of(self.source, number):
                # As an item and not raised: see `data.workers`.
                try:
                    picture = self._picture(sample, shard)
                except UserError as error:
                    yield error
                    return
                yield begin + seen, picture, sample.files.get("txt", b"").decode("utf-8", "replace")
                seen += 1
            if self.source.table is not None:
                continue
            if seen != self.source.sizes[number]:
                yield UserError(
                    f"{shard} holds {seen} samples and sizes.json says {self.source.sizes[number]}: count it again with "
                    "`zerovl data index`."
                )
                return
            try:
                open_index(shard)
            except (ShardError, tarfile.ReadError) as error:
                yield UserError(f"shard {shard} cannot be read as a plain tar ({error}): write it again.")
                return

    def _picture(self, sample: Sample, shard: str) -> torch.Tensor:
        if self.preprocess is None:
            return torch.empty(0)
        try:
            return self.preprocess(open_picture(sample))
        except BadImage as error:
            raise UserError(
                f"{shard}: the picture of sample '{sample.key}' cannot be read: it {error}; see `zerovl data check`."
            ) from error


def open_picture(sample: Sample) -> Image.Image:
    """The picture of a sample as RGB. BadImage where it has none, or one that cannot be decoded."""
    content = image_of(sample.files)
    if content is None:
        raise BadImage(Fault("no image", "has no image"))
    return decode_image(content)


def _collate(items: Sequence[tuple[int, torch.Tensor, str]]) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    positions, pictures, captions = zip(*items, strict=True)
    return torch.tensor(positions), torch.stack(pictures), list(captions)


def extract_features(
    source: Source, encoder: Encoder, path: Path, *, kind: str = "image", progress: bool = True
) -> NDArray[np.float16]:
    """Features of every sample of a source, (n, D) in float16 and of unit length, memory-mapped from `path`.

    The file gets its name when it is whole; an existing one is used without a check.

    Args:
        encoder: the model that makes the features.
        kind: "image", "text", or "both" (side by side).

    Raises:
        UserError: a model that cannot be loaded, a picture that cannot be read, or shards that hold another number of samples
            than `sizes.json` says.
    """
    if path.is_file():
        try:
            return np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError, TypeError) as error:
            raise UserError(
                f"the features in {path} cannot be read ({error}); remove the file to encode anew"
            ) from error
    network, preprocess, tokenizer, where = encoder.load()
    dataset = _Samples(source, preprocess if kind != "text" else None)
    part = path.with_name(path.name + ".part")
    table: np.memmap | None = None
    done = 0
    bar = tqdm(total=source.num_samples, desc="features", unit="sample", disable=not progress)
    for positions, pictures, captions in read_batches(
        dataset, _collate, batch_size=encoder.batch_size, num_workers=encoder.workers
    ):
        values = _encode(network, kind, pictures.to(where), tokenizer, captions, where)  # (b, D)
        if not values.isfinite().all():
            raise UserError("the model gives embeddings that are not finite numbers; its training has diverged")
        if table is None:
            table = np.lib.format.open_memmap(
                part, mode="w+", dtype=np.float16, shape=(source.num_samples, values.shape[1])
            )
        table[positions.numpy()] = values.cpu().numpy()
        done += len(positions)
        bar.update(len(positions))
    bar.close()
    assert table is not None and done == source.num_samples  # _Samples yields an error otherwise
    table.flush()
    part.replace(path)
    return np.load(path, mmap_mode="r")


@torch.inference_mode()
def _encode(
    network: nn.Module, kind: str, pictures: torch.Tensor, tokenizer: Any, captions: list[str], where: torch.device
) -> torch.Tensor:
    found = []
    if kind in ("image", "both"):
        found.append(F.normalize(network.encode_image(pictures).float(), dim=-1))
    if kind in ("text", "both"):
        found.append(F.normalize(network.encode_text(tokenizer(captions).to(where)).float(), dim=-1))
    return F.normalize(torch.cat(found, dim=-1), dim=-1)
