"""Linear heads between frozen features and a shared space, and their training on stored features.

A plain loop over index permutations, with a check on held-out pairs now and then.

`N` pairs a step, `F` width of features, `D` of the shared space, `m` samples, `b` pairs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from open_clip_zerovl.align.request import Recipe
from open_clip_zerovl.align.rows import Features, HeldOut, Pairs, epoch_captions, epoch_order
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import reading, save_atomically
from open_clip_zerovl.core.memory import available_bytes
from open_clip_zerovl.core.randomness import Purpose, seeded, stream_seed
from open_clip_zerovl.evaluate.metrics import QueryRanks, recalls, retrieval_ranks
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.optimizer import optimizer_step, parameter_groups, warmup_cosine

STEPS, EPOCHS = 2_000, (10, 200)  # of a training whose length nobody chose
CHECKS = 20  # at most
_MATRICES = 4  # of the logits' size that the loss holds at once, at most
_ENCODED_AT_ONCE = 8192
START_SCALE = math.log(1 / 0.07)  # of logit_scale, as open_clip's


class _Unit(torch.autograd.Function):
    """Rows of unit length. The gradient in two passes over the rows, where `F.normalize` takes eleven: (g - y <g, y>) / |x|."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length = x.norm(dim=-1, keepdim=True).clamp_min_(1e-12)
        y = x / length
        ctx.save_for_backward(y, length)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y, length = ctx.saved_tensors
        return torch.addcmul(grad, y, (grad * y).sum(dim=-1, keepdim=True), value=-1.0).div_(length)


