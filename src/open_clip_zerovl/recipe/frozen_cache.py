"""Features of a frozen tower kept on disk (section 4.2), so that the tower runs in the first epoch only.

Shapes: `B` micro-batch per rank, `L` tokens, `D` width of the tower's output, `S` sources.

A frozen tower gives a sample the same features in every epoch if its input is not augmented. They are kept before L2
normalisation, where mixup still applies, in one file per source: a row of D numbers for each sample. A sample is identified by
(source, position), which `Preprocessing(with_origin=True)` adds to each micro-batch.

    cache = FrozenCache(folder, sources, tower="text", width=512, fingerprint=fingerprint(...))
    cache.attach(model)                                          # after `towers.freeze`
    dga.backward(micro_batches, prepare=cache.prepare)           # each (images, texts, origin (B, 2))
    cache.flush()                                                # now and then, and at the end

The features returned are those that were computed, in `dtype`, whether they come from the tower or from the disk.

A cache belongs to a model and its input (`fingerprint`, in cache.json) and to data (size and modification time of each local
shard, in shards.json). If either differs it is made anew. For a table the file itself is compared, not its images.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import locked, write_atomically
from open_clip_zerovl.core.randomness import seeded
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.recipe.flags import TOWERS
from open_clip_zerovl.recipe.towers import group_of
from open_clip_zerovl.shards.urls import local_path

log = logging.getLogger(__name__)

DESCRIPTION_FILE = "cache.json"
SHARDS_FILE = "shards.json"
DTYPES = {"float32": torch.float32, "float16": torch.float16}


class FrozenCache:
    """The cache of one tower's outputs; one per process, any number of processes (of one machine) on one folder.

    Args:
        folder: made if absent. A cache with another fingerprint in it is deleted, with a line in the log.
        sources: of the mixture, in its order.
        tower: "image" or "text".
        width: D.
        fingerprint: of all that the features depend on; see `fingerprint`.
        dtype: of the files: float32, or float16 with half the size and a relative error of 5e-4.

    Raises:
        UserError: an unknown tower or dtype, a folder that cannot be written or has too little space, or texts that change
            with the epoch.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        sources: Sequence[Source],
        *,
        tower: str,
        width: int,
        fingerprint: str,
        dtype: str = "float32",
    ) -> None:
        if tower not in TOWERS:
            raise UserError(f"there is no tower {tower!r} to cache; give image or text.")
        if dtype not in DTYPES:
            raise UserError(f"features cannot be cached as {dtype!r}; give float32 or float16.")
        for source in sources:
            if tower == "text" and source.captions not in (None, "all"):
                raise UserError(
                    f"source {source.name!r} shows another caption of an image in each epoch (--captions {source.captions}), "
                    "but a cache keeps one text's features for each sample; use --captions all, or leave the cache out."
                )
        self.folder, self.tower, self.width = Path(folder), tower, width
        self._dtype = DTYPES[dtype]
        self._sizes = [source.num_samples for source in sources]
        self._origin: Tensor | None = None
        self._forward: Callable[..., Any] | None = None
        description = {
            "fingerprint": fingerprint,
            "tower": tower,
            "width": width,
            "dtype": dtype,
            "sources": [[source.name, source.num_samples] for source in sources],
        }
        try:
            with locked(self.folder):
                self._make_files(description, [_shard_marks(source) for source in sources])
        except OSError as error:
            raise UserError(f"the folder of cached features {self.folder} cannot be written ({error}).") from error
        self._features = [
            np.memmap(self._file(index, "features"), np.dtype(dtype), "r+", shape=(size, width))
            for index, size in enumerate(self._sizes)
        ]
        self._filled_files = [
            np.memmap(self._file(index, "filled"), np.bool_, "r+", shape=(size,))
            for index, size in enumerate(self._sizes)
        ]
        self._filled = [np.array(filled) for filled in self._filled_files]

    def __len__(self) -> int:
        """How many samples' features this process can read."""
        return int(sum(filled.sum() for filled in self._filled))

    def _file(self, source: int, kind: str) -> Path:
        return self.folder / f"{source}.{kind}"

    def _make_files(self, description: dict[str, Any], shards: list[list[list[Any]]]) -> None:
        file = self.folder / DESCRIPTION_FILE
        if file.is_file():
            other = "another tower, tokenizer, transform or data"
            if _read_json(file) == description:
                other = self._other_data(shards, file.stat().st_mtime_ns) or ""
            if not other:
                return
            log.warning("The cached features in %s are of %s: made anew.", self.folder, other)
            file.unlink()
        for index, size in enumerate(self._sizes):
            row_bytes = self.width * torch.empty(0, dtype=self._dtype).element_size()
            for kind, length in (("features", size * row_bytes), ("filled", size)):
                self._file(index, kind).unlink(missing_ok=True)  # a run that still maps the old file keeps it
                with open(self._file(index, kind), "wb") as content:
                    if length:  # allocate all of it now: a full disk would later end the process by a signal
                        os.posix_fallocate(content.fileno(), 0, length)
        write_atomically(self.folder / SHARDS_FILE, json.dumps(shards) + "\n")
        # The description comes last: files without one are ignored.
        write_atomically(file, json.dumps(description, indent=2) + "\n")

    def _other_data(self, shards: list[list[list[Any]]], made_ns: int) -> str | None:
        """A few words if the features are of other data than `shards`, else None.

        A cache made before shards.json existed is compared by time: no shard may have been written after it.
        """
        found = _read_json(self.folder / SHARDS_FILE)
        if found is None:
            newer = [mark[0] for marks in shards for mark in marks if len(mark) > 1 and mark[2] > made_ns]
            if newer:
                return f"other data ({newer[0]} was written after them)"
            log.info(
                "The cached features in %s were kept without a record of the data: none was changed since.", self.folder
            )
            write_atomically(self.folder / SHARDS_FILE, json.dumps(shards) + "\n")
            return None
        if found == shards:
            return None
        before = {tuple(mark) for marks in found for mark in marks}
        changed = next((mark[0] for marks in shards for mark in marks if tuple(mark) not in before), "their order")
        return f"other data ({changed} has another size or modification time)"

    # --- rows --------------------------------------------------------------------------------------------------------

    def get(self, origin: Tensor) -> Tensor | None:
        """The features (B, D) of samples (B, 2), on the CPU, or None unless all are stored."""
        rows = self._rows(origin)
        if not all(self._filled[source][row] for source, row in rows):
            return None
        return torch.from_numpy(np.stack([self._features[source][row] for source, row in rows]))

    def put(self, origin: Tensor, features: Tensor) -> None:
        """Store the features (B, D) of samples (B, 2); rows that are stored already stay.

        Raises:
            UserError: features of another width.
        """
        if features.shape != (len(origin), self.width):
            raise UserError(
                f"cached features of {len(origin)} samples must be ({len(origin)}, {self.width}), but are "
                f"{tuple(features.shape)}."
            )
        values = features.detach().to("cpu", self._dtype).numpy()
        for (source, row), value in zip(self._rows(origin), values, strict=True):
            if not self._filled[source][row]:
                self._features[source][row] = value
                self._filled[source][row] = True

    def flush(self) -> None:
        """Write to the disk, features before the marks that declare them valid, and read other processes' marks."""
        for features, filled, file in zip(self._features, self._filled, self._filled_files, strict=True):
            features.flush()
            np.logical_or(filled, file, out=filled)
            file[filled] = True
            file.flush()

    def _rows(self, origin: Tensor) -> list[tuple[int, int]]:
        """(source, row) of each sample: the row is the position modulo the source's samples, since positions go on counting."""
        return [(source, position % self._sizes[source]) for source, position, *_ in origin.tolist()]

    # --- in a model --------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> None:
        """Replace the forward pass of `model`'s tower by a look-up of the samples that `prepare` has announced.

        Without an announcement (in evaluation) the tower runs. Forward hooks on the tower, such as mixup's, also apply to
        features that were looked up. Under torch.compile the look-up stays outside of the graph.

        Raises:
            UserError: a tower that is not a module, is not frozen with its projection, or is in training mode (dropout).
        """
        module = getattr(model, "visual" if self.tower == "image" else "text", None)
        if not isinstance(module, nn.Module):
            raise UserError(
                f"the {self.tower} tower of {type(model).__name__} is not a module of its own; build the model with "
                "force_custom_text=True (--force-custom-text)."
            )
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise UserError(f"only a frozen tower's features can be cached; freeze the {self.tower} tower first.")
        if any(part.training for part in module.modules()):
            raise UserError(f"the {self.tower} tower is in training mode; recipe.freeze keeps it in evaluation mode.")
        if self._forward is not None:
            raise UserError("this cache is attached already.")
        self._forward = module.forward
        module.forward = torch.compiler.disable(self._look_up)

    def prepare(self, images: Tensor, texts: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        """Announce the samples to the next forward pass; images and texts are returned unchanged.

        Args:
            origin: (B, 2 or more) int64 on the CPU, in the first two columns the source and position of each sample.

        Raises:
            UserError: an origin of another shape.
        """
        rows = len(images if self.tower == "image" else texts)
        if origin.ndim != 2 or len(origin) != rows or origin.shape[1] < 2:
            raise UserError(f"origin must be ({rows}, 2) or wider, but is {tuple(origin.shape)}.")
        self._origin = origin
        return images, texts

    def forget(self) -> None:
        """Drop an announcement that no forward pass has used; called after each step.

        The replay of decoupled gradient accumulation prepares its inputs but does not run a frozen tower again.
        """
        self._origin = None

    def _look_up(self, inputs: Tensor) -> Tensor:
        assert self._forward is not None
        origin, self._origin = self._origin, None
        if origin is None:
            return self._forward(inputs)
        if len(origin) != len(inputs):
            raise UserError(f"{len(origin)} samples were announced to the cache, {len(inputs)} came.")
        features = self.get(origin)
        if features is None:
            with torch.no_grad():
                features = self._forward(inputs)
            self.put(origin, features)
        if inputs.device.type == "cuda" and features.device.type == "cpu":
            features = features.pin_memory()  # a copy from other memory makes the host wait
        return features.to(inputs.device, self._dtype, non_blocking=True).to(torch.float32)


def _read_json(file: Path) -> Any:
    """The content of a JSON file; None if it is absent or incomplete."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _shard_marks(source: Source) -> list[list[Any]]:
    """For each shard the last part of its path and, if it is local, size in bytes and modification time in nanoseconds."""
    marks: list[list[Any]] = []
    for shard in dict.fromkeys(source.shards):
        path = local_path(shard)
        mark: list[Any] = [os.path.basename(shard)]
        if path is not None and os.path.exists(path):  # a missing one was reported already
            status = os.stat(path)
            mark += [status.st_size, status.st_mtime_ns]
        marks.append(mark)
    return marks


# ---------------------------------------------------------------------------------------------------------------------
# What the features depend on
# ---------------------------------------------------------------------------------------------------------------------


def fingerprint(
    model: nn.Module,
    tower: str,
    sources: Sequence[Source],
    *,
    inputs: Any,
    precision: str = "fp32",
    pixel_path: str = "pil",
) -> str:
    """A digest of all that a frozen tower's features depend on.

    Args:
        model: with its weights loaded.
        tower: "image" or "text".
        sources: names, shards and sizes are taken, in order.
        inputs: the tokenizer of a text tower, the transform of an image tower.
        precision: of the forward passes (open_clip's `--precision`).
        pixel_path: for an image tower: the paths agree to two grey levels, not bit for bit.
    """
    digest = hashlib.blake2b(digest_size=16)
    wanted = {f"{tower} tower", f"{tower} projection"}
    for name, tensor in model.state_dict().items():
        if group_of(name) in wanted:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    data = [
        [source.name, [os.path.basename(shard) for shard in source.shards], list(source.sizes), _picked(source)]
        for source in sources
    ]
    path = [pixel_path] if tower == "image" and pixel_path != "pil" else []  # left out, older caches stay valid
    digest.update(json.dumps([tower, precision, _described(inputs), data, *path]).encode())
    return digest.hexdigest()


def _picked(source: Source) -> str | None:
    """A digest of the samples that a cluster takes from its shards: another clustering may take the same number of each."""
    return None if source.picked is None else hashlib.blake2b(source.picked.tobytes()).hexdigest()


def _described(inputs: Any) -> list[Any]:
    """A tokenizer's or transform's settings as JSON."""
    inner = getattr(inputs, "tokenizer", None)
    if inner is None:
        # Without addresses of objects, which CLIP's own tokenizer has in its repr: they differ in each process.
        shown = re.sub(r" at 0x[0-9a-f]+", "", repr(inputs))
        return [type(inputs).__name__, getattr(inputs, "context_length", None), shown]
    backend = getattr(inner, "backend_tokenizer", None)
    content = _without_lengths(backend) if backend is not None else json.dumps(sorted(inner.get_vocab().items()))
    return [
        type(inner).__name__,
        inputs.context_length,
        getattr(getattr(inputs, "clean_fn", None), "__name__", None),
        getattr(inputs, "strip_sep_token", None),
        getattr(inputs, "tokenizer_mode", None),
        hashlib.blake2b(content.encode()).hexdigest(),
    ]


def _without_lengths(backend: Any) -> str:
    """A tokenizer's content as JSON, without the truncation and padding that its last call has left in it."""
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy.to_str()


def require_deterministic(transform: Callable[[Image.Image], Tensor], *, draws: int = 8) -> None:
    """UserError if an image transform is random, since features of augmented images must not be cached.

    Args:
        draws: seeds that are tried.
    """
    pixels = np.random.default_rng(0).integers(0, 256, size=(300, 400, 3), dtype=np.uint8)
    results = []
    for seed in range(draws):
        with seeded(seed):
            results.append(transform(Image.fromarray(pixels)))
    if any(result.shape != results[0].shape or not torch.equal(result, results[0]) for result in results[1:]):
        raise UserError(
            "features of augmented images change with each epoch and cannot be cached; leave the cache or the "
            "augmentation (random crop included) out."
        )
