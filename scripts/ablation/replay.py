"""The error of the gradient without replayed masks, measured over a training (the paper's Table 6).

    python -m scripts.ablation.replay --run FOLDER [--draws 64] [--dropout 0.1,0.3,0.5] [--out docs/results/replay.json]

A run's checkpoints are taken one by one. For one batch of 64 pairs as 8 x 8, the gradient is drawn many times, with replayed
masks and with other masks in the second pass. The bias is the length of the difference of the two means, over the length of the
mean with replay. Means of few draws differ by chance, by a length whose square is known from the draws' variance: it is taken
off.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.dga import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from scripts.drawn.emoji import EMOJI
from scripts.drawn.make import DrawnSample, load_drawn_split

MICRO_BATCHES, MICRO_BATCH = 8, 8


@dataclass(frozen=True)
class Bias:
    """The bias of the gradient without replay.

    Attributes:
        epoch, dropout: epoch and dropout of the model.
        bias: |mean without - mean with| / |mean with|, chance taken off; 0 if it is within chance.
        chance: the length that chance alone gives, over the same.
        cosine: cosine of the two means.
    """

    epoch: int
    dropout: float
    bias: float
    chance: float
    cosine: float


def set_dropout(model: nn.Module, probability: float) -> int:
    """Give every dropout module that drops anything this probability; returns how many there are."""
    modules = [
        module for module in model.modules() if isinstance(module, nn.Dropout) and module.p > 0
    ]
    for module in modules:
        module.p = probability
    return len(modules)


def gradient_bias(
    model: nn.Module, micro_batches: Sequence[tuple[Tensor, Tensor]], draws: int, *, seed: int = 0
) -> tuple[float, float, float]:
    """(bias, chance, cosine) of a model in training mode; see `Bias`."""
    means, variances = [], []
    for replay in (True, False):
        dga = DecoupledGradientAccumulation(
            model, ContrastiveLoss(), retain=0, check="never", replay_rng=replay
        )
        total: Tensor | float = 0.0
        squares = 0.0
        for draw in range(draws):
            torch.manual_seed(seed + 2 * draw + replay)
            model.zero_grad(set_to_none=True)
            dga.backward(micro_batches)
            gradient = torch.cat(
                [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
            )
            total = total + gradient
            squares += float(gradient @ gradient)
        assert isinstance(total, Tensor)
        mean = total / draws
        means.append(mean)
        variances.append(max(0.0, squares / draws - float(mean @ mean)) * draws / (draws - 1))
    right, other = means
    length = float(right.norm())
    chance = math.sqrt(sum(variances) / draws)
    difference = float((other - right).norm())
    bias = math.sqrt(max(0.0, difference**2 - chance**2))
    cosine = float(right @ other / (right.norm() * other.norm()))
    return bias / length, chance / length, cosine


def batch_of(samples: Sequence[DrawnSample], preprocess, tokenizer) -> list[tuple[Tensor, Tensor]]:
    """64 pairs, each of another concept, as 8 micro-batches of 8."""
    chosen = samples[: MICRO_BATCHES * MICRO_BATCH]
    images = torch.stack([preprocess(sample.image) for sample in chosen])
    texts = tokenizer([sample.caption for sample in chosen])
    return list(zip(images.split(MICRO_BATCH), texts.split(MICRO_BATCH), strict=True))


def measure(
    checkpoints: Iterable[Path], data: Path, dropouts: Sequence[float], draws: int
) -> list[Bias]:
    """The bias at each checkpoint of a run (`epoch_N.pt`), for each dropout.

    Raises:
        UserError: no checkpoint, or a model without dropout.
    """
    files = sorted(checkpoints, key=_epoch)
    if not files:
        raise UserError("there is no epoch_N.pt: train with --save-frequency 1")
    samples = [
        sample for sample in load_drawn_split(EMOJI, data, "val")["openmoji"] if not sample.held_out
    ]
    found = []
    for file in files:
        model, preprocess, tokenizer = load_model(file)
        model.output_dict = True  # as in training: features by name
        batch = batch_of(samples, preprocess, tokenizer)
        model.train()
        for dropout in dropouts:
            if not set_dropout(model, dropout):
                raise UserError(
                    f"the model of {file} has no dropout, so there is nothing to replay"
                )
            found.append(Bias(_epoch(file), dropout, *gradient_bias(model, batch, draws)))
            words = ", ".join(f"{name} {value:.4g}" for name, value in asdict(found[-1]).items())
            print(f"{file.name}: {words}", flush=True)
    return found


def _epoch(file: Path) -> int:
    return int(file.stem.removeprefix("epoch_"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, required=True, help="a run's folder, with checkpoints/epoch_N.pt"
    )
    parser.add_argument("--data", type=Path, default=Path("data/emoji"))
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--dropout", default="0.1,0.3,0.5")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    arguments = parser.parse_args(argv)
    if arguments.draws < 2:
        parser.error(f"--draws is 2 or more, got {arguments.draws}")
    logging.disable(logging.WARNING)  # DGA warns that replay is off, which is intended here
    try:
        dropouts = [float(word) for word in arguments.dropout.split(",")]
        found = measure(
            (arguments.run / "checkpoints").glob("epoch_*.pt"),
            arguments.data,
            dropouts,
            arguments.draws,
        )
    except UserError as error:
        print(f"replay: error: {error}", file=sys.stderr)
        return 2
    finally:
        logging.disable(logging.NOTSET)
    if arguments.out is not None:
        write_atomically(arguments.out, json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
