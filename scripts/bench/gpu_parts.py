"""The parts of scripts/gpu.py, which calls each by its name in `gpu.PARTS` and writes every result at once.

Steps are those of the paper's model (ViT-B/16 with token drop 0.25, BERT-base at 25 tokens), in bf16 autocast, with torch's
flags and without waits as training has them. With `session.rehearse` the model and all sizes are tiny.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial, partialmethod
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from open_clip.loss import ClipLoss
from torch import nn
from torch.profiler import ProfilerActivity, profile

from open_clip_zerovl.core.memory import available_bytes
from open_clip_zerovl.core.processes import end_with_parent
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.gpu import compile_blocks, same_masks
from open_clip_zerovl.report.run import read_record
from open_clip_zerovl.shards.files import Sample, write_source
from scripts.bench.harness import (
    MicroBatch,
    Setup,
    Way,
    build,
    decoupled,
    decoupled_and_sorted,
    forwards_only,
    gradient_errors,
    make_batches,
    one_graph,
    open_clip_accumulation,
    plain,
    recipe_step,
    reference_gradient,
    register,
    seconds,
    tower_flops,
    two_pass,
    write_bert,
)
from scripts.bench.loader import CAPTION, photograph
from scripts.gpu import ROOT, Session

ENVIRONMENT = dict(os.environ)  # tests change it
GIB = 2**30
LOSS_CHUNK = 1024
DISTINCT_BATCHES = 4  # a step of more repeats them
PACKAGES = ("torch", "torchvision", "timm", "transformers", "numpy", "triton")
SEED = 3  # of the masks of compared gradients


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    model: str = "ViT-B-16+BERT-base"
    micro_batch: int = 512
    plain_batches: tuple[int, ...] = (128, 256, 512, 1024)
    most_steps: int = 32
    compared: int = 32  # samples in a micro-batch of compared gradients
    matrix: int = 8192
    copy_bytes: int = 2**32
    pairs: tuple[int, ...] = (16_384, 65_536, 262_144)
    compiler: str = "inductor"
    trained: tuple[str, ...] = ("zerovl-ViT-B-16-BERT-base", "base", "--token-drop", "0.25")
    trained_pairs: int = 4096  # in each of two sources
    passes: int = 20
    px: int = 256
    workers: int = 14
    stop: int = 25  # step of the training at which it is stopped
    save: int = 20


TINY = Sizes(
    model="tiny", micro_batch=4, plain_batches=(2, 4), most_steps=16, compared=4, matrix=256, copy_bytes=2**20,
    pairs=(256,), compiler="eager", trained=("zerovl-emoji", "tiny"), trained_pairs=64, px=64,
    workers=1, stop=10, save=5,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What the parts share
# ---------------------------------------------------------------------------------------------------------------------


class Bench:
    """The model on its device, and micro-batches of it."""

    def __init__(self, sizes: Sizes, scratch: Path) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self.name = register(sizes.model, 0.1, scratch)
        model = build(self.name, 0.25, device(), torch.float32)
        self.setup = Setup(model, device(), autocast())
        rows = [sizes.micro_batch] * DISTINCT_BATCHES
        self.batches = make_batches(self.name, model, rows, seed=1)
        images, texts = self.batches[0]
        self.gflops = tower_flops(self.setup, (images[:2], texts[:2]))[1] / 2 / 1e9

    def repeated(self, count: int) -> list[MicroBatch]:
        return [self.batches[index % len(self.batches)] for index in range(count)]

    def small(self, size: int) -> list[MicroBatch]:
        """The first samples of three micro-batches."""
        return [(images[:size], texts[:size]) for images, texts in self.batches[:3]]


@cache
def device() -> torch.device:
    """Return the device, with the flags that open_clip's main sets."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda", 0)


def on_gpu() -> bool:
    return device().type == "cuda"


def autocast() -> Callable[[], Any]:
    return partial(torch.autocast, device().type, dtype=torch.bfloat16)


def sizes_of(session: Session) -> Sizes:
    return TINY if session.rehearse else Sizes()


@cache
def bench_of(session: Session) -> Bench:
    return Bench(sizes_of(session), session.work / "model")


def clear() -> None:
    """Free what earlier measurements left on the GPU."""
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


def median_seconds(once: Callable[[], Any], rounds: int = 10, warm_up: int = 3) -> float:
    """Median wall-clock seconds of a call, until the device is done."""
    setup = Setup(nn.Linear(1, 1), device())
    took = [seconds(setup, lambda _: once(), []) for _ in range(warm_up + rounds)]
    return statistics.median(took[warm_up:])


