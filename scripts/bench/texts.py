"""What sorting and cutting the texts of a step saves (`--sort-text`), in tokens and FLOPs; nothing is computed.

    python scripts/bench/texts.py [--model ViT-B-16+BERT-base] [--context 25] [--token-drop 0.25] [--out FILE.md]

Captions have the lengths of `accumulation.caption_lengths` (13.8 +- 5.2 tokens). FLOPs are counted on tensors that have shapes
only: those of an optimizer step with one graph retained, in which K-1 of the K micro-batches are forwarded twice.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from accumulation import build, caption_lengths, register
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dga import table

ROWS = 8  # samples of a counted pass
DRAWS = 20  # of a step's captions
STEPS = ((32, 16), (128, 16), (512, 4), (512, 32))  # (micro-batch, K)


class Towers:
    """FLOPs of a sample in a model's towers, forward and backward."""

    def __init__(self, model: str, token_drop: float) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            name = register(model, None, 0.1, Path(scratch))
            self._model = build(name, token_drop, torch.device("cpu"), torch.float32)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        for module in self._model.modules():
            for held in (module._parameters, module._buffers):
                held.update({key: self._fake.from_tensor(value) for key, value in held.items() if value is not None})

    def image(self) -> tuple[float, float]:
        side = self._model.visual.image_size
        height, width = (side, side) if isinstance(side, int) else side
        with self._fake:
            return self._count(self._model.visual, torch.empty(ROWS, 3, height, width))

    @cache  # noqa: B019 -- one of these a process
    def text(self, length: int) -> tuple[float, float]:
        with self._fake:
            return self._count(self._model.text, torch.empty(ROWS, length, dtype=torch.long))

    def _count(self, tower: nn.Module, inputs: Tensor) -> tuple[float, float]:
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            tower(inputs)
        with FlopCounterMode(display=False) as both:
            tower(inputs).sum().backward()
        one = forward.get_total_flops() / ROWS
        return one, both.get_total_flops() / ROWS - one


def texts_flops(towers: Towers, lengths: Sequence[int]) -> float:
    """Mean FLOPs of a text in a step whose micro-batches are cut to these lengths, the last one's graph retained."""
    total = 0.0
    for number, length in enumerate(lengths, start=1):
        forward, backward = towers.text(int(length))
        total += forward * (2 if number < len(lengths) else 1) + backward
    return total / len(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16+BERT-base")
    parser.add_argument("--context", type=int, default=25)
    parser.add_argument("--token-drop", type=float, default=0.25)
    parser.add_argument("--out", type=Path, metavar="FILE.md")
    args = parser.parse_args()
    towers = Towers(args.model, args.token_drop)
    image_forward, image_backward = towers.image()
    rows = []
    for size, k in STEPS:
        image = image_forward * (2 * k - 1) / k + image_backward
        whole = texts_flops(towers, [args.context] * k)
        tokens, flops = [], []
        for draw in range(DRAWS):
            lengths = np.sort(caption_lengths(size * k, args.context, draw)).reshape(k, size).max(axis=1)
            unsorted = caption_lengths(size * k, args.context, draw).reshape(k, size).max(axis=1)
            tokens.append((unsorted.mean() / args.context, lengths.mean() / args.context))
            flops.append(texts_flops(towers, lengths))
        cut, both = np.mean(tokens, axis=0)
        saved = (whole - np.mean(flops)) / (image + whole)
        rows.append(
            [str(size), str(k), f"{cut:.3f}", f"{both:.3f}", f"{whole / (image + whole):.3f}", f"{1 - saved:.3f}"]
        )
    header = ["micro-batch", "K", "tokens, cut", "tokens, sorted and cut", "text's share of FLOPs", "FLOPs of a step"]
    text = f"{args.model}, context {args.context}, token drop {args.token_drop}.\n\n{table(header, rows)}"
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
