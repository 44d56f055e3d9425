"""Weights between two models: before (A) and after (B) fine-tuning (WiSE-FT: Wortsman et al., CVPR 2022).

    w(alpha) = A + alpha * (B - A), for each tensor; 0 gives A and 1 gives B, bit for bit

In between each number is computed in float64 and rounded once. `logit_scale` holds a logarithm and is treated like all other
parameters, so that the temperature between two ends is their geometric mean, and lies between them. Running means and variances
of batch norm are averaged like weights. Integers are not averaged: position ids are the same in both, and counts of batches
(`num_batches_tracked`), which nothing reads in evaluation, are those of the nearer end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.checkpoints.export import PROBE_TEXTS
from open_clip_zerovl.checkpoints.loading import Encoder, Preprocess, Tokenizer
from open_clip_zerovl.checkpoints.spec import (
    NOT_OF_FUNCTION,
    OF_FILES,
    ModelSpec,
    complete_config,
    first_difference,
)
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.models.configs import ClipModel

_COUNT = "num_batches_tracked"


@dataclass(frozen=True)
class Ends:
    """Two models with the same tensors.

    Attributes:
        names: how A and B were named.
        spec: A's.
        model: built once; `at` fills it with weights.
        preprocess, tokenizer, device: A's, which are B's too.
        before, after: weights of A and of B, on the CPU.
    """

    names: tuple[str, str]
    spec: ModelSpec
    model: ClipModel
    preprocess: Preprocess
    tokenizer: Tokenizer
    device: torch.device
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    def weights(self, alpha: float) -> dict[str, Tensor]:
        """Compute `weights_between` the two ends."""
        return weights_between(self.before, self.after, alpha)

    def at(self, alpha: float) -> ClipModel:
        """Load the weights at `alpha` into the model.

        The next call changes it.
        """
        self.model.load_state_dict(self.weights(alpha))
        return self.model.eval()


def open_ends(before: Encoder, after: Encoder) -> Ends:
    """Load two models and check that weights between them make sense.

    Raises:
        UserError: a model that cannot be loaded; two of another architecture, transform or tokenizer (the sentence names the
            first key that differs); weights that are not finite.
    """
    specs = before.spec(), after.spec()
    names = before.model, after.model
    configs = [complete_config(spec.model_cfg) for spec in specs]
    _require_same(names, "model_cfg", configs[0], configs[1], NOT_OF_FUNCTION)
    model, preprocess, tokenizer, device = before.load()
    other, _, other_tokenizer, _ = after.load()
    # Compare the built models: a config leaves out values that the model fills in, such as the size of its pictures.
    transforms: list[Any] = [each.visual.preprocess_cfg for each in (model, other)]
    _require_same(names, "preprocess_cfg", transforms[0], transforms[1], frozenset())
    configs = [
        module.text.config.to_dict()
        for module in (model, other)
        if hasattr(getattr(module, "text", None), "config")
    ]
    if len(configs) == 2:
        _require_same(names, "the text tower's config", configs[0], configs[1], OF_FILES)
    weights = [
        {key: value.cpu().clone() for key, value in each.state_dict().items()}
        for each in (model, other)
    ]
    check_same_tensors(names, *weights)
    for text in PROBE_TEXTS:
        if not torch.equal(tokenizer([text]), other_tokenizer([text])):
            raise UserError(
                f"the tokenizers of {names[0]} and {names[1]} read {text[:20]!r} differently: their text towers are "
                "not of one kind; give two checkpoints of one model"
            )
    return Ends(names, specs[0], model, preprocess, tokenizer, device, weights[0], weights[1])


def weights_between(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], alpha: float
) -> dict[str, Tensor]:
    """Compute the weights at `alpha` of the way from `before` to `after`.

    See the module's text for each kind.

    Args:
        before, after: the same names and shapes.
        alpha: 0 to 1.
    """
    if alpha in (0, 1):
        return dict(after if alpha else before)
    return {key: _between(tensor, after[key], alpha) for key, tensor in before.items()}


def _between(before: Tensor, after: Tensor, alpha: float) -> Tensor:
    if not before.is_floating_point():
        return before if alpha < 0.5 else after
    start = before.double()
    return (start + alpha * (after.double() - start)).to(before.dtype)


def check_same_tensors(
    names: tuple[str, str], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> None:
    """Refuse weights that do not have the same tensors of the same shapes, all finite, with the same integers."""
    if different := sorted(before.keys() ^ after.keys()):
        raise UserError(f"{_different(names)} only one has {different[0]}")
    for key, tensor in before.items():
        other = after[key]
        if tensor.shape != other.shape:
            raise UserError(f"{_different(names)} {key} has two shapes")
        if tensor.is_floating_point():
            for name, weights in zip(names, (tensor, other), strict=True):
                if not bool(weights.isfinite().all()):
                    raise UserError(f"{key} of {name} is not finite; give an earlier checkpoint")
        elif not key.endswith(_COUNT) and not torch.equal(tensor, other):
            raise UserError(f"{_different(names)} the whole numbers in {key} differ")


def _different(names: tuple[str, str]) -> str:
    return f"{names[0]} and {names[1]} are different models:"


def _require_same(
    names: tuple[str, str],
    part: str,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    ignored: frozenset[str],
) -> None:
    """Refuse two configs and name the first entry in which they differ."""
    difference = first_difference(first, second, ignored)
    if difference is not None:
        key, a, b = difference
        raise UserError(
            f"{names[0]} and {names[1]} are different models: {key} of {part} is {a} in the first and {b} in the second; "
            "give two checkpoints of one model"
        )
