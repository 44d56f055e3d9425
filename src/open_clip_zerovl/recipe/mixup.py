"""Coin-flip mixup (section 3.2, A.3): in each effective batch either the images are mixed, or the texts.

Shapes: `B` micro-batch per rank, `K` micro-batches, `W` ranks, `N = B*K*W` effective batch, `D` embedding width.

One coin gamma ~ U[0, 1) and one lambda ~ Beta(alpha, alpha) per effective batch, the same on all ranks:

    gamma > 0.5     I~_j = lambda I_j + (1 - lambda) I_p(j)     pixels, before the image tower
    gamma <= 0.5    t~_j = lambda t_j + (1 - lambda) t_p(j)     text features, after the projection, before L2 normalisation

with p the reversal within a rank's micro-batch, as in the released code. (The paper pairs j with N-j over the whole batch; any
fixed pairing has the same effect, and this one needs no communication.) Each row then has two positives, its own pair with
weight lambda and its partner's with 1 - lambda; `losses.ContrastiveLoss` takes both (A.3; it halves the paper's sum of the two
directions, as CLIP does).

The texts are mixed in a forward hook on the model's text tower, so that for DDP, torch.compile and decoupled gradient
accumulation there is one model with one forward pass. Both mixings are deterministic, hence the same in both passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from open_clip import CLIP
from open_clip.transformer import text_global_pool
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.dga.model import unwrapped
from open_clip_zerovl.losses import reversed_partner


@dataclass(frozen=True)
class Mix:
    """The coin and lambda of one effective batch.

    Attributes:
        mixes_images: the coin: images are mixed if True, else texts.
        weight: lambda, in 0..1: the weight of the row itself in its mixture.
    """

    mixes_images: bool
    weight: float

    def prepare(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the images (B, C, H, W) of a micro-batch if this mix is for images, and leave texts (B, L).

        Call it with the whole micro-batch, in both passes of `DecoupledGradientAccumulation` (as its `prepare`).

        Raises:
            UserError: images that are not floating-point numbers.
        """
        if self.mixes_images:
            images = mix_rows(images, self.weight)
        return images, texts

    def loss_inputs(self, sizes: Sequence[int], text_order: Tensor | None = None) -> dict[str, Any]:
        """Return the arguments for `ContrastiveLoss`: `mixup_lambda`, and `partner` (sum(sizes),) of this rank's rows.

        Args:
            sizes: of this rank's micro-batches, in order: their images if images are mixed, else their texts.
            text_order: where texts are forwarded in another order than images, as `DecoupledGradientAccumulation` takes it.
                Mixed texts are then partners where they are forwarded: with order 0 2 1 3 and micro-batches of two, samples
                0 and 2, and 1 and 3.
        """
        partner = reversed_partner(sizes)
        if text_order is not None and not self.mixes_images:
            partner = text_order[partner[text_order.argsort()]]
        return {"mixup_lambda": self.weight, "partner": partner}


def mix_rows(rows: Tensor, weight: float | Tensor) -> Tensor:
    """Compute weight * rows + (1 - weight) * rows in reverse order, for rows (B, ...).

    Computed in fp32 or fp64, in the rows' dtype.

    Args:
        weight: lambda, a number or a tensor of shape ().

    Raises:
        UserError: rows that are not floating-point numbers.
    """
    if not rows.is_floating_point():
        raise UserError(
            f"mixup needs floating-point rows, but they are {rows.dtype}; convert them first."
        )
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if isinstance(weight, Tensor):
        weight = weight.to(wide.dtype)
    return torch.lerp(wide.flip(0), wide, weight).to(rows.dtype)


