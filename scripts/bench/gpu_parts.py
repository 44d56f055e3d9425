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
from typing import TYPE_CHECKING, Any
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
from scripts.bench import harness
from scripts.bench.harness import MicroBatch, Setup, Way
from scripts.bench.loader import CAPTION, photograph

if TYPE_CHECKING:
    from scripts.gpu import Session

ROOT = Path(__file__).resolve().parents[2]
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
    # As `make train-14m`: model, text tower, flags.
    trained: tuple[str, ...] = (
        "zerovl-ViT-B-16-BERT-base", "base", "--token-drop", "0.25", "--sort-text", "--torchcompile",
    )  # fmt: skip
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

ON_GPU = torch.cuda.is_available()  # a rehearsal hides them
SIZES = Sizes() if ON_GPU else TINY
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")
AUTOCAST = partial(torch.autocast, DEVICE.type, dtype=torch.bfloat16)


class Bench:
    """The model on its device, and micro-batches of it."""

    def __init__(self, scratch: Path) -> None:
        # The flags that open_clip's main sets.
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        scratch.mkdir(parents=True, exist_ok=True)
        name = harness.register(SIZES.model, 0.1, scratch)
        model = harness.build(name, 0.25, DEVICE, torch.float32)
        self.setup = Setup(model, DEVICE, AUTOCAST)
        self.batches = harness.make_batches(
            name, model, [SIZES.micro_batch] * DISTINCT_BATCHES, seed=1
        )
        images, texts = self.batches[0]
        self.gflops = harness.tower_flops(self.setup, (images[:2], texts[:2]))[1] / 2 / 1e9
        self.small = [(i[: SIZES.compared], t[: SIZES.compared]) for i, t in self.batches[:3]]

    def repeated(self, count: int) -> list[MicroBatch]:
        return [self.batches[index % len(self.batches)] for index in range(count)]


@cache
def bench_of(session: Session) -> Bench:
    return Bench(session.work / "model")


def clear() -> None:
    """Free what earlier measurements left on the GPU."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / GIB if ON_GPU else None


def median_seconds(
    way: Way, rounds: int = 10, warm_up: int = 3, micro_batches: Sequence[MicroBatch] = (), setup: Setup | None = None
) -> float:  # fmt: skip
    """Time a call until the device is done, and begin the peak of memory behind the warm-up: cuDNN's trials come before."""
    setup = setup or Setup(nn.Linear(1, 1), DEVICE)
    for _ in range(warm_up):
        harness.seconds(setup, way, micro_batches)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    return statistics.median(harness.seconds(setup, way, micro_batches) for _ in range(rounds))


Step = tuple[Way, Sequence[MicroBatch], int, int]  # with its rounds and warm-up


def measure_steps(session: Session, steps: dict[str, Step]) -> None:
    """Time steps, by the key of the result."""
    bench = bench_of(session)

    def timed(
        way: Way, micro_batches: Sequence[MicroBatch], rounds: int, warm_up: int
    ) -> dict[str, Any]:
        clear()
        took = median_seconds(way, rounds, warm_up, micro_batches, bench.setup)
        sizes = [len(images) for images, _ in micro_batches]
        dga = getattr(getattr(way, "func", None), "__self__", None)
        bench.setup.zero_grad()
        return {
            "seconds": took,
            "samples_per_second": sum(sizes) / took,
            "tflops": sum(sizes) / took * bench.gflops / 1000,
            "peak_gib": peak_gib(),
            "retained": dga and dga._retention.graphs(sizes),
        }

    for key, step in steps.items():
        session.measure(key, partial(timed, *step))


def ways(bench: Bench) -> dict[str, Step]:
    """List the steps of the eager and of the compiled part."""
    setup = bench.setup
    return {
        "forward without graph": (partial(harness.forwards_only, setup), bench.repeated(4), 2, 1),
        "plain": (partial(harness.plain, setup), bench.repeated(4), 2, 1),
        "K=8, ours, R=1": (harness.decoupled(setup, 1, LOSS_CHUNK), bench.repeated(8), 2, 1),
        "K=8, ours, R=1, texts sorted": (harness.decoupled_and_sorted(setup, 1, LOSS_CHUNK), bench.repeated(8), 2, 1),
    }  # fmt: skip


