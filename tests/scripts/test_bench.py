"""scripts/bench/step.py gives a row for each way, and the columns that do not depend on the machine are as they must be.

Nothing timed is asserted: times are for a quiet machine and a report.
"""

import json

import pytest
import torch

from scripts.bench import step
from scripts.bench.harness import PeakBytes
from scripts.program import program

pytestmark = pytest.mark.slow  # runs the benchmark's program

STEPS = 3


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of a run, by (K, way)."""
    out = tmp_path_factory.mktemp("bench") / "deep" / "step.json"
    argv = f"--model tiny --device cpu --micro-batch 4 --steps 1,{STEPS} --rounds 1 --loss-chunk 5"
    argv += f" --error-steps {STEPS} --error-batch 2 --out {out}"
    assert program(step.step, argv.split()) == 0
    return {(row["steps"], row["way"]): row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.parametrize(
    ("way", "forwards"),
    [
        ("plain micro-batches", 1),
        ("one graph", 1),
        ("open_clip --accum-freq", 2),
        ("two-pass (GradCache)", 2),
        ("ours, retain 1", 1 + (STEPS - 1) / STEPS),
        ("ours, retain 2", 1 + (STEPS - 2) / STEPS),
    ],
)
def test_passes_and_flops_are_the_ideal(rows, way, forwards):
    row = rows[STEPS, way]
    assert row["forwards_per_sample"] == pytest.approx(forwards)
    assert row["backwards_per_sample"] == 1
    assert row["ideal"] == pytest.approx((forwards + 2) / 3)
    assert row["flops"] == pytest.approx(
        row["flops_due"], rel=0.02
    )  # beside the towers' the loss' own products
    assert row["time"] > 0


def test_sorted_texts_take_fewer_flops_and_auto_keeps_graphs(rows):
    assert (
        rows[STEPS, "ours, retain 1, texts sorted"]["flops"]
        < 0.99 * rows[STEPS, "ours, retain 1"]["flops"]
    )
    assert rows[STEPS, "ours, retain auto"]["retained"] == STEPS


def test_memory_and_errors_tell_the_ways_apart(rows):
    assert rows[1, "plain micro-batches"]["memory"] == pytest.approx(1)
    assert rows[STEPS, "ours, retain 1"]["memory"] < rows[STEPS, "ours, retain 2"]["memory"]
    assert rows[STEPS, "ours, retain 1"]["memory"] < rows[STEPS, "one graph"]["memory"]
    ours = ("ours, retain 1", "ours, retain 2", "ours, retain auto", "ours, retain 1, texts sorted")
    for way in ("two-pass (GradCache)", *ours):
        assert max(rows[STEPS, way]["errors"].values()) < 1e-10
    assert min(rows[STEPS, "open_clip --accum-freq"]["errors"].values()) > 0.1
    assert rows[STEPS, "plain micro-batches"]["errors"] is None


def test_peak_counts_what_is_alive_at_once():
    with PeakBytes() as live:
        for _ in range(5):
            a = torch.zeros(256)  # 1 KiB, the one before it still alive
            b = a + 1
            del a, b
    assert live.peak == 2 * 1024
