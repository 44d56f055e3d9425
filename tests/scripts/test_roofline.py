"""scripts/bench/roofline.py: its walk of a graph takes the engine's kernels, and its counts tell what they name."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from scripts.bench import harness, roofline

pytestmark = pytest.mark.slow(reason="counts and compiles tiny models, half a minute")


def backward_kernels(backward) -> Counter:
    """The kernels of a backward pass of the tiny model's features on the CPU, by name."""
    torch.manual_seed(0)
    with roofline.Kernels() as kernels, torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = backward_kernels.model(*backward_kernels.pair)
        kernels.backward = True
        backward([outputs["image_features"], outputs["text_features"]])
    return Counter(kernel.name for kernel in kernels.seen if kernel.backward)


def test_the_walk_takes_the_engines_kernels(tmp_path):
    name = harness.register("tiny", None, 0.1, tmp_path)
    model = harness.build(name, 0.25, torch.device("cpu"), torch.float32)
    images, texts = harness.make_batches(name, model, [4], seed=1)[0]
    backward_kernels.model, backward_kernels.pair = model, (images / 255, texts)
    engine = backward_kernels(
        lambda outputs: torch.autograd.backward(outputs, [torch.empty_like(o) for o in outputs])
    )
    model.zero_grad(set_to_none=True)
    walked = backward_kernels(roofline.backpropagate)
    # Recorded gradients are held, so that the engine copies them where it would take them as they are.
    copies = {"copy", "new_empty_strided"}
    assert walked == Counter({key: n for key, n in engine.items() if key not in copies})
    assert sum(walked.values()) > 100


def test_a_row_of_a_tiny_model(tmp_path: Path):
    name = harness.register("tiny", None, 0.1, tmp_path)
    row, speeds = roofline.row_of(name, 4)
    forward, both, replayed = (
        int(row[key]) for key in ("kernels forward", "kernels", "kernels replayed")
    )
    assert (
        50 < forward < both < replayed < both + forward + 100
    )  # gradients are added, weights cast once
    assert float(row["MB replayed"]) > float(row["MB a sample"]) > 0
    by_way = {(gpu, way): float(hours) for gpu, way, _, hours in speeds}
    assert by_way["H100", "compiled"] < by_way["H100", "eager"]
    assert roofline.waits_of_a_step(name) == 0


def test_a_release_has_one_row(tmp_path: Path):
    file = tmp_path / "roofline.csv"
    for release, kernels in (("0.1.0", "3"), ("0.2.0", "2"), ("0.2.0", "1")):
        rows = roofline.with_row(file, {"release": release, "kernels": kernels})
    assert [row["kernels"] for row in rows] == ["3", "1"]
    assert file.read_text() == "release,kernels\n0.1.0,3\n0.2.0,1\n"
