"""Gradient accumulation under dropout, over many draws of the masks: is a step's gradient right on average, and how noisy?

    python -m scripts.bench.masks [--model tiny] [--steps 4,16] [--draws 1000] [--out FILE.json]

Each way takes the same K micro-batches again and again, every time with other masks. Against one graph over the whole batch:

    bias         |mean of its gradients - mean of one graph's| / |mean of one graph's|, of all towers together, without the part
                 that the finite number of draws explains (0 where it explains all)
    floor        that part
    noise        standard deviation of a step's gradient over the masks, as a ratio to one graph's
    logit_scale  mean gradient of the logit scale, as a ratio to one graph's

The model has open_clip's first temperature (0.07) and was trained for some steps on other batches from random weights: before,
its features differ by little but their masks. It is in training mode, in fp32 on the CPU.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.report.tables import markdown_table
from scripts.bench.harness import (
    MicroBatch,
    Setup,
    Way,
    build,
    decoupled,
    make_batches,
    one_graph,
    open_clip_accumulation,
    register,
    write,
)

ONE_GRAPH = "one graph"
CPU = torch.device("cpu")


@dataclass
class Gradients:
    """Moments of a way's gradients over the draws.

    Attributes:
        total: sum of the towers' gradients, as one vector.
        squares: sum of their squared norms.
        scale: sum of the logit scale's.
    """

    draws: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: float = 0.0
    scale: float = 0.0

    def add(self, setup: Setup) -> None:
        named = dict(setup.inner.named_parameters())
        scale = named.pop("logit_scale")
        towers = torch.cat(
            [p.grad.flatten().double() for p in named.values() if p.grad is not None]
        )
        self.draws += 1
        self.total = self.total + towers
        self.squares += float(towers.square().sum())
        assert scale.grad is not None
        self.scale += float(scale.grad)

    @property
    def mean(self) -> Tensor:
        return self.total / self.draws

    @property
    def variance(self) -> float:
        """Of a single gradient, summed over its entries."""
        of_mean = float(self.mean.square().sum())
        return (self.squares - self.draws * of_mean) / (self.draws - 1)


def contestants(setup: Setup) -> dict[str, Way]:
    """The ways by the name of their row; one graph first."""
    no_replay = DecoupledGradientAccumulation(
        setup.model, setup.clip_loss, retain=0, replay_rng=False, check="never"
    )
    return {
        ONE_GRAPH: partial(one_graph, setup),
        "open_clip --accum-freq": partial(open_clip_accumulation, setup),
        "two passes without replay": partial(no_replay.backward, prepare=setup.prepare),
        "DGA": decoupled(setup, 1, None),
    }


def compare(
    setup: Setup, micro_batches: Sequence[MicroBatch], draws: int
) -> dict[str, dict[str, float]]:
    """The columns of each way's row."""
    moments: dict[str, Gradients] = {}
    for number, (name, way) in enumerate(contestants(setup).items()):
        moments[name] = Gradients()
        torch.manual_seed(number)  # no way repeats the masks of another
        for _ in range(draws):
            setup.zero_grad()
            way(micro_batches)
            moments[name].add(setup)
    reference = moments[ONE_GRAPH]
    norm = float(reference.mean.norm())
    rows = {}
    for name, found in moments.items():
        floor = (found.variance + reference.variance) / draws
        distance = float((found.mean - reference.mean).square().sum())
        rows[name] = {
            "bias": max(0.0, distance - floor) ** 0.5 / norm,
            "floor": floor**0.5 / norm,
            "noise": (found.variance / reference.variance) ** 0.5,
            "logit_scale": found.scale / reference.scale,
        }
    return rows


def train(name: str, setup: Setup, batch: int, steps: int) -> None:
    """Take steps of AdamW over one graph, on a stream of made-up pairs whose image tells the text."""
    optimizer = torch.optim.AdamW(setup.inner.parameters(), lr=1e-3)
    torch.manual_seed(0)
    pairs = make_batches(name, setup.inner, [batch] * 4, seed=0)
    for step in range(steps):
        setup.zero_grad()
        one_graph(setup, [pairs[step % len(pairs)]])
        optimizer.step()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="small or tiny")
    parser.add_argument("--micro-batch", type=int, default=4, metavar="B")
    parser.add_argument("--steps", default="4,16", metavar="K,K", help="micro-batches a step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--trained", type=int, default=100, metavar="STEPS")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        name = register(args.model, None, args.dropout, Path(scratch))
        model: Any = build(name, 0.0, CPU, torch.float32)
        model.logit_scale.data.fill_(math.log(1 / 0.07))
        setup = Setup(model, CPU)
        train(name, setup, 4 * args.micro_batch, args.trained)
        for steps in map(int, args.steps.split(",")):
            micro_batches = make_batches(name, model, [args.micro_batch] * steps, seed=1)
            for way, found in compare(setup, micro_batches, args.draws).items():
                rows.append({"K": steps, "way": way, **found})
    about = f"{args.model}, micro-batch {args.micro_batch}, dropout {args.dropout}, "
    about += f"{args.trained} steps trained, {args.draws} draws"
    write({"about": about, "rows": rows}, f"{about}.\n\n{table(rows)}", args.out)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as Markdown; the reference's own row has no bias."""
    lines = []
    for row in rows:
        bias = f"{row['bias']:.2f} ({row['floor']:.2f})" if row["way"] != ONE_GRAPH else ""
        numbers = [f"{row[name]:.2f}" for name in ("noise", "logit_scale")]
        lines.append([str(row["K"]), row["way"], bias, *numbers])
    return markdown_table(["K", "way", "bias (floor)", "noise of a step", "logit_scale"], lines)


if __name__ == "__main__":
    main()
