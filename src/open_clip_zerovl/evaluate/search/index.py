"""Embeddings of a collection's pictures, computed once and kept.

    CACHE/COLLECTION-MODEL/part-00000.npz   paths, sizes, changed (F,); of: each row's file, key, good (P,); features (P, D)

F files, P pictures, D embedding width. A part is written whole or not at all, after some thousand pictures, so that a call that
was stopped goes on there. A later part overrules an earlier one. A picture counts as embedded while its file has the size and
time of change that stand in the part; the folder's name has a hash of the image tower's weights and of the transform, so that
another model, or the same one trained further, finds nothing of the first. A part that cannot be read is made again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import atomic_file, check_writable, locked, read_arrays
from open_clip_zerovl.data.collection import Collection
from open_clip_zerovl.shards.pictures import BadPicture, decoded, rgb

log = logging.getLogger(__name__)

PART_PICTURES = 4096  # at most so many are embedded again after a stop
_FIELDS = ("paths", "sizes", "changed", "of", "key", "good", "features")


@dataclass(frozen=True)
class Embedded:
    """The pictures of a collection that can be searched.

    Attributes:
        places: (file's number in the collection, key) of each picture.
        features: (P, D), L2-normalised, float32.
        bad: pictures that cannot be decoded, or are not there.
        computed: how many pictures this call has embedded or found bad; the others were kept from before.
    """

    places: list[tuple[int, str]]
    features: Tensor
    bad: int
    computed: int


def default_cache() -> Path:
    """Where embeddings are kept unless a place is given: the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zerovl" / "search"


def model_digest(model: nn.Module, preprocess: Callable[..., Any]) -> str:
    """A hash of all on which a picture's embedding depends: the image tower's layers and tensors, and the transform."""
    # The layers, too: two towers of the same tensors differ where one has QuickGELU.
    digest = hashlib.sha256(f"{preprocess!r} {model.visual!r}".encode())
    for name, tensor in sorted(model.visual.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def embed_collection(
    collection: Collection,
    model: nn.Module,
    preprocess: Callable[..., Tensor],
    *,
    cache: Path,
    device: str | torch.device = "cpu",
    batch_size: int = 64,
    workers: int = 0,
    name: str = "model",
) -> Embedded:
    """Embeds what the cache does not hold yet, and returns all.

    Args:
        model: an open_clip model in eval mode, on `device`.
        preprocess: its evaluation transform.
        cache: the folder of all collections and models.
        workers: threads that decode pictures.
        name: for the progress bar.

    Raises:
        UserError: the cache cannot be written, a shard cannot be read, or an embedding that is not finite.
    """
    where = hashlib.sha256(str(Path(collection.name).expanduser().absolute()).encode()).hexdigest()[:16]
    folder = cache / f"{where}-{model_digest(model, preprocess)}"
    check_writable(folder, folder=True)
    with locked(folder):
        kept = _Kept(folder)
        files = collection.files
        due = [i for i, file in enumerate(files) if kept.stamps.get(file.path) != (file.size, file.changed_ns)]
        rows = _encoded(_decoded(collection, due, preprocess, workers), model, device, batch_size)
        part: list[tuple[int, str, np.ndarray | None]] = []
        finished: list[int] = []
        computed = 0
        with tqdm(total=len(due), desc=name, unit="file", leave=False) as bar:
            for number, pictures in rows:
                part += [(number, key, feature) for key, feature in pictures]
                finished.append(number)
                computed += len(pictures)
                bar.update()
                if len(part) >= PART_PICTURES:
                    kept.add([files[i] for i in finished], finished, part)
                    part, finished = [], []
        if finished:
            kept.add([files[i] for i in finished], finished, part)
        places: list[tuple[int, str]] = []
        features: list[np.ndarray] = []
        bad = collection.lost
        for i, file in enumerate(files):
            for key, feature in kept.pictures.get(file.path, ()):
                if feature is None:
                    bad += 1
                else:
                    places.append((i, key))
                    features.append(feature)
    if not features:
        raise UserError(f"none of the {bad} pictures of {collection.name} can be decoded")
    return Embedded(places, torch.from_numpy(np.stack(features)), bad, computed)


class _Kept:
    """The parts of a folder: for each file its stamp, and its pictures' keys and features (None for a bad one)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stamps: dict[str, tuple[int, int]] = {}
        self.pictures: dict[str, list[tuple[str, np.ndarray | None]]] = {}
        self.next = 0
        for path in sorted(folder.glob("part-*.npz")):
            self.next = 1 + int(path.stem.removeprefix("part-"))
            try:
                arrays = read_arrays(path)
                self._take(*(arrays[field] for field in _FIELDS))
            except (ValueError, KeyError, IndexError, OSError) as error:
                log.warning("%s cannot be read (%s); its pictures are embedded again.", path, error)

    def _take(self, paths, sizes, changed, of, key, good, features) -> None:
        if not (len(paths) == len(sizes) == len(changed) and len(of) == len(key) == len(good) == len(features)):
            raise ValueError("its arrays have several lengths")
        taken: dict[str, list[tuple[str, np.ndarray | None]]] = {str(path): [] for path in paths}
        for i, (number, name, fine) in enumerate(zip(of.tolist(), key.tolist(), good.tolist(), strict=True)):
            taken[str(paths[number])].append((name, features[i] if fine else None))
        self.pictures |= taken
        self.stamps |= {str(p): (int(s), int(c)) for p, s, c in zip(paths, sizes, changed, strict=True)}

    def add(self, files: list, numbers: list[int], rows: list[tuple[int, str, np.ndarray | None]]) -> None:
        """Write a part of whole files. UserError where that fails."""
        place = {number: i for i, number in enumerate(numbers)}
        width = next((len(feature) for _, _, feature in rows if feature is not None), 0)
        arrays: dict[str, Any] = {
            "paths": np.array([file.path for file in files], dtype=np.str_),
            "sizes": np.array([file.size for file in files], dtype=np.int64),
            "changed": np.array([file.changed_ns for file in files], dtype=np.int64),
            "of": np.array([place[number] for number, _, _ in rows], dtype=np.int64),
            "key": np.array([key for _, key, _ in rows], dtype=np.str_),
            "good": np.array([feature is not None for _, _, feature in rows], dtype=bool),
            "features": np.zeros((len(rows), width), dtype=np.float32),
        }
        for i, (_, _, feature) in enumerate(rows):
            if feature is not None:
                arrays["features"][i] = feature
        with atomic_file(self.folder / f"part-{self.next:05d}.npz") as file:
            np.savez(file, **arrays)
        self.next += 1
        self._take(*(arrays[field] for field in _FIELDS))


def _decoded(
    collection: Collection, due: list[int], preprocess: Callable[..., Tensor], workers: int
) -> Iterator[tuple[int, str, Tensor | None, bool]]:
    """(file, key, transformed picture or None, whether it is the file's last), in order; a file without pictures has key ""."""

    def transformed(content: bytes | None) -> Tensor | None:
        if content is None:
            return None
        try:
            return decoded(content, lambda image: preprocess(rgb(image)))
        except BadPicture:
            return None

    def read() -> Iterator[tuple[int, str, bytes | None, bool]]:
        for number in due:
            before: tuple[str, bytes | None] | None = None
            for after in collection.pictures(number):
                if before is not None:
                    yield number, *before, False
                before = after
            yield number, *(before or ("", None)), True

    if workers == 0:
        for number, key, content, last in read():
            yield number, key, transformed(content), last
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: list[tuple[int, str, Any, bool]] = []
        for number, key, content, last in read():
            waiting.append((number, key, pool.submit(transformed, content), last))
            if len(waiting) >= 4 * workers:
                number, key, future, last = waiting.pop(0)
                yield number, key, future.result(), last
        for number, key, future, last in waiting:
            yield number, key, future.result(), last


@torch.no_grad()
def _encoded(
    pictures: Iterator[tuple[int, str, Tensor | None, bool]],
    model: nn.Module,
    device: str | torch.device,
    batch_size: int,
) -> Iterator[tuple[int, list[tuple[str, np.ndarray | None]]]]:
    """(file, [(key, feature or None)]) for each file, whose pictures are embedded together with those of others."""
    batch: list[tuple[int, str, Tensor | None, bool]] = []
    current: list[tuple[str, np.ndarray | None]] = []

    def flush() -> Iterator[tuple[int, list[tuple[str, np.ndarray | None]]]]:
        nonlocal current
        good = [pixels for _, _, pixels, _ in batch if pixels is not None]
        features: Iterator[Tensor] = iter(())
        if good:
            encoded = F.normalize(model.encode_image(torch.stack(good).to(device)).float(), dim=-1).cpu()
            if not encoded.isfinite().all():
                raise UserError("the model gives embeddings that are not finite numbers; its training has diverged")
            features = iter(encoded)
        for number, key, pixels, last in batch:
            current.append((key, None if pixels is None else next(features).numpy()))
            if last:
                yield number, current
                current = []
        batch.clear()

    for entry in pictures:
        batch.append(entry)
        if len(batch) >= batch_size:
            yield from flush()
    yield from flush()
