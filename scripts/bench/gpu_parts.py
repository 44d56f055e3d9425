"""The measurements of scripts/gpu.py, each in a process of its own; each result is printed at once.

    python -m scripts.bench.gpu_parts machine|steps|loss|plan [--rehearse] [--compile] [--have KEY ...]

A result is a line `RESULT {"key": ..., ...}`; keys named with --have are not measured again. Sizes are the paper's: ViT-B/16
at 224 px with token drop 0.25, BERT-base at 25 tokens with dropout 0.1, micro-batches of 512, bf16 autocast, TF32 as
open_clip's training sets it. --rehearse takes tiny ones on a GPU or the CPU.

    machine  hardware and versions, bf16 matrix rate, copy bandwidth
    steps    the gradient of K micro-batches: seconds, samples/s, peak memory; the baseline is plain training
    loss     the loss and its gradient at N pairs of width 512
    plan     `zerovl plan` compared with a training with the same arguments
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from open_clip_zerovl.core.memory import keep_freed_memory
from open_clip_zerovl.plan.gpus import GPUS
from open_clip_zerovl.shards.writing import Sample, write_source
from scripts.bench.harness import (
    SORTED,
    MicroBatch,
    Setup,
    Way,
    build,
    decoupled,
    decoupled_and_sorted,
    make_batches,
    open_clip_accumulation,
    peak_bytes,
    plain,
    register,
    seconds,
    tower_flops,
    two_pass,
    write_bert,
)
from scripts.bench.loader import CAPTION, photograph
from scripts.bench.loss import measure as measure_loss

PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "numpy",
    "open_clip_torch",
    "webdataset",
    "triton",
)
LOSS_CHUNK = 1024
DISTINCT_BATCHES = 4  # different micro-batches; a step of more repeats them
WARM_UP_MICRO_BATCHES = 2
LOSS_WIDTH = 512
LOGGED_SECONDS = re.compile(r"Batch \(t\): ([\d.]+)")


class Sizes:
    """Sizes of the measurements: the paper's, or tiny for a rehearsal."""

    def __init__(self, rehearse: bool) -> None:
        self.model = "tiny" if rehearse else "ViT-B-16+BERT-base"
        self.micro_batch = 4 if rehearse else 512
        self.steps = (1, 4) if rehearse else (1, 4, 16, 32)
        self.pairs = (256, 512) if rehearse else (16_384, 65_536, 262_144, 1_048_576)
        self.matrix = 256 if rehearse else 8192
        self.copy_bytes = 2**20 if rehearse else 2**32
        # Model, micro-batch and K; pairs of each of two sources, pixels, passes; loader processes; least steps, steps skipped.
        self.plan_model = "zerovl-emoji" if rehearse else "zerovl-ViT-B-16-BERT-base"
        self.plan_batch, self.plan_steps = (8, 2) if rehearse else (512, 8)
        self.plan_pairs, self.plan_px, self.plan_passes = (
            (64, 64, 2) if rehearse else (8192, 256, 10)
        )
        self.plan_workers = 1 if rehearse else 12
        self.plan_least, self.plan_skipped = (10, 2) if rehearse else (35, 5)


def emit(key: str, **values: Any) -> None:
    """Hand a result to scripts/gpu.py."""
    print("RESULT " + json.dumps({"key": key, **values}), flush=True)


def device_here() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU ({platform.machine()})"
    )


def datasheet_tflops(name: str) -> float | None:
    """The maker's dense bf16 rate of the GPU of this name, None if the table does not have it."""
    bare = name.lower().replace(" ", "")
    found = [
        gpu
        for gpu in GPUS.values()
        if gpu.label.lower().replace(" ", "").removesuffix("gb") in bare
    ]
    return max((gpu.tflops for gpu in found), default=None)


# ---------------------------------------------------------------------------------------------------------------------
# The machine
# ---------------------------------------------------------------------------------------------------------------------


def machine(sizes: Sizes, have: Sequence[str]) -> None:
    device = device_here()
    name = device_name(device)
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    installed = {
        distribution.metadata["Name"] for distribution in importlib.metadata.distributions()
    }
    versions = {
        package: importlib.metadata.version(package) for package in PACKAGES if package in installed
    }
    emit(
        "machine",
        device=name,
        memory_gib=None if total is None else total / 2**30,
        python=platform.python_version(),
        cuda=torch.version.cuda,
        versions=versions,
        datasheet_tflops=datasheet_tflops(name),
        matrix_tflops=matrix_tflops(device, sizes.matrix),
        copy_tb_per_second=copy_rate(device, sizes.copy_bytes),
    )


