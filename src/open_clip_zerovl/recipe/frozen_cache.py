"""Features of a frozen tower kept on disk (section 4.2), so that the tower runs in the first epoch only.

Shapes: `B` micro-batch per rank, `L` tokens, `D` width of the tower's output, `S` sources.

A frozen tower gives a sample the same features in every epoch if its input is not augmented. They are kept before L2
normalisation, where mixup still applies, in a folder of embeddings (`embeddings.store`): a row of D numbers for each sample. A
sample is identified by (source, position), which `Preprocessing(with_origin=True)` adds to each micro-batch.

    cache = FrozenCache(folder, sources, tower="text", width=512, fingerprint=tower_digest(...))
    cache.attach(model)                                          # after `towers.freeze`
    dga.backward(micro_batches, prepare=cache.prepare)           # each (images, texts, origin (B, 2))
    cache.flush()                                                # now and then, and at the end

The features returned are those that were computed, in `dtype`, whether they come from the tower or from the disk.

A cache belongs to a model and its input (`fingerprint`) and to data (name, size and modification time of each local shard; of
a table the file itself, not its images). Where the model differs, the cache is made anew. Where only the data does, the
features of unchanged shards are kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import seeded
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.embeddings.fingerprint import describe_source
from open_clip_zerovl.embeddings.store import WEIGHTS, Manifest, Store


class FrozenCache:
    """The cache of one tower's outputs; one per process, any number of processes (of one machine) on one folder.

    Args:
        folder: made if absent. A cache of another model in it is made anew, with a line in the log.
        sources: sources of the mixture, in its order.
        tower: "image" or "text".
        width: D.
        fingerprint: hash of the tower and its input, see `embeddings.fingerprint.tower_digest`.

    Raises:
        UserError: a folder that cannot be written or has too little space, or texts that change with the epoch.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        sources: Sequence[Source],
        *,
        tower: str,
        width: int,
        fingerprint: str,
    ) -> None:
        self.tower, self.width = tower, width
        self._sizes = [source.num_samples for source in sources]
        self._origin: Tensor | None = None
        self._forward: Callable[..., Any] | None = None
        manifest = Manifest(
            {
                "use": "a frozen tower",
                "tower": tower,
                "dtype": "float32",
                WEIGHTS: [fingerprint],
            },
            [describe_source(source) for source in sources],
            {"features": ("float32", (sum(self._sizes), width))},
        )
        self._begins = manifest.begins
        self._store = Store.create(Path(folder), manifest, cache=True, verify=False)
        self._features = self._store.rows["features"]
        self._filled = np.array(self._store.done)

    def __len__(self) -> int:
        """The number of samples whose features this process can read."""
        return int(self._filled.sum())

    # --- rows --------------------------------------------------------------------------------------------------------

    def get(self, origin: Tensor) -> Tensor | None:
        """The features (B, D) of samples (B, 2), on the CPU, or None unless all are stored.

        Raises:
            UserError: stored features that are not finite.
        """
        rows = self._rows(origin)
        return self._features[rows] if self._filled[rows].all() else None

    def put(self, origin: Tensor, features: Tensor) -> None:
        """Store the features (B, D) of samples (B, 2); rows that are stored already stay.

        Raises:
            UserError: features of another width.
        """
        rows = self._rows(origin)
        new = ~self._filled[rows]
        self._features[rows[new]] = features.detach()[torch.from_numpy(new).to(features.device)]
        self._filled[rows] = True

    def flush(self) -> None:
        """Write to the disk, features before the marks that declare them valid, and read other processes' marks."""
        self._store.finish(self._filled)
        self._store.flush()
        np.logical_or(self._filled, self._store.done, out=self._filled)

    def _rows(self, origin: Tensor) -> np.ndarray:
        """(B,) the row of each sample: positions go on counting in later epochs, a source's samples do not."""
        return np.array(
            [
                self._begins[source] + position % self._sizes[source]
                for source, position, *_ in origin.tolist()
            ],
            dtype=int,
        )

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
        self._forward = module.forward
        module.forward = torch.compiler.disable(self._look_up)

    def prepare(self, images: Tensor, texts: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        """Announce the samples to the next forward pass; images and texts are returned unchanged.

        Args:
            origin: (B, 2 or more) int64 on the CPU, in the first two columns the source and position of each sample.

        Raises:
            UserError: an origin of another shape.
        """
        self._origin = origin
        return images, texts

    def forget(self) -> None:
        """Drop an announcement that no forward pass has used; call after each step.

        The replay of decoupled gradient accumulation prepares its inputs but does not run a frozen tower again.
        """
        self._origin = None

    def _look_up(self, inputs: Tensor) -> Tensor:
        assert self._forward is not None
        origin, self._origin = self._origin, None
        if origin is None:
            return self._forward(inputs)
        features = self.get(origin)
        if features is None:
            with torch.no_grad():
                features = self._forward(inputs)
            self.put(origin, features)
        if inputs.device.type == "cuda" and features.device.type == "cpu":
            features = features.pin_memory()  # a copy from other memory makes the host wait
        return features.to(inputs.device, torch.float32, non_blocking=True)


def require_deterministic(transform: Callable[[Image.Image], Tensor]) -> None:
    """UserError if an image transform is random, since features of augmented images must not be cached."""
    pixels = np.random.default_rng(0).integers(0, 256, size=(300, 400, 3), dtype=np.uint8)
    results = []
    for seed in range(8):
        with seeded(seed):
            results.append(transform(Image.fromarray(pixels)))
    if any(
        result.shape != results[0].shape or not torch.equal(result, results[0])
        for result in results[1:]
    ):
        raise UserError(
            "features of augmented images change with each epoch and cannot be cached; leave the cache or the "
            "augmentation (random crop included) out."
        )
