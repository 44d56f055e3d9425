"""Views: augmented pictures that a frozen teacher has seen, and that training shows again.

A stored teacher has embedded V augmentations ("views") of each picture. Training draws one of them for each sample and repeats
its augmentation, so that teacher and student see the same pixels:

    view v of sample n of source s      the transform under the stream (teacher's seed, "view image", s, n, v)
    the view that a step shows          a draw of the stream (run's seed, "view", s, position)

    V  views of a picture    D  width of a teacher's embedding
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from open_clip_zerovl.data.reading import RawSample
from open_clip_zerovl.randomness import Purpose, reseed, stream_seed


class StoredTeachers(Protocol):
    """What a mixture asks of teachers whose embeddings are stored."""

    @property
    def digest(self) -> str:
        """Changes with anything that the embeddings are of."""
        ...

    def show(
        self, sample: RawSample, image: Any, transform: Callable[[Any], Tensor], draw: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A view of a sample, and what the teachers made of it and of the sample's caption.

        The process's own generators are moved; the caller keeps them.

        Args:
            image: what the transform takes.
            draw: a random number; `draw % V` is the view.

        Returns:
            (picture (C, H, W), (image embedding (D,), text embedding (D,)) of each teacher, one after the other).

        Raises:
            UserError: the teachers have not seen the sample.
        """
        ...


def view_picture(
    transform: Callable[[Any], Tensor], image: Any, *, seed: int, source: int, sample: int, view: int
) -> Tensor:
    """View `view` of a sample: the transform's picture under the view's own random numbers.

    The process's own generators are moved; the caller keeps them (`randomness.preserved`).

    Args:
        seed: of the stored teachers.
        source: its number among the teachers' sources.
        sample: its number in the source.
    """
    reseed(stream_seed(seed, Purpose.VIEW_IMAGE, source, sample, view))
    return transform(image)


def teacher_features(parts: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, Tensor]]:
    """(image features, text features) of each teacher over several micro-batches.

    Args:
        parts: what a `Mixture` yields as its fourth item: of each micro-batch two tensors (B, D) a teacher.
    """
    tensors = [torch.cat(rows) for rows in zip(*parts, strict=True)]
    return list(zip(tensors[::2], tensors[1::2], strict=True))
