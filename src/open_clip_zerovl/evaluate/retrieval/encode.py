"""Features of a retrieval set by a model, and their metrics (section 5.1).

Legend: `I` images, `T` captions, `b` images of one batch, `D` embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from open_clip_zerovl.features.encoder import FrozenModel, padding_of
from open_clip_zerovl.models.configs import ClipModel


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation within the block.

    Afterwards each module has its own mode again (a frozen tower stays in eval).
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


def encode_retrieval(
    model: ClipModel,
    batches: Iterable[tuple[Tensor, Sequence[Sequence[str]]]],
    tokenizer: Callable[[list[str]], Tensor],
    *,
    device: str | torch.device = "cpu",
    autocast: Callable[[], AbstractContextManager[Any]] | None = None,
    input_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode images and their captions.

    Args:
        model: an open_clip model on `device`, not wrapped in DDP. It runs in eval mode; its modes are restored afterwards.
        batches: yields (images (b, 3, H, W), for each image its captions).
        tokenizer: captions -> tokens (captions, context_length).
        autocast: makes the context in which the towers run, such as open_clip's `get_autocast(precision)`. None runs them
            without; the metrics then equal those of CLIP_benchmark with `--no_amp`.
        input_dtype: images are cast to it, for a model in half precision.

    Returns:
        image_features (I, D), text_features (T, D), both L2-normalised, float32, on the CPU; text_to_image (T,).
    """
    frozen = FrozenModel(
        "retrieval",
        lambda pixels: model.encode_image(pixels),
        lambda tokens: model.encode_text(tokens),
        tokenizer,
        padding_of(model),
        torch.device(device),
        context=autocast or nullcontext,
        input_dtype=input_dtype,
    )
    image_features: list[Tensor] = []
    text_features: list[Tensor] = []
    text_to_image: list[int] = []
    seen = 0
    with evaluating(model):
        for images, captions in batches:
            for offset, image_captions in enumerate(captions):
                text_to_image.extend([seen + offset] * len(image_captions))
            seen += len(images)
            image_features.append(frozen.images(images).cpu())
            text_features.append(
                frozen.texts(
                    [caption for image_captions in captions for caption in image_captions]
                ).cpu()
            )
    return torch.cat(image_features), torch.cat(text_features), torch.tensor(text_to_image)