def timed_step(
    bench: Bench, way: Way, micro_batches: Sequence[MicroBatch], rounds: int, warm_up: int
) -> dict[str, Any]:
    """Time a step, and read the peak of its memory in the timed rounds: cuDNN's trials come before."""
    clear()
    for _ in range(warm_up):
        seconds(bench.setup, way, micro_batches)
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    took = [seconds(bench.setup, way, micro_batches) for _ in range(rounds)]
    rate = sum(len(images) for images, _ in micro_batches) / statistics.median(took)
    dga = getattr(getattr(way, "func", None), "__self__", None)
    bench.setup.zero_grad()
    return {
        "seconds": statistics.median(took),
        "samples_per_second": rate,
        "tflops": rate * bench.gflops / 1000,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu() else None,
        "retained": dga and dga._retention.graphs([len(images) for images, _ in micro_batches]),
    }


def ways(bench: Bench) -> dict[str, tuple[Way, int, int, int]]:
    """The steps of the eager and the compiled parts: (way, micro-batches, rounds, warm-up)."""
    setup = bench.setup
    return {
        "forward without graph": (partial(forwards_only, setup), 4, 2, 1),
        "plain": (partial(plain, setup), 4, 2, 1),
        "K=8, ours, R=1": (decoupled(setup, 1, LOSS_CHUNK), 8, 2, 1),
        "K=8, ours, R=1, texts sorted": (decoupled_and_sorted(setup, 1, LOSS_CHUNK), 8, 2, 1),
    }


def measure_ways(
    session: Session, bench: Bench, chosen: dict[str, tuple[Way, int, int, int]]
) -> None:
    for key, (way, count, rounds, warm_up) in chosen.items():
        session.measure(
            key, partial(timed_step, bench, way, bench.repeated(count), rounds, warm_up)
        )


def run_tests(session: Session, *words: str) -> None:
    """Run tests marked gpu in this process; each one is a result."""

    class Results:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            session.begin(nodeid, limit=300)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                said = {"error": str(report.longrepr)[-600:]} if report.failed else {}
                session.write(report.nodeid, outcome=report.outcome, **said)
                session.end_if_broken()

    clear()
    os.chdir(ROOT)
    deselected = [f"--deselect={key}" for key in session.results]
    flags = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    status = pytest.main([*flags, *words, *deselected], plugins=[Results()])
    if status not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        raise RuntimeError(f"pytest ended with {status!r}")


def output_of(session: Session, *words: str) -> str:
    """Run a Python program that ends with this process, and return its output.

    Raises:
        RuntimeError: it failed.
    """
    clear()
    done = subprocess.run(
        [sys.executable, *words], env=ENVIRONMENT, cwd=session.work, capture_output=True, text=True,
        preexec_fn=partial(end_with_parent, signal.SIGKILL),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words[:2])} ended with {done.returncode}: {done.stderr[-300:]}"
        )
    return done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------------------------------


def machine(session: Session) -> None:
    session.measure("machine", partial(machine_values, sizes_of(session)))


def machine_values(sizes: Sizes) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if on_gpu() else f"CPU ({platform.machine()})"
    installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    a, b = (random_bf16(sizes.matrix, sizes.matrix) for _ in range(2))
    tokens, weights = random_bf16(sizes.micro_batch * 148, 768), random_bf16(4 * 768, 768)
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    host = torch.zeros(sizes.copy_bytes // 16, dtype=torch.uint8, pin_memory=on_gpu())
    to_device = target[: len(host)]
    shared = os.statvfs("/dev/shm")
    return {
        "device": name,
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / GIB if on_gpu() else None,
        "cores": os.cpu_count(),
        "shm_gib": shared.f_blocks * shared.f_frsize / GIB,
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name) for name in PACKAGES if name in installed
        },
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "matrix_tflops": 2 * sizes.matrix**3 / median_seconds(lambda: a @ b) / 1e12,
        "mlp_tflops": 2
        * tokens.numel()
        * len(weights)
        / median_seconds(lambda: tokens @ weights.T)
        / 1e12,
        "copy_tb_per_second": 2 * len(source) / median_seconds(lambda: target.copy_(source)) / 1e12,
        "host_to_device_gb_per_second": len(host)
        / median_seconds(lambda: to_device.copy_(host, non_blocking=True))
        / 1e9,
    }


def random_bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device(), dtype=torch.bfloat16)