def run_tests(session: Session, *words: str) -> None:
    """Run tests marked gpu in this process, each of which is a result."""

    class Results:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            session.begin(nodeid, limit=300)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                said = {"error": str(report.longrepr)[-600:]} if report.failed else {}
                session.write(report.nodeid, outcome=report.outcome, **said)

    clear()
    os.chdir(ROOT)
    deselected = [f"--deselect={key}" for key in session.results]
    flags = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    status = pytest.main([*flags, *words, *deselected], plugins=[Results()])
    ended = pytest.ExitCode
    if status not in (ended.OK, ended.TESTS_FAILED, ended.NO_TESTS_COLLECTED):
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
    session.measure("machine", machine_values)


def machine_values() -> dict[str, Any]:
    name = torch.cuda.get_device_name() if ON_GPU else f"CPU ({platform.machine()})"
    installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    random = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    a, b = (random(SIZES.matrix, SIZES.matrix) for _ in range(2))
    tokens, weights = random(SIZES.micro_batch * 148, 768), random(4 * 768, 768)
    source = torch.zeros(SIZES.copy_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    host = torch.zeros(SIZES.copy_bytes // 16, dtype=torch.uint8, pin_memory=ON_GPU)
    to_device = target[: len(host)]
    shared = os.statvfs("/dev/shm")
    flop = 2 * tokens.numel() * len(weights)
    copied = median_seconds(lambda _: target.copy_(source))
    moved = median_seconds(lambda _: to_device.copy_(host, non_blocking=True))
    return {
        "device": name,
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / GIB if ON_GPU else None,
        "cores": os.cpu_count(),
        "shm_gib": shared.f_blocks * shared.f_frsize / GIB,
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name) for name in PACKAGES if name in installed
        },
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "matrix_tflops": 2 * SIZES.matrix**3 / median_seconds(lambda _: a @ b) / 1e12,
        "mlp_tflops": flop / median_seconds(lambda _: tokens @ weights.T) / 1e12,
        "copy_tb_per_second": 2 * SIZES.copy_bytes / copied / 1e12,
        "host_to_device_gb_per_second": len(host) / moved / 1e9,
    }


def exactness(session: Session) -> None:
    run_tests(session, "tests/gpu/test_exactness.py")


def gradients(session: Session) -> None:
    """Compare the one-graph gradient with itself, with that of other masks, and with that of each way."""
    bench = bench_of(session)

    def error(reference: Callable[..., Any], setup: Setup, row: str, way: Way) -> dict[str, float]:
        wanted = reference(sort="sorted" in row)
        return harness.gradient_errors(setup, way, bench.small, SEED, wanted)

    contexts: dict[str, Callable[[], Any]] = {"bf16": AUTOCAST, "fp32": nullcontext}
    for precision, context in contexts.items():
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        setup = Setup(bench.setup.inner, DEVICE, context)
        reference = cache(partial(harness.reference_gradient, setup, bench.small, SEED))
        compared: dict[str, Way] = {
            "one graph again": partial(one_graph_of, setup, SEED),
            "one graph under other masks": partial(one_graph_of, setup, SEED + 1),
            "ours, R=1": harness.decoupled(setup, 1, SIZES.compared),
            "ours, R=0": harness.decoupled(setup, 0, SIZES.compared),
            "ours, R=1, texts sorted": harness.decoupled_and_sorted(setup, 1, SIZES.compared),
            "open_clip --accum-freq": partial(harness.open_clip_accumulation, setup),
        }
        for row, way in compared.items():
            session.measure(f"{precision}, {row}", partial(error, reference, setup, row, way))
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def one_graph_of(setup: Setup, seed: int, micro_batches: Sequence[MicroBatch]) -> None:
    """Leave the one-graph gradient in `.grad`, under the masks of `seed`."""
    for name, gradient in harness.reference_gradient(setup, micro_batches, seed).items():
        setup.inner.get_parameter(name).grad = gradient


