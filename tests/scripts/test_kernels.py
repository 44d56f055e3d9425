"""scripts/bench/kernels.py: its walk of a graph takes the engine's kernels, and its counts tell what they name."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from scripts.bench import harness
from scripts.bench import kernels as counting

pytestmark = pytest.mark.slow(reason="counts the kernels of tiny models")


def backward_kernels(backward) -> Counter:
    """The kernels of a backward pass of the tiny model's features on the CPU, by name."""
    torch.manual_seed(0)
    with counting.Kernels() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = backward_kernels.model(*backward_kernels.pair)
        seen.backward = True
        backward([outputs["image_features"], outputs["text_features"]])
    return Counter(kernel.name for kernel in seen.seen if kernel.backward)


def test_the_walk_takes_the_engines_kernels(tmp_path):
    name = harness.register("tiny", 0.1, tmp_path)
    model = harness.build(name, 0.25, torch.device("cpu"), torch.float32)
    images, texts = harness.make_batches(name, model, [4], seed=1)[0]
    backward_kernels.model, backward_kernels.pair = model, (images / 255, texts)
    engine = backward_kernels(
        lambda outputs: torch.autograd.backward(outputs, [torch.empty_like(o) for o in outputs])
    )
    model.zero_grad(set_to_none=True)
    walked = backward_kernels(counting.backpropagate)
    # Recorded gradients are held, so that the engine copies them where it would take them as they are.
    copies = {"copy", "new_empty_strided"}
    assert walked == Counter({key: n for key, n in engine.items() if key not in copies})
    assert sum(walked.values()) > 100


def test_a_row_of_a_tiny_model(tmp_path: Path):
    name = harness.register("tiny", 0.1, tmp_path)
    row = counting.row_of(name, 4)
    forward, both, replayed = (
        int(row[key]) for key in ("kernels forward", "kernels", "kernels replayed")
    )
    assert (
        50 < forward < both < replayed < both + forward + 100
    )  # gradients are added, weights cast once
    assert float(row["MB replayed"]) > float(row["MB a sample"]) > float(row["MB compiled"]) > 0
    assert int(row["kernels compiled"]) < both
