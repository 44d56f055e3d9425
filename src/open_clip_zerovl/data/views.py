"""Views: augmented pictures that a frozen teacher has embedded, and that training shows again.

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

from open_clip_zerovl.core.randomness import Purpose, reseed, stream_seed
from open_clip_zerovl.data.reading import RawSample


class StoredTeachers(Protocol):
    """Teachers with stored embeddings, as a mixture uses them."""

    @property
    def digest(self) -> str:
        """A hash of everything on which the embeddings depend."""
        ...

    def show(
        self, sample: RawSample, image: Any, transform: Callable[[Any], Tensor], draw: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A view of a sample, and the teachers' embeddings of it and of the sample's caption.

        This seeds the process's own generators; the caller restores them (`randomness.preserved`).

        Args:
            image: input of the transform.
            draw: a random number; `draw % V` is the view.

        Returns:
            (picture (C, H, W), (image embedding (D,), text embedding (D,) of each caption shown) of each teacher, one after the
            other).

        Raises:
            UserError: the teachers have no embedding of the sample.
        """
        ...


def view_picture(
    transform: Callable[[Any], Tensor],
    image: Any,
    *,
    seed: int,
    source: int,
    sample: int,
    view: int,
) -> Tensor:
    """View `view` of a sample: the transform's result, drawn from the view's own stream.

    This seeds the process's own generators; the caller restores them (`randomness.preserved`).

    Args:
        transform: image -> picture (C, H, W).
        seed: the seed of the stored teachers.
        source: number of the source among the teachers' sources.
        sample: number of the sample in the source.
    """
    reseed(stream_seed(seed, Purpose.VIEW_IMAGE, source, sample, view))
    return transform(image)


def teacher_features(
    parts: Sequence[tuple[Tensor, ...]], texts_per_image: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """(image features (b, D), text features (C*b, D)) of each teacher over several micro-batches of b samples together.

    Args:
        parts: the fourth item that a `Mixture` yields, of each micro-batch: 1 + C tensors (B, D) for each teacher.
        texts_per_image: C. The features of all samples' first captions come first, then those of the second.
    """
    tensors = [torch.cat(rows) for rows in zip(*parts, strict=True)]
    each = 1 + texts_per_image
    features = []
    for begin in range(0, len(tensors), each):
        images, *texts = tensors[begin : begin + each]
        features.append((images, texts[0] if len(texts) == 1 else torch.cat(texts)))
    return features
