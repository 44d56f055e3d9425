"""The paper's linear probe (section 5.3, A.7): a linear classifier on the frozen image tower, trained by LARS.

The paper's settings: LARS, lr 6.4 at a batch of 16,384, 90 epochs, weight decay 0. Its released code gives the rest: a linear
layer on the features as they are, in torch's initialisation; crops of 8-100 % of the area and AutoAugment; momentum 0.9, trust
coefficient 0.001, both also for the bias; warm-up over 1/9 of the steps, then a cosine to 0. The tower runs in micro-batches;
the classifier takes its step on the whole batch.

With `batch_norm` the classifier is the one that large-batch probes of other papers have: features standardised by a batch norm
without parameters, weights from N(0, 0.01^2), a bias of 0 without LARS's adaptation.

Legend: `N` images, `B` effective batch, `F` width of the features, `C` classes.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.optim.lars import Lars
from torch import Tensor, nn
from tqdm.auto import tqdm

from open_clip_zerovl.core.claim import ADVICE, CONTENT, difference
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import save_atomically
from open_clip_zerovl.core.randomness import STREAMS_VERSION, Purpose, stream_seed
from open_clip_zerovl.core.rates import warmup_cosine
from open_clip_zerovl.data.indexed import IndexedSet
from open_clip_zerovl.evaluate.accuracy import class_indices
from open_clip_zerovl.evaluate.probe.features import (
    TowerSettings,
    Transform,
    tower_digest_of,
    tower_features,
)
from open_clip_zerovl.evaluate.settings import LarsSettings as LarsSettings

log = logging.getLogger(__name__)


@torch.no_grad()
def head_scores(head: nn.Module, features: Tensor) -> Tensor:
    """Scores (N, C) on the CPU of a head (left in eval mode) for features (N, F)."""
    head.eval()
    device = next(head.parameters()).device
    return torch.cat([head(chunk.to(device)).cpu() for chunk in features.split(8192)])


def linear_head(
    width: int, num_classes: int, seed: int = 0, *, batch_norm: bool = False
) -> nn.Sequential:
    """The classifier: features (b, F) -> scores (b, C); its last module is the linear layer.

    Without `batch_norm` weights and bias are from U(-1/sqrt(F), 1/sqrt(F)), torch's own initialisation of a linear layer. With
    it a batch norm without parameters comes first, weights are from N(0, 0.01^2), and the bias is 0.
    """
    linear = nn.Linear(width, num_classes)
    generator = torch.Generator().manual_seed(stream_seed(seed, Purpose.PROBE_HEAD))
    with torch.no_grad():
        if batch_norm:
            linear.weight.normal_(std=0.01, generator=generator)
            linear.bias.zero_()
        else:
            bound = 1 / math.sqrt(width)
            linear.weight.uniform_(-bound, bound, generator=generator)
            linear.bias.uniform_(-bound, bound, generator=generator)
    return nn.Sequential(
        nn.BatchNorm1d(width, affine=False, eps=1e-6) if batch_norm else nn.Identity(), linear
    )


def lars(head: nn.Sequential, settings: LarsSettings) -> Lars:
    """timm's LARS over the linear layer.

    timm adapts the step only with weight decay or `always_adapt`. With the paper's weight decay of 0 and without
    `always_adapt` it is plain SGD. With `batch_norm` the bias takes SGD's step. timm multiplies by the rate after the momentum,
    the released code before; where the rate changes slowly, as here, the steps are the same but for that change.
    """
    linear = head[-1]
    groups: list[dict[str, Any]] = [{"params": [linear.weight], "always_adapt": True}]
    groups += [
        {"params": [linear.bias], "weight_decay": 0.0}
        | ({} if settings.batch_norm else {"always_adapt": True})
    ]
    return Lars(
        groups,
        lr=1.0,  # set each step
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        trust_coeff=settings.trust_coefficient,
    )


def learning_rate(step: int, steps: int, base: float, warmup_share: float) -> float:
    """The learning rate of step 0..steps-1: linear warm-up to `base` over `warmup_share` of the steps, then a cosine to 0."""
    return warmup_cosine(step, steps, base, round(warmup_share * steps))


def train_lars(
    tower: nn.Module,
    images: IndexedSet,
    transform: Transform,
    classes: Sequence[str],
    settings: LarsSettings,
    tower_settings: TowerSettings | None = None,
    *,
    state_file: Path,
    evaluate: Callable[[nn.Module], float],
) -> tuple[nn.Sequential, list[dict[str, float]]]:
    """Train the linear head. Each epoch is saved; a call after an interruption continues after the last whole epoch.

    Order, augmentation and initial weights are functions of (seed, epoch, image). On the CPU in fp32 a resumed run therefore
    ends with the weights of a run never interrupted, bit for bit.

    Args:
        tower: see `tower_features`; it is not changed.
        transform: the augmentation, drawing from torch's default generator.
        classes: the names of the classes in the order of their indices.
        state_file: written after each epoch.
        evaluate: accuracy of a head on the test set, for the history.

    Returns:
        The head in eval mode and, for each epoch, its mean `loss`, `train_accuracy` (on the augmented images) and
        `test_accuracy`.

    Raises:
        UserError: an image that cannot be read, a state file of other settings, a loss that is not finite.
    """
    tower_settings = tower_settings or TowerSettings()
    targets = class_indices(images.labels, classes).to(tower_settings.device)
    batch = min(settings.batch_size, len(images))
    per_epoch = len(images) // batch
    steps = per_epoch * settings.epochs
    request = {
        f"{CONTENT}the model": tower_digest_of(tower, transform, tower_settings),
        f"{CONTENT}the data set": images.content(),
        "classes": list(classes),
        **recorded_settings(settings, tower_settings),
        "release": STREAMS_VERSION,
    }
    with torch.no_grad():
        width = tower(transform(images.image(0))[None].to(tower_settings.device)).shape[1]
    head = linear_head(width, len(classes), settings.seed, batch_norm=settings.batch_norm).to(
        tower_settings.device
    )
    optimizer = lars(head, settings)
    history: list[dict[str, float]] = []
    if state_file.is_file():
        history = _load_state(state_file, request, head, optimizer)
        log.info("Going on after epoch %d of %d (%s).", len(history), settings.epochs, state_file)

    bar = tqdm(
        range(len(history), settings.epochs),
        desc="LARS",
        unit="epoch",
        initial=len(history),
        total=settings.epochs,
    )
    for epoch in bar:
        micro_batches = _micro_batches(
            len(images), batch, tower_settings.micro_batch, settings.seed, epoch
        )
        features = tower_features(
            tower, images, transform, micro_batches, tower_settings, (settings.seed, epoch)
        )
        batches = _effective_batches(
            ((embeddings, targets[rows]) for embeddings, rows in features), batch
        )
        rates = [
            learning_rate(epoch * per_epoch + step, steps, settings.lr, settings.warmup_share)
            for step in range(per_epoch)
        ]
        loss_sum, right = _train_epoch(head, optimizer, batches, rates)
        if not math.isfinite(loss_sum):
            raise UserError(
                f"the probe's loss is not finite in epoch {epoch + 1}; lower --lr (it was {settings.lr:g})"
            )
        history.append(
            {
                "loss": loss_sum / per_epoch,
                "train_accuracy": right / (per_epoch * batch),
                "test_accuracy": evaluate(head.eval()),
            }
        )
        bar.set_postfix_str(
            f"loss {history[-1]['loss']:.3f}, test {100 * history[-1]['test_accuracy']:.1f} %"
        )
        state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
        save_atomically({"request": json.dumps(request), **state}, state_file)
    return head.eval(), history


def recorded_settings(settings: LarsSettings, tower_settings: TowerSettings) -> dict[str, Any]:
    """The settings that change a probe's result, as results and state files hold them."""
    return {**asdict(settings), "micro_batch": tower_settings.micro_batch}