class Heads(nn.Module):
    """Both heads and the temperature.

    Args:
        widths: the widths of the image's and the text's features.
        seed: the seed of the initial weights.
    """

    def __init__(self, widths: tuple[int, int], embed_dim: int, seed: int = 0) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        with seeded(stream_seed(seed, Purpose.ALIGN_HEADS)):
            self.image = nn.Linear(widths[0], embed_dim, bias=False)
            self.text = nn.Linear(widths[1], embed_dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(START_SCALE))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Project features (b, F) each to embeddings of unit length (b, D) each."""
        return _Unit.apply(self.image(images)), _Unit.apply(self.text(texts))

    @property
    def weights(self) -> int:
        """Count the numbers in the two heads."""
        return self.image.weight.numel() + self.text.weight.numel()


@dataclass
class Task:
    """The data on which the heads of two encoders are trained.

    Attributes:
        images: features of the pictures, held-out ones too.
        picture_ids, caption_ids: identity of each row.
        digest: the digest of the rows, which identifies a stopped training.
    """

    pairs: Pairs
    images: Features
    texts: Features
    picture_ids: np.ndarray
    caption_ids: np.ndarray
    device: torch.device
    digest: str


@dataclass
class Outcome:
    """A training's result.

    Attributes:
        heads: at the best check.
        scores: (epoch, held-out RSUM, mean loss since the check before) of each check.
        ranks: the ranks of the held-out queries, by the best heads.
        seconds: of training.
    """

    heads: Heads
    scores: list[tuple[int, float, float]]
    best_epoch: int
    ranks: dict[str, QueryRanks]
    metrics: dict[str, float]
    seconds: float


@dataclass
class _State:
    epoch: int = 0
    best_epoch: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)
    scores: list[tuple[int, float, float]] = field(default_factory=list)
    seconds: float = 0.0
    finished: bool = False
    chunk: int | None = None  # of the loss


# ---------------------------------------------------------------------------------------------------------------------
# Chosen by data and device
# ---------------------------------------------------------------------------------------------------------------------


def default_batch(device: torch.device, head_weights: int, embed_dim: int, samples: int) -> int:
    """Choose the pairs N of a step where nobody did: a power of two that the data fills.

    A pair costs 6 N D operations in the loss, and 4 to 6 for each weight of the heads. On a CPU N is as large as lets the loss
    cost no more than the heads; a GPU computes a large product better than a small one.
    """
    wanted = 32_768 if device.type == "cuda" else max(256, head_weights // embed_dim)
    return 1 << (min(wanted, samples).bit_length() - 1)


def default_epochs(samples: int, batch_size: int) -> int:
    """Choose as many epochs as make STEPS steps, within EPOCHS."""
    return min(EPOCHS[1], max(EPOCHS[0], math.ceil(STEPS / max(1, samples // batch_size))))


def chunk_rows(batch_size: int, device: torch.device) -> int | None:
    """Count the rows of the logits that the loss makes at once: None, all, where half of the free memory holds them.

    Logits in one chunk are made once, in several twice.
    """
    room, row = available_bytes(device), _MATRICES * 4 * batch_size
    if room is None or row * batch_size < room // 2:
        return None
    return max(64, room // 2 // row)


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


def make_optimizer(heads: Heads, recipe: Recipe) -> torch.optim.Optimizer:
    """Make AdamW, by which only matrices decay."""
    return torch.optim.AdamW(
        parameter_groups(heads, recipe.wd), lr=recipe.lr, betas=(0.9, 0.98), fused=True
    )


def take_step(
    heads: Heads,
    optimizer: torch.optim.Optimizer,
    loss: ContrastiveLoss,
    rows: Sequence[Tensor],
    ids: Mapping[str, Tensor],
) -> Tensor:
    """Take one step of the optimizer, no part of which waits for a GPU, and return its loss.

    Args:
        rows: features of the pictures and of the texts, (N, F) each.
        ids: see `ContrastiveLoss`.
    """
    optimizer.zero_grad(set_to_none=True)
    features = heads(*rows)
    value: Any = loss(*features, heads.logit_scale.exp(), ids=ids)
    value.backward()
    optimizer_step(heads, optimizer)
    return value.detach()


def train_heads(
    task: Task,
    recipe: Recipe,
    folder: Path,
    *,
    checked: Callable[[int, float, float], None] = lambda *_: None,
) -> Outcome:
    """Train heads, or go on where an earlier call with the same recipe and rows was stopped, to the same bits.

    Args:
        folder: for the state, written at each check.
        checked: called with each check's epoch, held-out RSUM and mean loss.

    Raises:
        UserError: as `epoch_order`; a loss that is not finite.
    """
    device = task.device
    heads = Heads((task.images.width, task.texts.width), recipe.embed_dim, recipe.seed)
    heads.to(device)
    optimizer = make_optimizer(heads, recipe)
    chunk = chunk_rows(recipe.batch_size, device)
    identity = f"{task.digest} {recipe}"
    state = _resumed(folder, identity, device, heads, optimizer) or _State(chunk=chunk)
    if chunk is not None and (state.chunk is None or state.chunk > chunk):
        state.chunk = (
            chunk  # less memory is free than there was; another chunk rounds in another way
        )
    loss = ContrastiveLoss(chunk_size=state.chunk, positives=recipe.positives or "pair")
    every = math.ceil(recipe.epochs / CHECKS)
    total, count = torch.zeros((), device=device), 0
    begin = time.monotonic() - state.seconds
    while not state.finished:
        value, steps = _epoch(task, recipe, heads, optimizer, loss, state.epoch)
        total, count = total + value, count + steps
        state.epoch += 1
        if state.epoch % every and state.epoch < recipe.epochs:
            continue
        mean = float(total) / count
        if not math.isfinite(mean):
            raise UserError(
                f"the loss is not finite after epoch {state.epoch}; give a lower --lr than {recipe.lr:g}"
            )
        score = held_out_scores(heads, task)[1]["rsum"]
        total, count = torch.zeros((), device=device), 0
        state.scores.append((state.epoch, score, mean))
        if score >= max(rsum for _, rsum, _ in state.scores):
            state.best_epoch = state.epoch
            state.best = {
                name: value.detach().cpu().clone() for name, value in heads.state_dict().items()
            }
        risen = next(
            checks
            for checks, (epoch, _, _) in enumerate(reversed(state.scores))
            if epoch == state.best_epoch
        )
        state.finished = state.epoch >= recipe.epochs or 0 < recipe.patience <= risen
        state.seconds = time.monotonic() - begin
        save_atomically(
            {
                "of": identity,
                "state": asdict(state),
                "heads": heads.state_dict(),
                "optimizer": optimizer.state_dict(),
            },
            folder / "state.pt",
        )
        checked(*state.scores[-1])
    heads.load_state_dict(state.best)
    ranks, metrics = held_out_scores(heads, task)
    return Outcome(heads, state.scores, state.best_epoch, ranks, metrics, state.seconds)


def _epoch(
    task: Task,
    recipe: Recipe,
    heads: Heads,
    optimizer: torch.optim.Optimizer,
    loss: ContrastiveLoss,
    epoch: int,
) -> tuple[Tensor, int]:
    """Take the steps of an epoch, and return the sum of their losses and their number."""
    pairs, device = task.pairs, task.device
    order = epoch_order(
        pairs.sizes,
        recipe.batch_size,
        seed=recipe.seed,
        epoch=epoch,
        names=pairs.names,
    )
    shown = pairs.texts[epoch_captions(pairs.first, seed=recipe.seed, epoch=epoch)]
    needed = {
        "image": task.picture_ids[pairs.images] if recipe.positives in ("image", "both") else None,
        "caption": task.caption_ids[shown] if recipe.positives in ("caption", "both") else None,
    }

    def everywhere(of_sample: np.ndarray) -> Tensor:  # (T, N) on the device, once an epoch
        return torch.from_numpy(of_sample[order]).to(device)

    images, texts = everywhere(pairs.images), everywhere(shown)
    ids = {name: everywhere(numbers) for name, numbers in needed.items() if numbers is not None}
    total, steps = torch.zeros((), device=device), len(order)
    all_steps = recipe.epochs * steps
    warmup = max(1, round(recipe.warmup_share * all_steps))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(epoch * steps + step, all_steps, recipe.lr, warmup)
        ids_of_step = {name: numbers[step] for name, numbers in ids.items()}
        rows = [task.images[images[step]], task.texts[texts[step]]]
        total += take_step(heads, optimizer, loss, rows, ids_of_step)
    return total, steps


@torch.no_grad()
def caption_accuracy(heads: Heads, task: Task) -> float:
    """Compute the share of the held-out pictures whose best caption of all different ones is one of their own."""
    held = task.pairs.held_out
    rows = np.concatenate([task.pairs.texts, held.texts])
    different, first = np.unique(task.caption_ids[rows], return_index=True)
    images, _, _ = held_out_embeddings(heads, task)
    captions = _embedded(heads.text, task.texts, rows[first], task.device)
    chosen = torch.cat([(part @ captions.T).argmax(dim=1).cpu() for part in images.split(1024)])
    best = different[chosen.numpy()]
    right = best[held.text_to_image] == task.caption_ids[held.texts]
    return float(
        np.bincount(held.text_to_image, right, minlength=len(held.images)).astype(bool).mean()
    )


def _embedded(head: Any, features: Features, rows: np.ndarray, device: torch.device) -> Tensor:
    """Send rows through a head, to unit length."""
    parts = torch.from_numpy(rows).to(device).split(_ENCODED_AT_ONCE)
    return torch.cat(
        [torch.nn.functional.normalize(head(features[part]), dim=-1) for part in parts]
    )


@torch.no_grad()
def held_out_embeddings(
    heads: Heads, task: Task, held: HeldOut | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Send held-out pictures (I, D) and captions (T, D) through the heads, with each caption's picture (T,).

    Args:
        held: some of the held-out pictures; None: all.
    """
    held = held or task.pairs.held_out
    images = _embedded(heads.image, task.images, held.images, task.device)
    texts = _embedded(heads.text, task.texts, held.texts, task.device)
    return images, texts, torch.from_numpy(held.text_to_image)


def held_out_scores(
    heads: Heads, task: Task, held: HeldOut | None = None
) -> tuple[dict[str, QueryRanks], dict[str, float]]:
    """Rank held-out pairs among themselves, and compute their recalls (arguments as for `held_out_embeddings`)."""
    ranks = retrieval_ranks(*held_out_embeddings(heads, task, held))
    return ranks, recalls(ranks)


def _resumed(
    folder: Path,
    identity: str,
    device: torch.device,
    heads: Heads,
    optimizer: torch.optim.Optimizer,
) -> _State | None:
    """Load the state of an earlier call with the same rows and recipe, which `identity` names.

    Returns:
        None without one.

    Raises:
        UserError: a damaged file.
    """
    file = folder / "state.pt"
    if not file.is_file():
        return None
    with reading(file, "remove it to train from the beginning"):
        stored = torch.load(file, map_location=device, weights_only=True)
        if stored.get("of") != identity:
            return None
    heads.load_state_dict(stored["heads"])
    optimizer.load_state_dict(stored["optimizer"])
    return _State(**stored["state"])
