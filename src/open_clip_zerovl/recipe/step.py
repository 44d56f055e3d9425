"""One optimizer step of the recipe: `training.train` takes it in a loop.

    B  micro-batch per rank    K  micro-batches of a step    W  ranks    N = B*K*W  effective batch    L  context length

A step does: zero_grad, drawing a mix (section 3.2), DGA's gradient over K micro-batches (section 4.1), clipping, the optimizer,
clamping the temperature. The caller sets seeds and learning rates, and logs.

With `--sort-text` a step's texts are sorted by length, so that the text tower computes little padding. The loss takes all
features of a step together, so that its images and texts may be forwarded in any order. With the texts sorted over the K
micro-batches of a rank, each micro-batch holds texts of nearly one length and is cut to its longest:

    lengths 3 9 4 | 8 5 3  ->  3 3 4 | 5 8 9, cut to 4 and 9; order 0 5 2 | 4 3 1

Cutting changes no feature where padding comes last and no token attends to it; `text_padding` checks this. The longest texts
come last, where `DecoupledGradientAccumulation` keeps graphs: only the short ones are forwarded twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from open_clip import get_input_dtype
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import ieee_products
from open_clip_zerovl.dga.extras import TermsOfMicroBatch
from open_clip_zerovl.dga.model import unwrapped
from open_clip_zerovl.dga.retain import Decision
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.gpu import same_masks, without_gpu_syncs
from open_clip_zerovl.recipe.mixup import CoinFlipMixup, Mix
from open_clip_zerovl.recipe.optimizer import optimizer_step

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


# ---------------------------------------------------------------------------------------------------------------------
# The step
# ---------------------------------------------------------------------------------------------------------------------

# images (B, C, H, W), texts (B, L), and origin (B, 2 or more) where the loss asks who the samples are
MicroBatch = tuple[Any, ...]

AUTOCAST_DTYPES = {"amp": torch.float16, "amp_bf16": torch.bfloat16, "amp_bfloat16": torch.bfloat16}


def autocast_of(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Choose the factory of the forward pass' context for open_clip's `--precision`, as in its training program."""
    if precision not in AUTOCAST_DTYPES:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=AUTOCAST_DTYPES[precision])


def prepare(
    images: Tensor,
    texts: Tensor,
    _origin: Tensor | None = None,
    *,
    precision: str,
    normalize: Callable[[Tensor], Tensor] | None = None,
    mix: Mix | None = None,
) -> tuple[Tensor, Tensor]:
    """Prepare the model's inputs from a micro-batch on the device.

    In this order: normalise images to fp32, mix them, cast them to the dtype of the
    model's input. So the mixture is computed in fp32 also where the input is fp16 or bf16.

    Args:
        images: (B, C, H, W), uint8 if `normalize` is given, else normalised floats.
        texts: (B, L) tokens.
        precision: open_clip's `--precision`; bf16, pure_bf16, fp16 and pure_fp16 cast the images.
    """
    if normalize is not None:
        images = normalize(images)
    if mix is not None:
        images, texts = mix.prepare(images, texts)
    return images.to(dtype=get_input_dtype(precision)), texts


def loss_inputs_of(micro_batches: Sequence[MicroBatch]) -> dict[str, Any]:
    """Return `ids` of this rank's samples for `ContrastiveLoss`, from the micro-batches' third part where they have one."""
    if len(micro_batches[0]) < 3:
        return {}
    source, _, *content = torch.cat([origin for _, _, origin, *_ in micro_batches]).unbind(dim=1)
    inputs: dict[str, Any] = {"ids": {"source": source}}
    if content:
        inputs["ids"]["caption"], inputs["ids"]["image"] = content
    return inputs


class RecipeStep:
    """Takes optimizer steps of one model, with one `DecoupledGradientAccumulation` for all of them.

    Args:
        model: plain, compiled or in DistributedDataParallel, on its device and in training mode.
        loss, terms, teacher, retain, check, replay_rng: see `DecoupledGradientAccumulation`.
        optimizer: holds the model's trainable parameters.
        precision: open_clip's `--precision`.
        scaler: a GradScaler if `precision` is amp.
        normalize: for uint8 images, if they are normalised on the device.
        mixup: attached to the model.
        grad_clip_norm: largest norm of all gradients together.
        sort_text: sort a step's texts by length and cut them (`recipe.step`).
        adopted: how many graphs retain="auto" kept before the run was resumed.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        *,
        precision: str,
        terms: TermsOfMicroBatch | None = None,
        teacher: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
        normalize: Callable[[Tensor], Tensor] | None = None,
        mixup: CoinFlipMixup | None = None,
        grad_clip_norm: float | None = None,
        sort_text: bool = False,
        retain: int | str = 1,
        check: str = "first",
        replay_rng: bool = True,
        adopted: Decision | None = None,
    ) -> None:
        without_gpu_syncs(unwrapped(model)[0])
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.scaler = scaler
        self.mixup = mixup
        self.grad_clip_norm = grad_clip_norm
        self._padding = text_padding(unwrapped(model)[0]) if sort_text else None
        self.autocast = autocast_of(precision, next(model.parameters()).device)
        self.prepare = partial(prepare, precision=precision, normalize=normalize)
        self._dga = DecoupledGradientAccumulation(
            model,
            loss,
            terms=terms,
            teacher=teacher,
            autocast=self.autocast,
            scaler=scaler,
            retain=retain,
            check=check,
            replay_rng=replay_rng,
        )
        if adopted is not None:
            self._dga.adopt(adopted)

    def decision(self) -> Decision | None:
        """Return the number of graphs that retain="auto" keeps from the next step on.

        Call it between two steps, on every rank. The gradients of the last step are dropped, as the next step would do.

        Returns:
            None before it can decide, and for a given R.
        """
        self.optimizer.zero_grad()
        return self._dga.decision()

    def take(self, micro_batches: Sequence[MicroBatch], step: int) -> dict[str, Tensor]:
        """Take the optimizer step number `step`, counted from the run's first.

        Args:
            micro_batches: K of them, in host memory or on the device.
            step: decides the mix, so that a resumed run draws the same.

        Returns:
            Detached scalars of `DecoupledGradientAccumulation.backward`.
        """
        with same_masks(self.model, cut_texts=self._padding is not None):
            losses = self._gradients(micro_batches, step)
        optimizer_step(
            self.model,
            self.optimizer,
            scaler=self.scaler,
            grad_clip_norm=self.grad_clip_norm,
        )
        return losses

    def _gradients(self, micro_batches: Sequence[MicroBatch], step: int) -> dict[str, Tensor]:
        """Put the gradients of the effective batch in place of the last step's."""
        self.optimizer.zero_grad()
        inputs = loss_inputs_of(micro_batches) if isinstance(self.loss, ContrastiveLoss) else {}
        order = None
        if self._padding is not None:
            images, texts, *others = zip(*micro_batches, strict=True)
            cut, order = sort_texts(texts, self._padding)
            micro_batches = list(zip(images, cut, *others, strict=True))
        if self.mixup is not None:
            self.mixup.seek(step)
        with nullcontext() if self.mixup is None else self.mixup.step() as mix:
            if mix is not None:
                sizes = [len(part[0 if mix.mixes_images else 1]) for part in micro_batches]
                inputs |= mix.loss_inputs(sizes, order)
            prepared = partial(self.prepare, mix=mix)
            return self._dga.backward(micro_batches, prepare=prepared, text_order=order, **inputs)
