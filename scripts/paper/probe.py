"""The paper's linear probe (section 5.3, A.7): a linear classifier on the frozen image tower, trained by LARS.

    python -m scripts.paper.probe MODEL --train food101:DIR --test food101:DIR --out probe [--batch-size 16384 --lr 6.4 ...]

The paper's settings: LARS, lr 6.4 at a batch of 16,384, 90 epochs, weight decay 0. Its released code gives the rest: a linear
layer on the features as they are, in torch's initialisation; crops of 8-100 % of the area and AutoAugment; momentum 0.9, trust
coefficient 0.001, both also for the bias; warm-up over 1/9 of the steps, then a cosine to 0. Test images pass the paper's
transform, squash to 256 and crop 224 (2.2, A.9). The tower runs in micro-batches; the classifier takes its step on the whole
batch.

DATA is a set of `zerovl linear-probe`, such as a folder of class folders (ImageNet), or one of Tables 11 and 12 as its authors
publish it; nothing is downloaded:

    food101:DIR  pets:DIR  aircraft:DIR  places365:DIR      as torchvision lays them out
    cub:DIR                     CUB-200-2011 with its images.txt and train_test_split.txt (torchvision does not know it)
    inat17:DIR                  iNaturalist 2017 with its train2017.json and val2017.json (torchvision knows no split of it)

Legend: `N` images, `B` effective batch, `b` images of one micro-batch, `F` width of the features, `C` classes.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated as A
from typing import Any

import torch
import torch.nn.functional as F
import torchvision.datasets as tvd
from timm.optim.lars import Lars
from torch import Tensor, nn
from tqdm.auto import tqdm

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, digest_of, save_atomically, write_atomically
from open_clip_zerovl.core.flags import flag
from open_clip_zerovl.core.randomness import Purpose, stream_seed
from open_clip_zerovl.data.images import image_transform_train, paper_transform_of
from open_clip_zerovl.data.sets import (
    IndexedSet,
    Picture,
    class_list,
    open_probe_set,
    picture_batches,
)
from open_clip_zerovl.evaluate.metrics import accuracies, class_indices, distinct_names
from open_clip_zerovl.evaluate.probe import (
    Transform,
    probe_row,
    probed_model,
)
from open_clip_zerovl.features.embed import picture_features
from open_clip_zerovl.features.encoder import FrozenModel, tower_before_projection
from open_clip_zerovl.recipe.optimizer import warmup_cosine
from scripts.program import program

MOMENTUM = 0.9
TRUST_COEFFICIENT = 0.001
WARMUP_SHARE = 1 / 9


@dataclass(frozen=True)
class Settings:
    """Settings of the probe, by default those of the paper and its code.

    A batch larger than the training set is cut to the training set. The learning rate is not scaled with the batch: LARS scales
    a step to the norm of the weights, whatever the norm of the gradient.
    """

    epochs: int = flag(90)
    batch_size: int = flag(16_384)
    lr: float = flag(6.4, "at the end of the warm-up")
    weight_decay: float = flag(0.0, option="--wd")
    seed: int = flag(0, "of the order, the augmentation and the initial weights")
    micro_batch: int = flag(256, "images in the tower at once")
    workers: int = flag(0, "loader processes; 0 reads in this one")


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
    """Train the head, from the last whole epoch of an interrupted call on.

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
        features = (
            (model.images(pixels), rows)
            for pixels, rows in picture_batches(
                images,
                transform,
                seed_of=partial(stream_seed, settings.seed, Purpose.PROBE_IMAGE, epoch),
                batch_sampler=_micro_batches(
                    len(images), batch, settings.micro_batch, settings.seed, epoch
                ),
                num_workers=settings.workers,
            )
        )
        loss_sum, right = 0.0, 0
        for step in range(per_epoch):
            parts: list[tuple[Tensor, list[int]]] = []
            while sum(len(rows) for _, rows in parts) < batch:
                parts.append(next(features))
            classes_of = targets[[row for _, rows in parts for row in rows]]
            rate = warmup_cosine(
                epoch * per_epoch + step, steps, settings.lr, round(WARMUP_SHARE * steps)
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            scores = head(torch.cat([part for part, _ in parts]))
            loss = F.cross_entropy(scores, classes_of)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
            right += int((scores.argmax(1) == classes_of).sum())
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
    """Shuffle the indices of an epoch's images into micro-batches, so that each effective batch begins with a new one.

    7 images, batches of 3, micro-batches of 2: [[a, b], [c], [d, e], [f]]
    """
    generator = torch.Generator().manual_seed(stream_seed(seed, Purpose.PROBE_ORDER, epoch))
    order = torch.randperm(count, generator=generator).tolist()
    return [
        order[begin : begin + batch][low : low + micro_batch]
        for begin in range(0, count // batch * batch, batch)
        for low in range(0, batch, micro_batch)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------

Listing = tuple[Sequence[str | os.PathLike[str]], Sequence[str]]


def _torchvision(
    dataset: Callable[..., Any], train: str, test: str, files: str, targets: str, **options: Any
) -> Callable[[Path, str], Listing]:
    """List a dataset of torchvision, whose attributes hold the files and the numbers of their classes.

    The files are opened by this package: torchvision opens pictures of any format.
    """

    def listing(root: Path, role: str) -> Listing:
        split = train if role == "train" else test
        opened = dataset(str(root), split=split, download=False, **options)
        labels = [opened.classes[target] for target in getattr(opened, targets)]
        listed = getattr(opened, files)
        return [file[0] if isinstance(file, tuple) else file for file in listed], labels

    return listing


def _inat17(root: Path, role: str) -> Listing:
    annotations = root / ("train2017.json" if role == "train" else "val2017.json")
    content = json.loads(annotations.read_text(encoding="utf-8"))
    names = {category["id"]: category["name"] for category in content["categories"]}
    category_of = {row["image_id"]: names[row["category_id"]] for row in content["annotations"]}
    images = content["images"]
    return [root / image["file_name"] for image in images], [
        category_of[image["id"]] for image in images
    ]


def _cub(root: Path, role: str) -> Listing:
    root = root / "CUB_200_2011" if (root / "CUB_200_2011").is_dir() else root

    def column(name: str) -> dict[str, str]:
        """Read the second column of a file by the first, an image's number."""
        rows = (
            line.split(maxsplit=1)
            for line in (root / name).read_text(encoding="utf-8").splitlines()
        )
        return {row[0]: row[1].strip() for row in rows if row}

    of_training, files = column("train_test_split.txt"), column("images.txt")
    chosen = [
        file
        for number, file in files.items()
        if of_training[number] == ("1" if role == "train" else "0")
    ]
    return [root / "images" / file for file in chosen], [file.split("/")[0] for file in chosen]


_DATASETS: dict[str, Callable[[Path, str], Listing]] = {
    "cub": _cub,
    "food101": _torchvision(tvd.Food101, "train", "test", "_image_files", "_labels"),
    "pets": _torchvision(tvd.OxfordIIITPet, "trainval", "test", "_images", "_labels"),
    "aircraft": _torchvision(tvd.FGVCAircraft, "trainval", "test", "_image_files", "_labels"),
    # The 256 px edition, with its validation split: the test split has no labels.
    "places365": _torchvision(
        tvd.Places365, "train-standard", "val", "imgs", "targets", small=True
    ),
    "inat17": _inat17,
}


def open_set(spec: str, role: str) -> IndexedSet:
    """Index a labelled set of a form that the text of this module lists.

    Args:
        role: `train` or `test`; it chooses the split of a dataset that has splits of its own.

    Raises:
        UserError: a set that is not there or is incomplete.
    """
    kind, colon, root = spec.partition(":")
    if not colon or "/" in kind:
        return open_probe_set(spec, role)
    if kind not in _DATASETS:
        raise UserError(
            f"{spec!r} names the unknown dataset {kind!r}; known: {', '.join(_DATASETS)}, or give a folder"
        )
    try:
        files, labels = _DATASETS[kind](Path(root).expanduser(), role)
    except RuntimeError as error:  # torchvision's sentence offers a download
        raise UserError(
            f"{kind} is not complete under {root}; fetch and unpack it first, as docs/probing.md shows"
        ) from error
    pairs = zip(files, labels, strict=True)
    return IndexedSet(
        f"{kind}:{root} ({role})",
        [Picture(os.path.basename(file), file, label=label) for file, label in pairs],
    )


# ---------------------------------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------------------------------


def probe(
    model: A[str, "as for zerovl retrieval", "MODEL"],
    /,
    *,
    train: A[str, "of the forms above", "DATA"],
    test: A[str, "likewise", "DATA"],
    out: A[Path, "folder of the results", "DIR"],
    settings: Settings,
    device: str = "auto",
    amp: A[bool, "run the tower in bf16"] = False,
) -> None:
    """Probe a model, print a row, and write `linear_probe.json` into `--out`.

    Raises:
        UserError: data or a model that cannot be read or do not fit, an `--out` that cannot be written.
    """
    check_writable(out, folder=True)
    train_set, test_set = open_set(train, "train"), open_set(test, "test")
    classes = class_list(train_set, test_set)
    loaded, _, _, there = Encoder(model, device=device).load()
    tower = tower_before_projection(loaded.visual).eval()
    frozen = probed_model(tower, paper_transform_of(loaded.visual), device=there, amp=amp)
    features = picture_features(
        frozen,
        test_set,
        out / "features",
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
        probed_model(tower, augmentation, device=there, amp=amp),
        train_set,
        augmentation,
        classes,
        settings,
        state_file=out / "state.pt",
        evaluate=lambda head: accuracies(head_scores(head, features), targets)["top1"],
    )
    facts = {
        "model": model,
        "train": {"path": train_set.path, "images": len(train_set)},
        "test": {"path": test_set.path, "images": len(test_set)},
        "feature_width": features.shape[1],
        "settings": asdict(settings),
        "history": history,
    }
    names = distinct_names({label: train_set.names.get(label, label) for label in classes})
    scored = accuracies(head_scores(head, features), targets, names)
    report = {**facts, "classes": len(names), **scored}
    write_atomically(out / "linear_probe.json", json.dumps(report, indent=1) + "\n")
    print(f"{probe_row(report)}\nWritten to {out}")


if __name__ == "__main__":
    sys.exit(program(probe))
