"""Small towers on stored features, trained for all seeds of an arm at once.

`S` seeds, `N` samples of a batch, `n` training samples, `C` captions of each, `F` width of the inputs, `D` of the shared space.

A tower is `x A + gelu(x V) U`, of unit length. Every seed has its own weights, temperature, batches and loss
(`ContrastiveLoss`); the seeds share matrix products and the optimizer's kernels alone, whose arithmetic is elementwise. So a
seed's weights are those of a training of its own, up to the rounding of a product (`tests/scripts/test_photograph_study.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from open_clip_zerovl.core.randomness import Purpose, seeded, stream, stream_seed
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.optimizer import optimizer_step, parameter_groups, warmup_cosine
from open_clip_zerovl.sampling.schedule import source_schedule

HIDDEN, EMBED_DIM = 256, 128
START_SCALE = float(np.log(1 / 0.07))  # of logit_scale, as open_clip's


@dataclass(frozen=True)
class Training:
    """Settings of a training, by the protocol's names."""

    batch: int
    sampling: str
    epoch_samples: int
    epochs: int
    weight_decay: float = 0.1
    warmup_share: float = 0.1


@dataclass(frozen=True)
class Pairs:
    """Training pairs, one source after another.

    Attributes:
        images: (n, F).
        texts: (n, C, F); an epoch shows one of a sample's captions, and the next epoch the next one.
        sizes: samples of each source.
    """

    images: Tensor
    texts: Tensor
    sizes: tuple[int, ...]


class Heads(nn.Module):
    """Towers of S seeds and their temperatures."""

    def __init__(self, width: int, seeds: Sequence[int]) -> None:
        super().__init__()
        shapes = {"straight": (width, EMBED_DIM), "inner": (width, HIDDEN)}
        shapes["outer"] = (HIDDEN, EMBED_DIM)
        scales = {"straight": width**-0.5, "inner": width**-0.5, "outer": 0.1 * HIDDEN**-0.5}
        drawn: dict[str, list[Tensor]] = {}
        for seed in seeds:
            with seeded(stream_seed(seed, Purpose.ALIGN_HEADS)):
                for side in ("image", "text"):
                    for name, shape in shapes.items():
                        weights = scales[name] * torch.randn(shape)
                        drawn.setdefault(f"{side}_{name}", []).append(weights)
        for name, tensors in drawn.items():
            self.register_parameter(name, nn.Parameter(torch.stack(tensors)))
        self.logit_scale = nn.Parameter(torch.full((len(seeds),), START_SCALE))

    def encode(self, side: str, rows: Tensor) -> Tensor:
        """Encode inputs (S, N, F), or (N, F) for all seeds, as (S, N, D) of unit length."""
        straight, inner, outer = (
            getattr(self, f"{side}_{name}") for name in ("straight", "inner", "outer")
        )
        return F.normalize(rows @ straight + F.gelu(rows @ inner) @ outer, dim=-1)


def epoch_order(sizes: Sequence[int], training: Training, seed: int, epoch: int) -> np.ndarray:
    """List the samples (T, N) of an epoch's steps by the product's schedule: each step mixes the sources or is of one."""
    schedule = source_schedule(
        sizes,
        training.batch,
        strategy=training.sampling,
        seed=seed,
        epoch=epoch,
        epoch_samples=training.epoch_samples,
    )
    firsts = np.cumsum([0, *sizes])
    dealt = []
    for source, size in enumerate(sizes):
        stretch = (schedule.begin[source] + np.arange(schedule.taken[source])) % size
        order = stream(seed, Purpose.ALIGN_ORDER, epoch, source).permutation(stretch)
        dealt.append(firsts[source] + order)
    if training.sampling == "random":
        deck = stream(seed, Purpose.ALIGN_ORDER, epoch, -1).permutation(np.concatenate(dealt))
        return deck.reshape(-1, training.batch)
    places = [0] * len(sizes)
    steps = []
    for source in schedule.source_of_step:
        steps.append(dealt[source][places[source] : places[source] + training.batch])
        places[source] += training.batch
    return np.stack(steps)


def take_step(
    heads: Heads,
    optimizer: torch.optim.Optimizer,
    loss: ContrastiveLoss,
    images: Tensor,
    texts: Tensor,
) -> None:
    """Take a step of every seed on its batch, (S, N, F) each."""
    optimizer.zero_grad(set_to_none=True)
    image_features, text_features = heads.encode("image", images), heads.encode("text", texts)
    scales = heads.logit_scale.exp()
    losses = [loss(*of_seed) for of_seed in zip(image_features, text_features, scales, strict=True)]
    torch.stack(losses).sum().backward()  # a seed's loss has no gradient for another's weights
    optimizer_step(heads, optimizer)


def make_optimizer(heads: Heads, training: Training) -> torch.optim.Optimizer:
    """Make AdamW with the paper's betas and eps, which decays matrices alone."""
    groups = parameter_groups(heads, training.weight_decay)
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-6, fused=True)


def begin(width: int, seeds: Sequence[int], start: Heads | None = None) -> Heads:
    """Make the heads of all seeds from random weights, or from those of `start`, which has one seed."""
    heads = Heads(width, seeds)
    if start is not None:
        drawn = heads.state_dict()
        heads.load_state_dict(
            {name: value.expand_as(drawn[name]) for name, value in start.state_dict().items()}
        )
    return heads


def train(heads: Heads, pairs: Pairs, training: Training, rate: float, seeds: Sequence[int]) -> int:
    """Train the heads of all seeds in place, and count the steps of each.

    Args:
        rate: the peak of the learning rate.
    """
    optimizer, loss = make_optimizer(heads, training), ContrastiveLoss()
    captions = pairs.texts.shape[1]
    texts = pairs.texts.flatten(0, 1)
    shift = {
        seed: stream(seed, Purpose.ALIGN_CAPTION).integers(0, 1 << 30, size=len(pairs.images))
        for seed in seeds
    }
    steps = training.epochs * (training.epoch_samples // training.batch)
    step = 0
    for epoch in range(training.epochs):
        order = np.stack([epoch_order(pairs.sizes, training, seed, epoch) for seed in seeds])
        shown = np.stack([(shift[seed] + epoch) % captions for seed in seeds])  # (S, n)
        for numbers in order.swapaxes(0, 1):  # (S, N)
            chosen = numbers * captions + np.take_along_axis(shown, numbers, axis=1)
            lr = warmup_cosine(step, steps, rate, max(1, round(training.warmup_share * steps)))
            for group in optimizer.param_groups:
                group["lr"] = lr
            rows = pairs.images[torch.from_numpy(numbers)], texts[torch.from_numpy(chosen)]
            take_step(heads, optimizer, loss, *rows)
            step += 1
    assert step == steps
    return steps