def _median_seconds(device: torch.device, once: Callable[[], Any], rounds: int = 10) -> float:
    """Median wall-clock seconds of a call, until the device is done; after three calls to warm up."""
    setup = Setup(torch.nn.Linear(1, 1), device)
    took = [seconds(setup, lambda _: once(), [], "wall") for _ in range(rounds + 3)]
    return statistics.median(took[3:])


def matrix_tflops(device: torch.device, size: int) -> float:
    """10^12 operations a second in a bf16 product of random square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _median_seconds(device, lambda: a @ b) / 1e12


def copy_rate(device: torch.device, size: int) -> float:
    """TB a second, read and written, of a copy on the device."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median_seconds(device, lambda: target.copy_(source)) / 1e12


# ---------------------------------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------------------------------


def contestants(setup: Setup, steps: int) -> dict[str, Way]:
    """The ways to take a step of K micro-batches, by the name of its row."""
    if steps == 1:
        return {"plain": partial(plain, setup), "ours, retain 1": decoupled(setup, 1, LOSS_CHUNK)}
    return {
        "open_clip --accum-freq": partial(open_clip_accumulation, setup),
        "two-pass (GradCache)": two_pass(setup),
        "ours, retain 1": decoupled(setup, 1, LOSS_CHUNK),
        "ours, retain auto": decoupled(setup, "auto", LOSS_CHUNK),
        f"ours, retain 1, {SORTED}": decoupled_and_sorted(setup, 1, LOSS_CHUNK),
    }


def graphs_kept(way: Way, sizes: list[int]) -> int | None:
    """R of one of our ways, None for another way."""
    dga = getattr(getattr(way, "func", None), "__self__", None)
    return None if dga is None else dga._retention.graphs(sizes)