def _micro_batches(
    count: int, batch: int, micro_batch: int, seed: int, epoch: int
) -> list[list[int]]:
    """The indices of an epoch's images in shuffled order, as micro-batches; each effective batch begins with a new one.

    7 images, batches of 3, micro-batches of 2: [[a, b], [c], [d, e], [f]]
    """
    generator = torch.Generator().manual_seed(stream_seed(seed, Purpose.PROBE_ORDER, epoch))
    order = torch.randperm(count, generator=generator).tolist()
    return [
        order[begin : begin + batch][low : low + micro_batch]
        for begin in range(0, count // batch * batch, batch)
        for low in range(0, batch, micro_batch)
    ]


def _effective_batches(
    pieces: Iterable[tuple[Tensor, Tensor]], batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(features (B, F), targets (B,)) of each effective batch, put together from its micro-batches."""
    waiting: list[tuple[Tensor, Tensor]] = []
    for piece in pieces:
        waiting.append(piece)
        if sum(len(targets) for _, targets in waiting) == batch:
            features, targets = (torch.cat(column) for column in zip(*waiting, strict=True))
            yield features, targets
            waiting = []


def _train_epoch(
    head: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    rates: Sequence[float],
) -> tuple[float, int]:
    """One optimizer step a batch, at its learning rate; the sum of the losses, and how many guesses were right."""
    loss_sum, right = 0.0, 0
    head.train()
    for (features, targets), rate in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        scores = head(features)
        loss = F.cross_entropy(scores, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum, right = loss_sum + loss.item(), right + int((scores.argmax(1) == targets).sum())
    return loss_sum, right


def _load_state(
    file: Path, request: dict[str, Any], head: nn.Module, optimizer: torch.optim.Optimizer
) -> list[dict[str, float]]:
    """The history of a state file, whose weights and optimizer state are put into `head` and `optimizer`."""
    state = torch.load(file, weights_only=True, map_location="cpu")
    stored = json.loads(state.get("request", "{}"))
    changed = difference(stored, json.loads(json.dumps(request)))
    if changed is not None:
        raise UserError(f"{file} {changed}; {ADVICE}")
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    return state["history"]
