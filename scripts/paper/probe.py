"""The paper's linear probe (section 5.3, A.7): a linear classifier on the frozen image tower, trained by LARS.

    python -m scripts.paper.probe MODEL --train food101:DIR --test food101:DIR --out probe [--batch-size 16384 --lr 6.4 ...]

The paper's settings: LARS, lr 6.4 at a batch of 16,384, 90 epochs, weight decay 0. Its released code gives the rest: a linear
layer on the features as they are, in torch's initialisation; crops of 8-100 % of the area and AutoAugment; momentum 0.9, trust
coefficient 0.001, both also for the bias; warm-up over 1/9 of the steps, then a cosine to 0. Test images pass the paper's
transform, squash to 256 and crop 224 (2.2, A.9). The tower runs in micro-batches; the classifier takes its step on the whole
batch.

Legend: `N` images, `B` effective batch, `b` images of one micro-batch, `F` width of the features, `C` classes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.optim.lars import Lars
from torch import Tensor, nn
from tqdm.auto import tqdm

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import UserError, ended
from open_clip_zerovl.core.files import check_writable, digest_of, save_atomically, write_atomically
from open_clip_zerovl.core.randomness import Purpose, stream_seed
from open_clip_zerovl.data.images import image_transform_train, paper_transform_of
from open_clip_zerovl.data.sets import IndexedSet, class_list, picture_batches
from open_clip_zerovl.evaluate.metrics import accuracies, class_indices, distinct_names
from open_clip_zerovl.evaluate.probe import (
    Transform,
    probe_row,
    probed_model,
)
from open_clip_zerovl.features.embed import picture_features
from open_clip_zerovl.features.encoder import FrozenModel, tower_before_projection
from open_clip_zerovl.recipe.optimizer import warmup_cosine
from scripts.paper.probe_sets import open_set

MOMENTUM = 0.9
TRUST_COEFFICIENT = 0.001
WARMUP_SHARE = 1 / 9


@dataclass(frozen=True)
class Settings:
    """Settings of the probe; the defaults are those of the paper and its code.

    A batch larger than the training set is cut to the training set. The learning rate is not scaled with the batch: LARS scales
    a step to the norm of the weights, whatever the norm of the gradient.

    Attributes:
        lr: at the end of the warm-up.
        seed: of the order, the augmentation and the initial weights.
        micro_batch: images in the tower at once.
        workers: loader processes; 0 reads in this one.
    """

    epochs: int = 90
    batch_size: int = 16_384
    lr: float = 6.4
    weight_decay: float = 0.0
    seed: int = 0
    micro_batch: int = 256
    workers: int = 0


@torch.no_grad()
def head_scores(head: nn.Module, features: Tensor) -> Tensor:
    """Return the scores (N, C) on the CPU of a head for features (N, F)."""
    device = next(head.parameters()).device
    return torch.cat([head(chunk.to(device)).cpu() for chunk in features.split(8192)])


def linear_head(width: int, num_classes: int, seed: int = 0) -> nn.Linear:
    """Make the classifier, features (b, F) -> scores (b, C), in torch's own initialisation from a generator of the seed."""
    head = nn.Linear(width, num_classes)
    generator = torch.Generator().manual_seed(stream_seed(seed, Purpose.PROBE_HEAD))
    bound = 1 / math.sqrt(width)
    with torch.no_grad():
        head.weight.uniform_(-bound, bound, generator=generator)
        head.bias.uniform_(-bound, bound, generator=generator)
    return head


def lars(head: nn.Linear, weight_decay: float = 0.0) -> Lars:
    """Make timm's LARS over the head.

    timm adapts the step only with weight decay or `always_adapt`; else it is plain SGD. It multiplies by the rate after the
    momentum, the released code before; where the rate changes slowly, as here, the steps are the same but for that change.
    """
    groups = [
        {"params": [head.weight], "always_adapt": True},
        {"params": [head.bias], "always_adapt": True, "weight_decay": 0.0},
    ]
    return Lars(
        groups,
        lr=1.0,  # set each step
        momentum=MOMENTUM,
        weight_decay=weight_decay,
        trust_coeff=TRUST_COEFFICIENT,
    )


