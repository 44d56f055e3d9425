"""A step's texts sorted by length, so that the text tower computes little padding (`--sort-text`).

The loss takes all features of a step together, so that its images and texts may be forwarded in any order. With the texts
sorted over the K micro-batches of a rank, each micro-batch holds texts of nearly one length and is cut to its longest:

    lengths 3 9 4 | 8 5 3  ->  3 3 4 | 5 8 9, cut to 4 and 9; order 0 5 2 | 4 3 1

Cutting changes no feature where padding comes last and no token attends to it; `text_padding` checks this. The longest texts
come last, where `DecoupledGradientAccumulation` keeps graphs: only the short ones are forwarded twice.

Shapes: `B` micro-batch per rank, `K` micro-batches, `L` context length, b = B*K.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import ieee_products

# Largest relative difference of a cut text's features. Sums over fewer zeros round differently (1e-6); a tower that attends
# to padding differs by 1e-2 and more.
CUT_TOLERANCE = 1e-3


def sort_texts(texts: Sequence[Tensor], padding: int) -> tuple[list[Tensor], Tensor]:
    """Sort texts (B, L) of K micro-batches by length, and cut each micro-batch to its longest.

    Args:
        texts: in host memory; sizes may differ. Pinned texts give pinned ones.
        padding: the token that fills a text up, at its end.

    Returns:
        K tensors (B, at most L), and the order (b,): text j of the result was text order[j].
    """
    together = torch.cat(list(texts))
    places = torch.arange(1, together.shape[1] + 1)
    # up to the last token that is not padding
    lengths = torch.where(together != padding, places, 1).amax(dim=1)
    order = lengths.argsort(stable=True)
    pinned = texts[0].is_pinned()
    cut = []
    for rows in order.split([len(part) for part in texts]):
        part = together[rows, : int(lengths[rows[-1]])]
        cut.append(part.pin_memory() if pinned else part)
    return cut, order.pin_memory() if pinned else order


class CutTextTransformer(TextTransformer):
    """open_clip's text transformer, which takes texts shorter than its context: the causal mask is cut as well."""

    def _embeds(self, text: Tensor) -> tuple[Tensor, Tensor | None]:
        embedded, mask = super()._embeds(text)
        length = embedded.shape[1]
        return embedded, None if mask is None else mask[..., :length, :length]


def text_padding(model: nn.Module) -> int:
    """Find the padding token of an open_clip model's text tower.

    The tower's features must not depend on how much of it follows a text.

    Two texts are encoded with and without padding, in evaluation mode and fp32. open_clip's own text transformer is made to
    take short texts first; call this before the model is compiled.

    Raises:
        UserError: a tower that is not a module, has no padding token, or whose features depend on the padding.
    """
    tower = getattr(model, "text", None)
    if not isinstance(tower, nn.Module):
        raise UserError(
            f"--sort-text cuts texts, and the text tower of {type(model).__name__} takes texts of its full length only; build "
            "the model with --force-custom-text, which keeps its weights' meaning."
        )
    padding = getattr(
        getattr(tower, "config", tower), "pad_token_id", getattr(tower, "pad_id", None)
    )
    if not isinstance(padding, int):
        raise UserError(
            f"--sort-text needs to know the padding token, and the tower {type(tower).__name__} has none."
        )
    if type(tower) is TextTransformer:
        tower.__class__ = CutTextTransformer
    whole, short = _features_with_and_without(tower, padding)
    difference = ((whole - short).norm(dim=-1) / whole.norm(dim=-1)).max().item()
    if not difference <= CUT_TOLERANCE:
        raise UserError(
            f"--sort-text cannot be exact: without padding the text tower {type(tower).__name__} gives other features "
            f"(relative difference {difference:.2g}), since it looks at padding or takes the last place for the text's; leave "
            "--sort-text out."
        )
    return padding


def _features_with_and_without(tower: Any, padding: int) -> tuple[Tensor, Tensor]:
    tower = copy.deepcopy(tower).float().eval()
    device = next(tower.parameters()).device
    length = min(tower.context_length, 32)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, tower.vocab_size, (2, length), generator=generator)
    texts[texts == padding] = padding + 1
    end = length // 2
    # open_clip's tokenizers end a text by the largest token
    texts[:, end - 1] = tower.vocab_size - 1
    texts[:, end:] = padding
    with torch.no_grad(), torch.autocast(device.type, enabled=False), ieee_products(device.type):
        return tower(texts.to(device)), tower(texts[:, :end].to(device))