def exactness(session: Session) -> None:
    run_tests(session, "tests/gpu/test_exactness.py")


def gradients(session: Session) -> None:
    for precision, context in {"bf16": autocast(), "fp32": nullcontext}.items():
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        setup = Setup(bench_of(session).setup.inner, device(), context)
        compare_gradients(session, setup, precision)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def compare_gradients(session: Session, setup: Setup, precision: str) -> None:
    """Compare the one-graph gradient with itself, with that of other masks, and with that of each way."""
    size = sizes_of(session).compared
    small = bench_of(session).small(size)
    reference = cache(partial(reference_gradient, setup, small, SEED))
    compared: dict[str, Way] = {
        "one graph again": partial(one_graph_of, setup, SEED),
        "one graph under other masks": partial(one_graph_of, setup, SEED + 1),
        "ours, R=1": decoupled(setup, 1, size),
        "ours, R=0": decoupled(setup, 0, size),
        "ours, R=1, texts sorted": decoupled_and_sorted(setup, 1, size),
        "open_clip --accum-freq": partial(open_clip_accumulation, setup),
    }

    def error(row: str) -> dict[str, float]:
        wanted = reference(sort="sorted" in row)
        return gradient_errors(setup, compared[row], small, SEED, wanted)

    for row in compared:
        session.measure(f"{precision}, {row}", partial(error, row))


def one_graph_of(setup: Setup, seed: int, micro_batches: Sequence[MicroBatch]) -> None:
    """Leave the one-graph gradient in `.grad`, under the masks of `seed`."""
    for name, gradient in reference_gradient(setup, micro_batches, seed).items():
        setup.inner.get_parameter(name).grad = gradient


