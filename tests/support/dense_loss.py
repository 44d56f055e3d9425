"""The contrastive losses written down whole, in one process, for autograd: the reference for the chunked ones.

Everything is a matrix (N, N) here: targets Y, softmaxes. Nothing is shared with the library.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid


class DenseLoss(nn.Module):
    """`ContrastiveLoss`, and with `sigmoid` `SigmoidLoss`, by definition; called as they are, in one process."""

    def __init__(
        self,
        *,
        positives="pair",
        sigmoid=False,
    ) -> None:
        super().__init__()
        self.positives, self.sigmoid = positives, sigmoid

    def forward(
        self,
        image_features,
        text_features,
        logit_scale,
        logit_bias=None,
        output_dict=False,
        *,
        ids=None,
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
            loss = -logsigmoid(sign * (logits + bias)).sum() / n
        else:
            loss = cross_entropies(logits, over_texts, over_images)
        if logit_bias is not None:
            loss = loss + 0.0 * logit_bias.sum()
        return {"contrastive_loss": loss} if output_dict else loss


def cross_entropies(logits: Tensor, over_texts: Tensor, over_images: Tensor) -> Tensor:
    """Average the cross entropies of both directions."""
    return sum(
        -(target * logits.log_softmax(dim=dim)).sum() / (2 * len(logits))
        for dim, target in ((1, over_texts), (0, over_images))
    )


def sample_ids(b: int, seed: int) -> dict[str, Tensor]:
    """Draw sources, captions and pictures of b samples, of which many are shared, within one call and between calls."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, kinds, (b,), generator=generator)
        for name, kinds in (("source", 3), ("caption", 5), ("image", 7))
    }
