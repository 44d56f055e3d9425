"""The contrastive losses written down whole, in one process, for autograd: the reference for the chunked ones.

Everything is a matrix (N, N) here: targets Y, softmaxes. Nothing is shared with the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize


class DenseLoss(nn.Module):
    """`ContrastiveLoss`, and with `sigmoid` `SigmoidLoss`, by definition; called as they are, in one process."""

    def __init__(
        self,
        *,
        positives="pair",
        distill_weight=0.0,
        distill_temperature=0.01,
        sigmoid=False,
    ) -> None:
        super().__init__()
        self.positives, self.sigmoid = positives, sigmoid
        self.distill_weight, self.distill_temperature = distill_weight, distill_temperature

    def forward(
        self,
        image_features,
        text_features,
        logit_scale,
        logit_bias=None,
        output_dict=False,
        *,
        texts_per_image=1,
        **targets,
    ):
        """One loss for each text of the images, summed."""
        ids, teachers, losses = targets.pop("ids", None), targets.pop("teacher_features", ()), []
        for number, texts in enumerate(text_features.chunk(texts_per_image)):
            own_ids = ids and {
                name: values.chunk(texts_per_image)[number] if name == "caption" else values
                for name, values in ids.items()
            }
            own = [
                (images, of_texts.chunk(texts_per_image)[number]) for images, of_texts in teachers
            ]
            losses.append(
                self._of_pairs(
                    image_features, texts, logit_scale, logit_bias, own_ids, own, **targets
                )
            )
        return {"contrastive_loss": sum(losses)} if output_dict else sum(losses)

    def _of_pairs(
        self,
        image_features,
        text_features,
        logit_scale,
        logit_bias,
        ids,
        teacher_features,
        mixup_lambda=None,
        partner=None,
    ):
        n = len(image_features)
        positive = torch.eye(n, dtype=torch.bool)
        for name in {"pair": [], "both": ["caption", "image"]}.get(
            self.positives, [self.positives]
        ):
            positive |= ids[name][:, None] == ids[name]
        cosines = image_features @ text_features.T
        logits = logit_scale * cosines
        bias = 0.0 if logit_bias is None else logit_bias

        over_texts = positive.to(logits.dtype) / positive.sum(dim=1, keepdim=True)
        over_images = positive.to(logits.dtype) / positive.sum(dim=0, keepdim=True)
        if partner is not None:
            swapped = torch.eye(n, dtype=logits.dtype)[partner]
            over_texts = over_images = mixup_lambda * over_texts + (1 - mixup_lambda) * swapped
        if self.sigmoid:
            sign = torch.where(positive, 1.0, -1.0)
            contrastive = -logsigmoid(sign * (logits + bias)).sum() / n
        else:
            contrastive = cross_entropies(logits, over_texts, over_images)
        loss = (1 - self.distill_weight) * contrastive
        if teacher_features:
            of_teachers = [
                images @ texts.T / self.distill_temperature for images, texts in teacher_features
            ]
            over_texts = torch.stack([one.softmax(dim=1) for one in of_teachers]).mean(dim=0)
            over_images = torch.stack([one.softmax(dim=0) for one in of_teachers]).mean(dim=0)
            loss = loss + self.distill_weight * cross_entropies(logits, over_texts, over_images)
        if logit_bias is not None:
            loss = loss + 0.0 * logit_bias.sum()
        return loss


def cross_entropies(logits: Tensor, over_texts: Tensor, over_images: Tensor) -> Tensor:
    """The mean of both directions: from targets to softmaxes."""
    return sum(
        -(target * logits.log_softmax(dim=dim)).sum() / (2 * len(logits))
        for dim, target in ((1, over_texts), (0, over_images))
    )


def sample_ids(b: int, seed: int) -> dict[str, Tensor]:
    """Sources, captions and pictures of b samples, of which many are shared, within one call and between calls."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, kinds, (b,), generator=generator)
        for name, kinds in (("source", 3), ("caption", 5), ("image", 7))
    }


def set_by_set(parts: Sequence[Tensor], texts_per_image: int) -> Tensor:
    """Rows of several batches, each with the first texts of its images and then the second, in this order as one batch."""
    chunks = [part.chunk(texts_per_image) for part in parts]
    return torch.cat([chunk[number] for number in range(texts_per_image) for chunk in chunks])


def teacher_features(
    b: int, seed: int, widths: tuple[int, ...] = (6, 9), **like: Any
) -> list[tuple[Tensor, Tensor]]:
    """Unit features (b, D_t) of images and texts, one pair a teacher, alike enough for softmaxes that are not even."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for width in widths:
        images, noise = torch.randn(2, b, width, generator=generator, dtype=torch.float64)
        found.append(tuple(normalize(rows, dim=1).to(**like) for rows in (images, images + noise)))
    return found