def steps(session: Session) -> None:
    bench, sizes = bench_of(session), sizes_of(session)
    session.measure("GFLOP a sample", lambda: {"gflop": bench.gflops})
    for size in sizes.plain_batches:
        pairs = bench.repeated(-(-size // sizes.micro_batch))
        images, texts = (torch.cat(parts)[:size] for parts in zip(*pairs, strict=True))
        way = partial(plain, bench.setup)
        session.measure(
            f"plain, B={size}", partial(timed_step, bench, way, [(images, texts)], 3, 2)
        )
    setup, steps = bench.setup, sizes.most_steps
    more: dict[str, tuple[Way, int, int, int]] = {
        "K=8, ours, R=auto": (decoupled(setup, "auto", LOSS_CHUNK), 8, 2, 2),
        "K=8, open_clip --accum-freq": (partial(open_clip_accumulation, setup), 8, 1, 1),
        "K=8, two-pass (GradCache)": (two_pass(setup), 8, 1, 1),
        f"K={steps}, ours, R=1": (decoupled(setup, 1, LOSS_CHUNK), steps, 1, 0),
    }
    measure_ways(session, bench, ways(bench) | more)


def waits(session: Session) -> None:
    bench = bench_of(session)
    session.measure("waits of a step, K=4", partial(waits_of_a_step, bench))
    session.measure("kernels of a micro-batch", partial(longest_kernels, bench))
    clear()


def longest_kernels(bench: Bench) -> dict[str, Any]:
    """Profile a micro-batch: all kernels together, and milliseconds and calls of the 25 that take the most time."""
    kind = ProfilerActivity.CUDA if on_gpu() else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        took = seconds(bench.setup, partial(one_graph, bench.setup), bench.batches[:1])
    which = "self_device_time_total" if on_gpu() else "self_cpu_time_total"
    rows = [(getattr(event, which) / 1e3, event.count, event.key) for event in seen.key_averages()]
    longest = sorted(rows, reverse=True)[:25]
    return {
        "wall_ms": 1e3 * took,
        "busy_ms": sum(busy for busy, _, _ in rows),
        "kernels": sum(
            calls for busy, calls, _ in rows if busy > 0
        ),  # not the calls that launched them
        **{
            f"{n}. {key[:80]}": f"{busy:.2f} ms, {calls} calls"
            for n, (busy, calls, key) in enumerate(longest, 1)
        },
    }


def waits_of_a_step(bench: Bench) -> dict[str, Any]:
    """Count the lines at which CUDA says that the host waited in the third step of the recipe, with its optimizer and mixup."""
    step = recipe_step(bench.setup.inner, LOSS_CHUNK)
    for number in range(2):  # the first one checks its replay, and makes the optimizer's state
        step.take(bench.repeated(4), number)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if on_gpu():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            step.take(bench.repeated(4), 2)
        finally:
            if on_gpu():
                torch.cuda.set_sync_debug_mode("default")
    if step.mixup is not None:
        step.mixup.detach()
    waited = [each for each in seen if "called a synchronizing" in str(each.message)]
    lines = {f"{Path(each.filename).name}:{each.lineno}" for each in waited}
    return {"waits": len(waited), "lines": sorted(lines)}


def loss(session: Session) -> None:
    for pairs in sizes_of(session).pairs:
        session.measure(f"{pairs:,} pairs", partial(loss_values, pairs))


def loss_values(pairs: int) -> dict[str, float]:
    """Time a forward and backward pass of our loss and, where memory suffices, of open_clip's on features of width 512."""
    clear()
    torch.manual_seed(SEED)
    leaves = [
        nn.functional.normalize(torch.randn(pairs, 512, device=device()), dim=1).requires_grad_()
        for _ in range(2)
    ]
    scale = torch.tensor(50.0, device=device(), requires_grad=True)
    losses: dict[str, nn.Module] = {"": ContrastiveLoss(chunk_size=LOSS_CHUNK)}
    # Two logit matrices, their softmaxes and gradients: six matrices of N^2 floats, and some room.
    if (available_bytes(device()) or 0) > 7 * 4 * pairs**2:
        losses["clip_loss_"] = ClipLoss()
    values = {}
    for name, each in losses.items():

        def step(each: nn.Module = each) -> None:
            each(*leaves, scale).backward()

        if on_gpu():
            torch.cuda.reset_peak_memory_stats()
        values[f"{name}seconds"] = median_seconds(step, rounds=1, warm_up=1)
        if on_gpu():
            values[f"{name}peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return values


def blocks(session: Session) -> None:
    """Compile the model's blocks; time the first step, then the ways, and compare a gradient under its masks."""
    bench, sizes = bench_of(session), sizes_of(session)
    setup, small = bench.setup, bench.small(sizes.compared)
    compiled = partialmethod(nn.Module.compile, backend=sizes.compiler)
    with mock.patch.object(nn.Module, "compile", compiled):
        compile_blocks(setup.inner)

    def first() -> dict[str, float]:
        way = decoupled(setup, 1, LOSS_CHUNK)
        return {"seconds": seconds(setup, way, bench.batches[:2])}

    def error() -> dict[str, float]:
        reference = reference_gradient(setup, small, SEED)
        return gradient_errors(setup, decoupled(setup, 1, sizes.compared), small, SEED, reference)

    with same_masks(setup.inner, cut_texts=False):
        session.measure("first step", first, limit=240)
        measure_ways(session, bench, ways(bench))
        session.measure("gradient error of ours", error)
    for module in setup.inner.modules():
        module._compiled_call_impl = None
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------------------------------------------------


def training(session: Session) -> None:
    session.measure("training", partial(train_stop_and_resume, session), limit=300)


def train_stop_and_resume(session: Session) -> dict[str, Any]:
    """Train, stop by SIGTERM, resume from the earlier checkpoint, and compare the losses of the steps taken twice."""
    sizes, folder = sizes_of(session), session.work / "training"
    shutil.rmtree(folder, ignore_errors=True)
    for name in "ab":
        made_up_source(folder / name, sizes.trained_pairs, sizes.px)
    write_bert(folder / "bert", sizes.trained[1], 0.1)
    first = train(session, folder)
    for file in (folder / "run" / "checkpoints").glob("step_*.pt"):
        if int(file.stem.split("_")[-1]) > sizes.save:
            file.unlink()
    again = train(session, folder, "--resume", "latest")
    twice = [(first[step], again[step]) for step in range(sizes.save, sizes.stop)]
    steady = [first[step] for step in range(4, sizes.stop)]
    times = [later["time"] - earlier["time"] for earlier, later in pairwise(steady)]
    return {
        "samples_per_second": 8 * sizes.micro_batch / statistics.median(times),
        "step_seconds": statistics.median(times),
        "waited": statistics.median([line["waited"] for line in steady]),
        "peak_gib": max(line["memory_bytes"] for line in steady) / GIB if on_gpu() else None,
        "first_step_after_seconds": first[0]["time"] - first["started"],
        "resumed_step_after_seconds": again[sizes.save]["time"] - again["started"],
        "steps_twice": len(twice),
        "largest_loss_difference": max(abs(one["loss"] - other["loss"]) for one, other in twice),
    }


def train(session: Session, folder: Path, *words: str) -> dict[Any, Any]:
    """Train until a step is logged, then send SIGTERM.

    Returns:
        The logged steps by number, and "started", the time at which the process began.

    Raises:
        RuntimeError: it ended before.
    """
    clear()
    stop, started = sizes_of(session).stop, time.time()
    lines: dict[Any, Any] = {}
    command = [sys.executable, "-m", "training.main", *training_words(session, folder), *words]
    with (folder / "training.log").open("a") as log:
        program = subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log,
            preexec_fn=partial(end_with_parent, signal.SIGKILL),
        )  # fmt: skip
        while max(lines, default=0) < stop - 1:
            time.sleep(0.1)
            if program.poll() is not None:
                raise RuntimeError(
                    f"the training ended: {(folder / 'training.log').read_text()[-300:]}"
                )
            if (folder / "run" / "record.jsonl").is_file():
                logged = read_record(folder / "run")["step"]
                lines = {line["step"]: line for line in logged if line["time"] > started}
        program.send_signal(signal.SIGTERM)
        program.wait()
    return {**lines, "started": started}


def training_words(session: Session, folder: Path) -> list[str]:
    sizes = sizes_of(session)
    model, _, *more = sizes.trained
    return [
        "--model", model, "--text-model", str(folder / "bert"), *more,
        "--train-data", f"a={folder / 'a'}::b={folder / 'b'}",
        "--train-data-upsampling-factors", f"a={sizes.passes}::b={sizes.passes}", "--sampling", "debiased",
        "--batch-size", str(sizes.micro_batch), "--dga-steps", "8", "--loss-chunk", str(LOSS_CHUNK), "--coin-flip-mixup",
        "--precision", "amp_bf16", "--device", device().type, "--workers", str(sizes.workers), "--epochs", "1", "--warmup", "5",
        "--log-every-n-steps", "1", "--save-every-steps", str(sizes.save), "--keep-checkpoints", "3", "--save-frequency", "0",
        "--logs", str(folder), "--name", "run",
    ]  # fmt: skip


def made_up_source(folder: Path, count: int, px: int) -> None:
    """Write a source of JPEGs with a photograph's spectrum, `px` on a side, and captions of 5 to 15 words."""
    pictures = [
        photograph(seed, px, px) for seed in range(min(count, 256))
    ]  # repeated; decoding costs the same
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 16, size=count)
    captions = (" ".join(rng.choice(CAPTION.split(), size=length)) for length in lengths)
    samples = [
        Sample(f"{number:08d}", {"jpg": pictures[number % len(pictures)], "txt": caption.encode()})
        for number, caption in enumerate(captions)
    ]
    write_source(folder, samples, shard_size=max(1, count // 16))


def tests(session: Session) -> None:
    # The compiler takes minutes on a CPU, where the slow tests have the same test.
    compiled = ["--deselect", "tests/gpu/test_compile.py"] if session.rehearse else []
    run_tests(session, "tests/gpu", "--ignore", "tests/gpu/test_exactness.py", *compiled)


def ranks(session: Session) -> None:
    def errors() -> dict[str, Any]:
        out = session.work / "ranks.json"
        output_of(
            session, "-m", "scripts.bench.step", "--model", "tiny" if session.rehearse else "small", "--ranks", "2",
            "--steps", "4", "--rounds", "0", "--error-precision", "fp32", "--out", str(out),
        )  # fmt: skip
        rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
        return {row["way"]: row["errors"]["towers"] for row in rows if row["errors"]}

    session.measure("error of the towers", errors, limit=200)


def plan(session: Session) -> None:
    """Compare the plan of the training of `training` with what it took; it has its data."""

    def compared() -> dict[str, Any]:
        words = training_words(session, session.work / "training")
        lines = output_of(session, "-m", "open_clip_zerovl.cli", "plan", *words)
        said = re.search(r"^step +(\S+) s .*^memory +(\S+) of", lines, re.M | re.S)
        if said is None:
            raise RuntimeError(f"zerovl plan printed no step and memory: {lines[-300:]}")
        seconds, peak_gib = float(said[1]), float(said[2])
        real = session.parts["training"]["results"]["training"]
        return {
            "planned_seconds": seconds,
            "planned_peak_gib": peak_gib,
            "real_seconds": real["step_seconds"],
            "real_peak_gib": real["peak_gib"],
            "planned_over_real": seconds / real["step_seconds"],
        }

    session.measure("plan", compared, limit=200)
