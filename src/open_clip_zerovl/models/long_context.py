"""Longer captions: learned text positions stretched by Long-CLIP's rule (Zhang et al., ECCV 2024, section 3.1).

The first 20 positions of a trained tower, which most captions use, stay as they are; the rest are interpolated:

    old rows    0 ... 19   20 ................. P-1
    new rows    0 ... 19   20 ................................... N-1

The new rows 20 to N-1 divide the old rows 20 to P-1 evenly, ends included, so that no row is extrapolated.

Shapes: `P` learned positions, `N` positions afterwards, `D` width of the tower.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from open_clip_zerovl.core.errors import UserError

KEPT_POSITIONS = 20
CONSTANT = "note: with --lora the stretched positions are constant; adapters alone learn the longer captions"


def stretched(positions: Tensor, length: int) -> Tensor:
    """Positions (P, D) as (length, D): the first KEPT_POSITIONS rows exactly, the rest by linear interpolation in float64.

    Raises:
        UserError: fewer than two rows after the kept ones.
    """
    first_rows, rest = positions[:KEPT_POSITIONS], positions[KEPT_POSITIONS:]
    if len(rest) < 2:
        raise UserError(
            f"--context-length {length} keeps the first {KEPT_POSITIONS} positions and stretches the rest, and the text tower "
            f"has {len(positions)}; give --force-context-length {length} and train from nothing"
        )
    rows = F.interpolate(
        rest.double().T[None], length - len(first_rows), mode="linear", align_corners=True
    )[0].T  # (N - 20, D)
    return torch.cat([first_rows, rows.to(positions.dtype)])


def lengthen(model: Any, length: int, tokens: int | None = None) -> bool:
    """Make an open_clip model read texts of `length` tokens, in place; its positions are stretched if they are too few.

    Call it after weights are loaded and before towers are frozen, wrapped or compiled.

    Args:
        tokens: the length of the model's texts until now; None: the tower's positions.

    Returns:
        Whether positions were stretched: the tower had fewer.

    Raises:
        UserError: a length that is not above `tokens`, a tower without learned positions for text tokens alone.
    """
    tower = getattr(model, "text", model)
    positions = text_positions(model)
    if positions is None:
        raise UserError(
            f"--context-length {length} stretches learned positions of text tokens, and the text tower {type(tower).__name__} "
            f"has none of its own; where its positions are computed (ModernBERT, T5), give --force-context-length {length}"
        )
    if length <= (tokens or positions):
        raise UserError(
            f"--context-length {length} must be above the {tokens or positions} tokens that the model reads; to cut captions "
            f"shorter, give --force-context-length {length}"
        )
    stretch_positions(model, length)
    logging.info(
        f"Captions of {length} tokens: the text tower has {positions} positions, "
        + (
            "none is stretched."
            if length <= positions
            else f"the first {KEPT_POSITIONS} are kept, the rest are stretched."
        )
    )
    return length > positions


def text_positions(model: Any) -> int | None:
    """The number of text tokens for which an open_clip model has learned positions; None if positions are computed."""
    tower = getattr(model, "text", model)
    if (table := _hugging_face_table(tower)) is not None:
        return table.num_embeddings - _before_the_first(table)
    rows = getattr(tower, "positional_embedding", None)
    # CoCa's last position is of its class token
    return (
        len(rows) if isinstance(rows, Tensor) and getattr(tower, "cls_emb", None) is None else None
    )


def positions_name(model: Any) -> str | None:
    """The name of a model's learned text positions in its state dict; None if it has none."""
    tower = getattr(model, "text", model)
    table = _hugging_face_table(tower)
    rows = getattr(tower, "positional_embedding", None) if table is None else table.weight
    return next((name for name, parameter in model.named_parameters() if parameter is rows), None)


def stretch_positions(model: Any, length: int) -> None:
    """Stretch the positions of a model's text tower to `length`, in place; a tower with as many or without is left alone."""
    tower = getattr(model, "text", model)
    if length <= (text_positions(model) or length):
        return
    if (table := _hugging_face_table(tower)) is not None:
        first = _before_the_first(table)
        old = table.weight
        table.weight = _parameter(torch.cat([old[:first], stretched(old[first:], length)]), old)
        table.num_embeddings = len(table.weight)
        _grow_buffers(tower.transformer.embeddings, len(table.weight))
        tower.config.max_position_embeddings = tower.context_length = model.context_length = len(
            table.weight
        )
        return
    tower.positional_embedding = _parameter(
        stretched(tower.positional_embedding, length), tower.positional_embedding
    )
    if tower.attn_mask is not None:  # causal: a token attends to itself and to earlier ones
        tower.attn_mask = tower.attn_mask.new_full((length, length), float("-inf")).triu_(1)
    model.context_length = tower.context_length = tower.num_pos = length


def _parameter(rows: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(rows.detach(), requires_grad=like.requires_grad)


def _hugging_face_table(tower: Any) -> nn.Embedding | None:
    """The position embeddings of BERT, RoBERTa and their kind; None of another tower."""
    table = getattr(
        getattr(getattr(tower, "transformer", None), "embeddings", None),
        "position_embeddings",
        None,
    )
    return table if isinstance(table, nn.Embedding) else None


def _before_the_first(table: nn.Embedding) -> int:
    """Rows before that of the first token: RoBERTa and MPNet count from the padding token's number on."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _grow_buffers(embeddings: nn.Module, rows: int) -> None:
    """Buffers (1, P) of transformers' embeddings: the numbers of the positions, and token types of zero."""
    for name, buffer in list(embeddings.named_buffers(recurse=False)):
        if name in ("position_ids", "token_type_ids"):
            numbers = torch.arange(rows, device=buffer.device, dtype=buffer.dtype)
            embeddings._buffers[name] = (
                numbers if name == "position_ids" else torch.zeros_like(numbers)
            )[None]