def tower_features(
    model: FrozenModel,
    images: IndexedSet,
    transform: Transform,
    batches: Sequence[Sequence[int]],
    settings: Settings,
    epoch: int,
) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield features (b, F) on the device and indices (b,) of each micro-batch.

    Args:
        transform: image -> (3, H, W); its random numbers for image i depend on (seed, epoch, i) alone.
        batches: the indices of the images of each micro-batch.
    """
    for pixels, rows in picture_batches(
        images,
        transform,
        seed_of=lambda index: stream_seed(settings.seed, Purpose.PROBE_IMAGE, epoch, index),
        batch_sampler=batches,
        num_workers=settings.workers,
    ):
        yield model.images(pixels), rows


def train_lars(
    model: FrozenModel,
    images: IndexedSet,
    transform: Transform,
    classes: Sequence[str],
    settings: Settings,
    *,
    state_file: Path,
    evaluate: Callable[[nn.Module], float],
) -> tuple[nn.Linear, list[dict[str, float]]]:
    """Train the head. Each epoch is saved; a call after an interruption continues after the last whole epoch.

    Order, augmentation and initial weights are functions of (seed, epoch, image). On the CPU in fp32 a resumed run therefore
    ends with the weights of a run never interrupted, bit for bit.

    Args:
        model: the frozen tower, see `probed_model`.
        transform: the augmentation, drawing from torch's default generator.
        classes: the names of the classes in the order of their indices.
        state_file: written after each epoch.
        evaluate: accuracy of a head on the test set, for the history.

    Returns:
        The head and, for each epoch, its mean `loss`, `train_accuracy` (on the augmented images) and `test_accuracy`.

    Raises:
        UserError: an image that cannot be read, a state file of another call, a loss that is not finite.
    """
    targets = class_indices(images.labels, classes).to(model.device)
    batch = min(settings.batch_size, len(images))
    per_epoch = len(images) // batch
    steps = per_epoch * settings.epochs
    request = digest_of(
        model.fingerprints, images.content(), list(classes), asdict(settings) | {"workers": None}
    )
    with torch.no_grad():
        width = model.images(transform(images.image(0))[None]).shape[1]
    head = linear_head(width, len(classes), settings.seed).to(model.device)
    optimizer = lars(head, settings.weight_decay)
    history: list[dict[str, float]] = []
    if state_file.is_file():
        state = torch.load(state_file, weights_only=True, map_location="cpu")
        if state["request"] != request:
            raise UserError(
                f"{state_file} was begun with other settings, data or weights; repeat that call, or give another --out"
            )
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        history = state["history"]
    bar = tqdm(
        range(len(history), settings.epochs),
        desc="LARS",
        unit="epoch",
        initial=len(history),
        total=settings.epochs,
    )
    for epoch in bar:
        micro_batches = _micro_batches(
            len(images), batch, settings.micro_batch, settings.seed, epoch
        )
        features = tower_features(model, images, transform, micro_batches, settings, epoch)
        batches = _effective_batches(((own, targets[rows]) for own, rows in features), batch)
        rates = [
            warmup_cosine(epoch * per_epoch + step, steps, settings.lr, round(WARMUP_SHARE * steps))
            for step in range(per_epoch)
        ]
        loss_sum, right = _train_epoch(head, optimizer, batches, rates)
        if not math.isfinite(loss_sum):
            raise UserError(
                f"the probe's loss is not finite in epoch {epoch + 1}; lower --lr (it was {settings.lr:g})"
            )
        row = {
            "loss": loss_sum / per_epoch,
            "train_accuracy": right / (per_epoch * batch),
            "test_accuracy": evaluate(head),
        }
        history.append(row)
        bar.set_postfix_str(f"loss {row['loss']:.3f}, test {100 * row['test_accuracy']:.1f} %")
        state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
        save_atomically({"request": request, **state}, state_file)
    return head, history


def _micro_batches(
    count: int, batch: int, micro_batch: int, seed: int, epoch: int
) -> list[list[int]]:
    """Return the indices of an epoch's images in shuffled order, as micro-batches; each effective batch begins with a new one.

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
    """Yield features (B, F) and targets (B,) of each effective batch, put together from its micro-batches."""
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
    """Take one step a batch, at its learning rate, and return the sum of the losses and the number of right guesses."""
    loss_sum, right = 0.0, 0
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


def probe(options: argparse.Namespace) -> dict[str, Any]:
    """Probe a model, print a row, and write `linear_probe.json` into `--out`.

    Raises:
        UserError: data or a model that cannot be read or do not fit, an `--out` that cannot be written.
    """
    settings = Settings(**{name: getattr(options, name) for name in Settings.__annotations__})
    check_writable(options.out, folder=True)
    train_set, test_set = open_set(options.train, "train"), open_set(options.test, "test")
    classes = class_list(train_set, test_set)
    loaded, _, _, device = Encoder(options.model, device=options.device).load()
    tower = tower_before_projection(loaded.visual).eval()
    model = probed_model(tower, paper_transform_of(loaded.visual), device=device, amp=options.amp)
    features = picture_features(
        model,
        test_set,
        options.out / "features",
        batch_size=settings.micro_batch,
        workers=settings.workers,
        name="test",
    )
    targets = class_indices(test_set.labels, classes)
    config = loaded.visual.preprocess_cfg
    side = config["size"] if isinstance(config["size"], int) else config["size"][0]
    augmentation = image_transform_train(
        side, config["mean"], config["std"], area=(0.08, 1.0), auto_augment="imagenet"
    )
    head, history = train_lars(
        probed_model(tower, augmentation, device=device, amp=options.amp),
        train_set,
        augmentation,
        classes,
        settings,
        state_file=options.out / "state.pt",
        evaluate=lambda head: accuracies(head_scores(head, features), targets)["top1"],
    )
    facts = {
        "model": options.model,
        "train": {"path": train_set.path, "images": len(train_set)},
        "test": {"path": test_set.path, "images": len(test_set)},
        "feature_width": features.shape[1],
        "settings": asdict(settings),
        "history": history,
    }
    names = distinct_names({label: train_set.names.get(label, label) for label in classes})
    scored = accuracies(head_scores(head, features), targets, names)
    report = {**facts, "classes": len(names), **scored}
    write_atomically(options.out / "linear_probe.json", json.dumps(report, indent=1) + "\n")
    print(f"{probe_row(report)}\nWritten to {options.out}")
    return report


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="as for zerovl retrieval")
    parser.add_argument(
        "--train", required=True, metavar="DATA", help="see scripts/paper/probe_sets.py"
    )
    parser.add_argument("--test", required=True, metavar="DATA")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--batch-size", type=int, default=Settings.batch_size)
    parser.add_argument("--lr", type=float, default=Settings.lr)
    parser.add_argument("--wd", dest="weight_decay", type=float, default=Settings.weight_decay)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--micro-batch", type=int, default=Settings.micro_batch)
    parser.add_argument("--workers", type=int, default=Settings.workers)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--amp", action="store_true", help="run the tower in bf16")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    return ended(lambda: probe(options), "probe.py")


if __name__ == "__main__":
    sys.exit(main())