def steps(session: Session) -> None:
    bench = bench_of(session)
    session.measure("GFLOP a sample", lambda: {"gflop": bench.gflops})
    setup, most = bench.setup, SIZES.most_steps
    for size in SIZES.plain_batches:
        pairs = bench.repeated(-(-size // SIZES.micro_batch))
        images, texts = (torch.cat(parts)[:size] for parts in zip(*pairs, strict=True))
        measure_steps(
            session, {f"plain, B={size}": (partial(harness.plain, setup), [(images, texts)], 3, 2)}
        )
    more: dict[str, Step] = {
        "K=8, ours, R=auto": (harness.decoupled(setup, "auto", LOSS_CHUNK), bench.repeated(8), 2, 2),
        "K=8, open_clip --accum-freq": (partial(harness.open_clip_accumulation, setup), bench.repeated(8), 1, 1),
        "K=8, two-pass (GradCache)": (harness.two_pass(setup), bench.repeated(8), 1, 1),
        f"K={most}, ours, R=1": (harness.decoupled(setup, 1, LOSS_CHUNK), bench.repeated(most), 1, 0),
    }  # fmt: skip
    measure_steps(session, ways(bench) | more)


def waits(session: Session) -> None:
    bench = bench_of(session)
    session.measure("waits of a step, K=4", partial(waits_of_a_step, bench))
    session.measure("kernels of a micro-batch", partial(longest_kernels, bench))
    clear()


def longest_kernels(bench: Bench) -> dict[str, Any]:
    """Profile a micro-batch: all kernels together, and milliseconds and calls of the ten that take the most time."""
    kind = ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        way = partial(harness.one_graph, bench.setup)
        took = harness.seconds(bench.setup, way, bench.batches[:1])
    which = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    rows = [(getattr(event, which) / 1e3, event.count, event.key) for event in seen.key_averages()]
    longest = sorted(rows, reverse=True)[:10]
    return {
        "wall_ms": 1e3 * took,
        "busy_ms": sum(busy for busy, _, _ in rows),
        "kernels": sum(calls for busy, calls, _ in rows if busy > 0),  # without their launches
        **{
            f"{n}. {key[:80]}": f"{busy:.2f} ms, {calls} calls"
            for n, (busy, calls, key) in enumerate(longest, 1)
        },
    }


def waits_of_a_step(bench: Bench) -> dict[str, Any]:
    """Count the lines at which CUDA says that the host waited in the third step of the recipe, with its optimizer and mixup."""
    step = harness.recipe_step(bench.setup.inner, LOSS_CHUNK)
    for number in range(2):  # the first one checks its replay, and makes the optimizer's state
        step.take(bench.repeated(4), number)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mode = torch.cuda.set_sync_debug_mode if ON_GPU else str
        mode("warn")
        try:
            step.take(bench.repeated(4), 2)
        finally:
            mode("default")
    if step.mixup is not None:
        step.mixup.detach()
    waited = [each for each in seen if "called a synchronizing" in str(each.message)]
    lines = {f"{Path(each.filename).name}:{each.lineno}" for each in waited}
    return {"waits": len(waited), "lines": sorted(lines)}


def loss(session: Session) -> None:
    for pairs in SIZES.pairs:
        session.measure(f"{pairs:,} pairs", partial(loss_values, pairs))


def loss_values(pairs: int) -> dict[str, float | None]:
    """Time a forward and backward pass of our loss and, where memory suffices, of open_clip's on features of width 512.

    Returns:
        Seconds, and the peak of memory above what the process holds.
    """
    clear()
    held = torch.cuda.memory_allocated() / GIB if ON_GPU else 0
    torch.manual_seed(SEED)
    leaves = [
        nn.functional.normalize(torch.randn(pairs, 512, device=DEVICE), dim=1).requires_grad_()
        for _ in range(2)
    ]
    scale = torch.tensor(50.0, device=DEVICE, requires_grad=True)
    losses: dict[str, nn.Module] = {"": ContrastiveLoss(chunk_size=LOSS_CHUNK)}
    # Two logit matrices, their softmaxes and gradients: six matrices of N^2 floats, and some room.
    if (available_bytes(DEVICE) or 0) > 7 * 4 * pairs**2:
        losses["clip_loss_"] = ClipLoss()
    values: dict[str, float | None] = {}
    for name, each in losses.items():

        def once(_: Any, each: nn.Module = each) -> None:
            for leaf in leaves:
                leaf.grad = None
            each(*leaves, scale).backward()

        values[f"{name}seconds"] = median_seconds(once, rounds=1, warm_up=1)
        peak = peak_gib()
        values[f"{name}peak_gib"] = None if peak is None else peak - held
    return values


def blocks(session: Session) -> None:
    """Compile the model's blocks, time the first step and the ways, and compare a gradient under its masks."""
    bench = bench_of(session)
    setup = bench.setup
    compiled = partialmethod(nn.Module.compile, backend=SIZES.compiler)
    with mock.patch.object(nn.Module, "compile", compiled):
        compile_blocks(setup.inner)

    def first() -> dict[str, float]:
        way = harness.decoupled(setup, 1, LOSS_CHUNK)
        return {"seconds": harness.seconds(setup, way, bench.batches[:2])}

    def error() -> dict[str, float]:
        reference = harness.reference_gradient(setup, bench.small, SEED)
        way = harness.decoupled(setup, 1, SIZES.compared)
        return harness.gradient_errors(setup, way, bench.small, SEED, reference)

    with same_masks(setup.inner, cut_texts=False):
        session.measure("first step", first, limit=240)
        measure_steps(session, ways(bench))
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
    folder = session.work / "training"
    shutil.rmtree(folder, ignore_errors=True)
    for name in "ab":
        made_up_source(folder / name, SIZES.trained_pairs, SIZES.px)
    harness.write_bert(folder / "bert", SIZES.trained[1], 0.1)
    first = train(session, folder)
    for file in (folder / "run" / "checkpoints").glob("step_*.pt"):
        if int(file.stem.split("_")[-1]) > SIZES.save:
            file.unlink()
    again = train(session, folder, "--resume", "latest")
    twice = [(first[step], again[step]) for step in range(SIZES.save, SIZES.stop)]
    steady = [first[step] for step in range(4, SIZES.stop)]
    times = [later["time"] - earlier["time"] for earlier, later in pairwise(steady)]
    return {
        "samples_per_second": 8 * SIZES.micro_batch / statistics.median(times),
        "step_seconds": statistics.median(times),
        "waited": statistics.median([line["waited"] for line in steady]),
        "peak_gib": max(line["memory_bytes"] for line in steady) / GIB if ON_GPU else None,
        "first_step_after_seconds": first[0]["time"] - first["started"],
        "resumed_step_after_seconds": again[SIZES.save]["time"] - again["started"],
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
    started = time.time()
    lines: dict[Any, Any] = {}
    command = [sys.executable, "-m", "training.main", *training_words(folder), *words]
    with (folder / "training.log").open("a") as log:
        program = subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log,
            preexec_fn=partial(end_with_parent, signal.SIGKILL),
        )  # fmt: skip
        while max(lines, default=0) < SIZES.stop - 1:
            time.sleep(0.1)
            if program.poll() is not None:
                words_of = (folder / "training.log").read_text()
                raise RuntimeError(f"the training ended: {words_of[-900:]}")
            if (folder / "run" / "record.jsonl").is_file():
                logged = read_record(folder / "run")["step"]
                lines = {line["step"]: line for line in logged if line["time"] > started}
        program.send_signal(signal.SIGTERM)
        program.wait()
    return {**lines, "started": started}


def training_words(folder: Path) -> list[str]:
    model, _, *more = SIZES.trained
    return [
        "--model", model, "--text-model", str(folder / "bert"), *more,
        "--train-data", f"a={folder / 'a'}::b={folder / 'b'}",
        "--train-data-upsampling-factors", f"a={SIZES.passes}::b={SIZES.passes}", "--sampling", "debiased",
        "--batch-size", str(SIZES.micro_batch), "--dga-steps", "8", "--loss-chunk", str(LOSS_CHUNK), "--coin-flip-mixup",
        "--precision", "amp_bf16", "--device", DEVICE.type, "--workers", str(SIZES.workers), "--epochs", "1", "--warmup", "5",
        "--log-every-n-steps", "1", "--save-every-steps", str(SIZES.save), "--keep-checkpoints", "3", "--save-frequency", "0",
        "--logs", str(folder), "--name", "run",
    ]  # fmt: skip


def made_up_source(folder: Path, count: int, px: int) -> None:
    """Write a source of JPEGs with a photograph's spectrum, `px` on a side, and captions of 5 to 15 words."""
    # Pictures are repeated; decoding costs the same.
    pictures = [photograph(seed, px, px) for seed in range(min(count, 256))]
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
    """Compare the plan of the training of `training`, whose data is there, with what it took."""

    def compared() -> dict[str, Any]:
        words = training_words(session.work / "training")
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