def steps(sizes: Sizes, have: Sequence[str], compiled: bool) -> None:
    device = device_here()
    if device.type == "cuda":  # as open_clip's main sets them
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    else:
        keep_freed_memory()
    mode = "compiled" if compiled else "eager"
    with tempfile.TemporaryDirectory() as scratch:
        name = register(sizes.model, None, 0.1, Path(scratch))
        model = build(name, 0.25, device, torch.float32)
    setup = Setup(model, device, partial(torch.autocast, device.type, dtype=torch.bfloat16))
    batches = make_batches(
        name, model, [sizes.micro_batch] * min(DISTINCT_BATCHES, max(sizes.steps)), seed=1
    )
    _, flops = tower_flops(setup, (batches[0][0][:2], batches[0][1][:2]))
    gflops = flops / 2 / 1e9
    if compiled:
        setup.model = torch.compile(model)
    yardstick = partial(plain, setup)
    first = seconds(
        setup, yardstick, batches[:1], "wall"
    )  # loads kernels, compiles the pass with a graph
    first += seconds(
        setup, decoupled(setup, 0, LOSS_CHUNK), batches[:1], "wall"
    )  # compiles the pass without
    if f"{mode}, first" not in have:
        emit(
            f"{mode}, first", seconds=first, gflops_per_sample=gflops, micro_batch=sizes.micro_batch
        )
    for k in sizes.steps:
        for row, way in contestants(setup, k).items():
            key = f"{mode}, K={k}, {row}"
            if key in have:
                continue
            try:
                measured = measure_way(setup, way, yardstick, repeated(batches, k), gflops)
            except torch.OutOfMemoryError:
                measured = {"error": "out of memory"}
            setup.zero_grad()
            emit(key, **measured)
            del way
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def repeated(batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    return [batches[index % len(batches)] for index in range(count)]


def measure_way(
    setup: Setup, way: Way, yardstick: Way, batches: list[MicroBatch], gflops_per_sample: float
) -> dict[str, Any]:
    """Seconds of a step and their ratio to plain training's just before, samples a second, FLOPs' utilisation, peak memory."""
    for _ in range(2):  # "auto" measures in the first step and decides in the second
        seconds(setup, way, batches[:WARM_UP_MICRO_BATCHES], "wall")
    short = batches[:DISTINCT_BATCHES]
    took, ratios = [], []
    for _ in range(3 if len(batches) <= DISTINCT_BATCHES else 2):
        a_batch = seconds(setup, yardstick, short, "wall") / len(short)
        took.append(seconds(setup, way, batches, "wall"))
        ratios.append(took[-1] / len(batches) / a_batch)
    per_second = sum(len(images) for images, _ in batches) / statistics.median(took)
    sheet = datasheet_tflops(device_name(setup.device))
    return {
        "seconds": statistics.median(took),
        "seconds_range": [min(took), max(took)],
        "ratio_to_plain": statistics.median(ratios),
        "samples_per_second": per_second,
        "flops_utilisation": None
        if sheet is None
        else per_second * gflops_per_sample / (1000 * sheet),
        "peak_gib": peak_bytes(setup, way, batches) / 2**30,
        "retained": graphs_kept(way, [len(images) for images, _ in batches]),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------------------


def loss(sizes: Sizes, have: Sequence[str]) -> None:
    device = device_here()
    for n in sizes.pairs:
        if any(key.startswith(f"N={n}, ") for key in have):
            continue
        for row in measure_loss([n], LOSS_WIDTH, LOSS_CHUNK, device):
            emit(f"N={n}, {row['loss']}", seconds=row["seconds"], peak_gib=row["peak_mib"] / 1024)
        if device.type == "cuda":
            torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------------


def made_up_source(folder: Path, count: int, px: int) -> None:
    """A source of JPEGs with a photograph's spectrum, `px` on a side, and captions of 5 to 15 words."""
    pictures = [
        photograph(seed, px, px) for seed in range(min(count, 256))
    ]  # repeated; decoding costs the same
    rng = np.random.default_rng(0)
    captions = (
        " ".join(rng.choice(CAPTION.split(), size=int(rng.integers(5, 16)))) for _ in range(count)
    )
    samples = [
        Sample(f"{number:08d}", {"jpg": pictures[number % len(pictures)], "txt": caption.encode()})
        for number, caption in enumerate(captions)
    ]
    write_source(folder, samples, shard_size=max(1, count // 16))


def _output(command: list[str]) -> str:
    """Run a command and return its output. Status 1 is allowed: `zerovl plan` found something missing."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(
            f"{' '.join(command[2:4])} ended with status {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout


def plan(sizes: Sizes, have: Sequence[str]) -> None:
    if "plan" in have:
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in "ab":
            made_up_source(folder / name, sizes.plan_pairs, sizes.plan_px)
        bert = write_bert(
            folder / "bert", "tiny" if sizes.plan_model == "zerovl-emoji" else "base", 0.1
        )
        cuda = torch.cuda.is_available()
        arguments = [
            "--model", sizes.plan_model, "--text-model", str(bert), "--train-data", f"a={folder / 'a'}::b={folder / 'b'}",
            "--train-data-upsampling-factors", f"a={sizes.plan_passes}::b={sizes.plan_passes}", "--sampling", "debiased",
            "--batch-size", str(sizes.plan_batch), "--dga-steps", str(sizes.plan_steps), "--dga-retain", "auto",
            "--loss-chunk", str(LOSS_CHUNK), "--coin-flip-mixup", "--precision", "amp_bf16" if cuda else "fp32",
            "--device", "cuda" if cuda else "cpu", "--workers", str(sizes.plan_workers), "--epochs", "1",
            "--warmup", "5", "--log-every-n-steps", "1", "--save-frequency", "0",
        ]  # fmt: skip
        if sizes.plan_model != "zerovl-emoji":  # a ConvNeXt has no tokens to drop
            arguments += ["--token-drop", "0.25"]
        planned = json.loads(
            _output([sys.executable, "-m", "open_clip_zerovl.cli", "plan", "--json", *arguments])
        )
        _output(
            [sys.executable, "-m", "training.main", *arguments, "--logs", scratch, "--name", "run"]
        )
        logged = LOGGED_SECONDS.findall((folder / "run" / "out.log").read_text("utf-8"))
    real = [float(seconds) for seconds in logged[sizes.plan_skipped :]]
    if len(logged) < sizes.plan_least:
        raise SystemExit(
            f"plan: the training logged {len(logged)} steps, and {sizes.plan_least} are needed"
        )
    emit(
        "plan",
        model=sizes.plan_model,
        micro_batch=sizes.plan_batch,
        steps=sizes.plan_steps,
        retained=planned["retained"],
        planned_seconds=planned["step_seconds"],
        planned_compute_seconds=planned["compute_seconds"],
        planned_peak_gib=planned["peak_bytes"] / 2**30,
        real_seconds=statistics.median(real),
        planned_over_real=planned["step_seconds"] / statistics.median(real),
        real_range=[min(real), max(real)],
        logged_steps=len(real),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("machine", "steps", "loss", "plan"))
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the model in every way of `steps`"
    )
    parser.add_argument("--have", nargs="*", default=[], metavar="KEY")
    args = parser.parse_args()
    sizes = Sizes(args.rehearse)
    if args.part == "steps":
        steps(sizes, args.have, args.compile)
    else:
        {"machine": machine, "loss": loss, "plan": plan}[args.part](sizes, args.have)


if __name__ == "__main__":
    main()