class CoinFlipMixup:
    """Draws a `Mix` per effective batch, and mixes the texts of the model that it is attached to.

        mixup = CoinFlipMixup(alpha=0.1, seed=0)
        mixup.attach(model)                                  # once, before DDP and torch.compile
        ...
        with mixup.step() as mix:                            # an effective batch, forward and backward
            dga.backward(micro_batches, prepare=mix.prepare, **mix.loss_inputs(sizes))

    The n-th draw is a pure function of (seed, n). So ranks agree without communication, the process's own generators are
    not used, and a resumed run repeats coins and lambdas bit for bit: `seek` the optimizer step.

    Args:
        alpha: of Beta(alpha, alpha); the paper's is 0.1, where most lambdas are near 0 or 1.
        seed: the same on all ranks.
    """

    def __init__(self, alpha: float = 0.1, *, seed: int = 0) -> None:
        self.alpha = float(alpha)
        self.seed = int(seed)
        self._draws = 0
        self._text: _TextMixing | None = None
        self._handles: list[Any] = []

    def attach(self, model: nn.Module) -> None:
        """Put the hook on the text tower of `model`.

        Outside of `step` and `applied` it does nothing.

        Call it before torch.compile's first forward pass: a compiled graph ignores a hook that is added later.

        A second call moves the hook to another model.

        Raises:
            UserError: a model whose text features cannot be mixed: no text module, or towers that also return tokens (CoCa).
        """
        model = unwrapped(model)[0]
        plain = isinstance(model, CLIP)  # its text tower is spread over the model
        tower = model if plain else getattr(model, "text", None)
        if not isinstance(tower, nn.Module):
            raise UserError(
                f"coin-flip mixup mixes text features in a hook on the text module, and {type(model).__name__} has none."
            )
        if getattr(tower, "output_tokens", False):
            raise UserError(
                f"coin-flip mixup cannot mix the tokens that the text tower of {type(model).__name__} returns besides its "
                "features (CoCa's captioning needs them); use a model without them."
            )
        self.detach()
        self._text = _TextMixing(tower)
        self._handles = self._text.on_pooled() if plain else self._text.on_features()

    def detach(self) -> None:
        """Remove the hook."""
        for handle in self._handles:
            handle.remove()
        self._text, self._handles = None, []

    def draw(self) -> Mix:
        """Draw the next effective batch's coin and lambda."""
        generator = stream(self.seed, Purpose.MIXUP, self._draws)
        self._draws += 1
        gamma, weight = generator.random(), generator.beta(self.alpha, self.alpha)
        return Mix(mixes_images=bool(gamma > 0.5), weight=float(weight))

    @contextmanager
    def step(self) -> Iterator[Mix]:
        """Draw a mix.

        Within the block the attached model's texts are mixed if the coin falls on texts.
        """
        with self.applied(self.draw()) as mix:
            yield mix

    @contextmanager
    def applied(self, mix: Mix) -> Iterator[Mix]:
        """Mix the attached model's texts in every forward pass within the block if `mix` is for texts."""
        assert self._text is not None, "attach(model) comes first"
        self._text.weight = None if mix.mixes_images else self._text.on_device(mix.weight)
        try:
            yield mix
        finally:
            self._text.weight = None

    def seek(self, draws: int) -> None:
        """Move to the state after `draws` draws.

        A run that resumes at optimizer step n calls `seek(n)`.
        """
        self._draws = int(draws)


class _TextMixing:
    """The forward hooks, which hold lambda as a tensor, since a compiled graph would hold a number as a constant."""

    def __init__(self, tower: nn.Module) -> None:
        self.tower = tower
        self.weight: Tensor | None = None  # None: texts are not mixed
        self.tokens: Tensor | None = None

    def on_features(self) -> list[Any]:
        """Put the hook on the tower's output and return its handle."""
        return [self.tower.register_forward_hook(self)]

    def on_pooled(self) -> list[Any]:
        """Put hooks on the first and the last module of `CLIP`'s texts and return their handles.

        What follows the last one is linear: it takes a position of each text, and projects. So each position gets the mixture.
        """
        clip: Any = self.tower
        return [
            clip.token_embedding.register_forward_pre_hook(self.keep_tokens),
            clip.ln_final.register_forward_hook(self.mix_pooled),
        ]

    def keep_tokens(self, _: nn.Module, inputs: tuple[Tensor]) -> None:
        """Keep the tokens (B, L) of texts that are mixed: they tell which position `CLIP` takes."""
        self.tokens = None if self.weight is None else inputs[0]

    def mix_pooled(self, _: nn.Module, inputs: tuple[Any, ...], states: Tensor) -> Tensor | None:
        """Mix the positions that `CLIP` takes, at each position (B, L, width).

        Returns:
            None if texts are not mixed.
        """
        if self.weight is None:
            return None
        tower: Any = self.tower
        pooled = text_global_pool(
            states,
            self.tokens,
            tower.text_pool_type,
            eos_token_id=getattr(tower, "text_eos_id", None),
        )
        return mix_rows(pooled, self.weight)[:, None].expand_as(states)

    def on_device(self, weight: float) -> Tensor:
        parameter = next(self.tower.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        # a kernel; a copy would make the host wait
        return torch.full((), weight, dtype=dtype, device=device)

    def __call__(self, tower: nn.Module, inputs: tuple[Any, ...], features: Any) -> Tensor | None:
        if self.weight is None:
            return None
        return mix_rows(features, self.weight)
