"""The paper's linear probe (section 5.3, A.7): a linear classifier on the frozen image tower, trained by LARS.

LARS, lr 6.4 at a batch of 16,384, 90 epochs, weight decay 0, a crop of 8-100 % of the area and AutoAugment. The tower runs
in micro-batches, the classifier sees the whole batch. Where the paper is silent, as large-batch linear probes are usually
run: momentum 0.9, cosine to 0 after 1/9 of the steps as warm-up, trust coefficient 0.001, features standardised by a batch
norm without parameters, the bias without LARS's adaptation.

Legend: `N` images, `B` effective batch, `F` width of the features, `C` classes.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.optim.lars import Lars
from torch import Tensor, nn
from tqdm import tqdm

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.files import save_atomically
from open_clip_zerovl.probe.features import (
    Transform,
    TransformedSet,
    tower_features,
    tower_fingerprint,
    transform_fingerprint,
)
from open_clip_zerovl.probe.sets import ProbeSet
from open_clip_zerovl.randomness import STREAMS_VERSION, Purpose, stream_seed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LarsSettings:
    """The paper's settings, see the module's text.

    A batch above the training set becomes the training set. The learning rate does not follow the batch: LARS's step is
    relative to the weights' norm, whatever the size of the gradient.
    """

    epochs: int = 90
    batch_size: int = 16_384
    lr: float = 6.4
    weight_decay: float = 0.0
    momentum: float = 0.9
    trust_coefficient: float = 0.001
    warmup_share: float = 1 / 9
    micro_batch: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 2 or self.micro_batch < 1:
            raise UserError(
                f"a probe needs at least 1 epoch, a batch of 2 and a micro-batch of 1; got {self.epochs}, "
                f"{self.batch_size} and {self.micro_batch}"
            )
        if not self.lr > 0 or self.weight_decay < 0 or not 0 <= self.warmup_share < 1:
            raise UserError(
                f"lr {self.lr} must be positive, weight decay {self.weight_decay} at least 0, and the warm-up's share "
                f"{self.warmup_share} in [0, 1)"
            )


def linear_head(width: int, num_classes: int, seed: int = 0) -> nn.Sequential:
    """Batch norm without parameters and a linear layer: features (n, F) -> scores (n, C); weights N(0, 0.01^2), bias 0."""
    linear = nn.Linear(width, num_classes)
    with torch.no_grad():
        linear.weight.normal_(std=0.01, generator=torch.Generator().manual_seed(stream_seed(seed, Purpose.PROBE_HEAD)))
        linear.bias.zero_()
    return nn.Sequential(nn.BatchNorm1d(width, affine=False, eps=1e-6), linear)


def lars(head: nn.Sequential, settings: LarsSettings) -> Lars:
    """timm's LARS over the linear layer.

    timm adapts the step only with weight decay or `always_adapt`; with the paper's weight decay of 0 it would quietly be
    plain SGD. The bias, one-dimensional, takes the plain step.
    """
    linear = head[-1]
    groups = [{"params": [linear.weight], "always_adapt": True}, {"params": [linear.bias], "weight_decay": 0.0}]
    return Lars(
        groups,
        lr=1.0,  # set each step
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        trust_coeff=settings.trust_coefficient,
    )


def learning_rate(step: int, steps: int, base: float, warmup_share: float) -> float:
    """Of step 0..steps-1: linear warm-up to `base`, then a cosine to 0."""
    warmup = round(warmup_share * steps)
    if step < warmup:
        return base * (step + 1) / warmup
    return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train_lars(
    tower: nn.Module,
    images: ProbeSet,
    transform: Transform,
    classes: Sequence[str],
    settings: LarsSettings,
    *,
    state_file: Path,
    evaluate: Callable[[nn.Module], float],
    num_workers: int = 0,
    device: str | torch.device = "cpu",
    amp: bool = False,
) -> tuple[nn.Sequential, list[dict[str, float]]]:
    """Train the linear head; each epoch is saved, and a call after an interruption goes on after the last whole epoch.

    Order, augmentation and initial weights are functions of (seed, epoch, image), so that a resumed run repeats them: on
    the CPU in fp32 its weights are those of a run never interrupted, bit for bit.

    Args:
        tower: images -> features (n, F), in eval mode on `device`; it is not changed.
        transform: the augmentation, drawing from torch's default generator.
        state_file: written after each epoch.
        evaluate: accuracy of a head on the test set, for the history.

    Returns:
        The head in eval mode and, for each epoch, its mean `loss`, `train_accuracy` (on the augmented images) and
        `test_accuracy`.

    Raises:
        UserError: an image that cannot be read, a state file of other settings, a loss that is not finite.
    """
    index_of = {label: i for i, label in enumerate(classes)}
    targets = [index_of[label] for label in images.labels]
    batch = min(settings.batch_size, len(images))
    per_epoch = len(images) // batch
    steps = per_epoch * settings.epochs
    fingerprint = json.dumps(
        [
            tower_fingerprint(tower),
            images.fingerprint(),
            transform_fingerprint(transform),
            list(classes),
            asdict(settings),
            amp,
            STREAMS_VERSION,
        ]
    )
    with torch.no_grad():
        width = tower(transform(images.image(0))[None].to(device)).shape[1]
    head = linear_head(width, len(classes), settings.seed).to(device)
    optimizer = lars(head, settings)
    history: list[dict[str, float]] = []
    if state_file.is_file():
        history = _load_state(state_file, fingerprint, head, optimizer)
        log.info("Going on after epoch %d of %d (%s).", len(history), settings.epochs, state_file)

    bar = tqdm(
        range(len(history), settings.epochs), desc="LARS", unit="epoch", initial=len(history), total=settings.epochs
    )
    for epoch in bar:
        generator = torch.Generator().manual_seed(stream_seed(settings.seed, Purpose.PROBE_ORDER, epoch))
        order = torch.randperm(len(images), generator=generator).tolist()
        batches = [  # micro-batches that do not straddle an effective batch
            order[step * batch : (step + 1) * batch][low : low + settings.micro_batch]
            for step in range(per_epoch)
            for low in range(0, batch, settings.micro_batch)
        ]
        data = TransformedSet(images, transform, targets, (settings.seed, epoch))
        waiting: list[tuple[Tensor, Tensor]] = []
        loss_sum, right, step = 0.0, 0, epoch * per_epoch
        head.train()
        for piece in tower_features(tower, data, batches, num_workers=num_workers, device=device, amp=amp):
            waiting.append(piece)
            if sum(len(own) for _, own in waiting) < batch:
                continue
            features, target = (torch.cat(column) for column in zip(*waiting, strict=True))  # (B, F), (B,)
            waiting = []
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, settings.lr, settings.warmup_share)
            scores = head(features)
            loss = F.cross_entropy(scores, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum, right, step = loss_sum + loss.item(), right + int((scores.argmax(1) == target).sum()), step + 1
        if not math.isfinite(loss_sum):
            raise UserError(f"the probe's loss is not finite in epoch {epoch + 1}; lower --lr (it was {settings.lr:g})")
        head.eval()
        history.append(
            {
                "loss": loss_sum / per_epoch,
                "train_accuracy": right / (per_epoch * batch),
                "test_accuracy": evaluate(head),
            }
        )
        bar.set_postfix_str(f"loss {history[-1]['loss']:.3f}, test {100 * history[-1]['test_accuracy']:.1f} %")
        state_file.parent.mkdir(parents=True, exist_ok=True)
        state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
        save_atomically({"fingerprint": fingerprint, **state}, state_file)
    return head.eval(), history


def _load_state(
    file: Path, fingerprint: str, head: nn.Module, optimizer: torch.optim.Optimizer
) -> list[dict[str, float]]:
    state = torch.load(file, weights_only=True, map_location="cpu")
    if state.get("fingerprint") != fingerprint:
        raise UserError(
            f"{file} belongs to a probe of another model, data set or other settings, or of another release; give another "
            "--out, or remove it"
        )
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    return state["history"]
