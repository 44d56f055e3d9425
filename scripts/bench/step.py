"""The cost of decoupled gradient accumulation (section 4.1), compared with other ways to train with a large batch.

    python -m scripts.bench.step [--model small] [--micro-batch 16] [--steps 1,4,16] [--ranks 1] [--out FILE.json]

It takes steps of K micro-batches of B samples on each of W ranks in every way, in turn: plain training on K small
batches (the baseline), one graph over all, open_clip's --accum-freq, a two-pass step as in GradCache, and ours with 1, 2, K/2
and an automatic number R of graphs retained, and with texts sorted (--sort-text). `make gpu` times compiled models. A row holds

    time        seconds a sample, as a ratio to plain training's in the step just before; median over rounds, with range
    passes      forward and backward passes a sample, counted
    ideal       forwards / 3 + 2 backwards / 3, as if a forward pass were a third of a step: for ours 1 + (K-R)/(3K)
    FLOPs       matrix products of a step, counted, as a ratio to plain training's; "due" is 1 + f (K-R)/K, where f is the
                forward share of the towers' FLOPs, counted (not exactly 1/3: the backward pass of attention takes more than
                twice its forward pass, and the gradient of the pixels is not computed)
    memory      peak device memory, as a ratio to plain training's on one micro-batch (CPU: live tensors and parameters)
    error       |g - g_ref| / |g_ref| of the towers and of logit_scale against one graph under the same random masks, with
                dropout and token drop, for K = --error-steps in --error-precision

On a CPU the process keeps the memory that it frees (by default glibc returns it and requests it again, page by page). Optimizer
step and data loading are not included. Models have random weights; no hub is used. Over ranks (CPU: gloo; CUDA: nccl, a GPU a
rank) the ratios are rank 0's. FILE.json holds everything, FILE.md the tables.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated as A
from typing import Any, Literal

import torch
import torch.distributed as dist

from open_clip_zerovl.core.flags import flag
from open_clip_zerovl.core.memory import available_bytes, keep_freed_memory
from scripts.bench.harness import (
    SORTED,
    MicroBatch,
    Setup,
    Way,
    build,
    counts,
    gradient_errors,
    make_batches,
    peak_bytes,
    plain,
    reference_gradient,
    register,
    seconds,
    tower_flops,
    ways,
    write,
)
from scripts.program import program
from scripts.tables import markdown_table

SEED = 1  # of micro-batches and masks; each rank adds its number
WARM_UP_STEPS = 2  # retain="auto" measures in the first and decides in the second


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers between commas."""
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True)
class Settings:
    """Settings of the measurements."""

    model: str = flag("small", "small, tiny, ViT-B-16+BERT-base, or a model of open_clip")
    micro_batch: int = flag(16, "samples a micro-batch and rank", metavar="B")
    steps: tuple[int, ...] = flag(
        (1, 4, 16), "micro-batches a step", metavar="K,K", kind=numbers, several=False
    )
    ranks: int = flag(1, metavar="W")
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu")
    precision: Literal["fp32", "amp_bf16"] = flag("fp32")
    token_drop: float = flag(0.25, "share of patch tokens dropped")
    dropout: float = flag(0.1, "of the random BERT")
    rounds: int = flag(5, "timed steps of each way; 0: counts and memory only")
    error_steps: int = flag(4, "0 leaves the errors out", metavar="K")
    error_batch: int = flag(4, metavar="B")
    error_precision: Literal["fp64", "fp32", "amp_bf16"] = flag("fp64")
    loss_chunk: int = flag(1024, "rows of the logit matrix alive at once")


# ---------------------------------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------------------------------


def measure_rank(rank: int, settings: Settings, scratch: str) -> None:
    """Measure on one rank, of which rank 0 writes the results into the folder `scratch`."""
    gpus = torch.cuda.device_count() if settings.device == "cuda" else 0
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if device.type == "cpu":
        keep_freed_memory()
    if settings.ranks > 1:
        store = dist.FileStore(os.path.join(scratch, "store"), settings.ranks)
        backend = "nccl" if settings.ranks <= gpus else "gloo"  # NCCL refuses two ranks on one GPU
        dist.init_process_group(backend, store=store, rank=rank, world_size=settings.ranks)
    try:
        own = Path(scratch) / f"rank{rank}"
        own.mkdir()
        name = register(settings.model, settings.dropout, own)
        results = measure_steps(name, settings, device, rank)
        if rank == 0:
            (Path(scratch) / "results.json").write_text(json.dumps(results), encoding="utf-8")
    finally:
        if settings.ranks > 1:
            dist.destroy_process_group()


def make_setup(
    name: str,
    settings: Settings,
    device: torch.device,
    rank: int,
    precision: str,
) -> Setup:
    dtype = torch.float64 if precision == "fp64" else torch.float32
    amp = partial(torch.autocast, device.type, dtype=torch.bfloat16)
    model = build(name, settings.token_drop, device, dtype)
    return Setup(
        model, device, amp if precision == "amp_bf16" else nullcontext, rank, settings.ranks
    )


def measure_steps(name: str, settings: Settings, device: torch.device, rank: int) -> dict[str, Any]:
    errors = measure_errors(name, settings, device, rank) if settings.error_steps else {}
    setup = make_setup(name, settings, device, rank, settings.precision)
    most = max(settings.steps)
    batches = make_batches(name, setup.inner, [settings.micro_batch] * most, SEED + rank)
    one = partial(plain, setup)
    for _ in range(WARM_UP_STEPS):  # DDP rearranges its buckets after the first
        one(batches[:1])
    forward_flops, step_flops = tower_flops(setup, batches[0])
    single = peak_bytes(setup, one, batches[:1])
    share = forward_flops / step_flops
    graph = max(1, single - sum(p.nbytes for p in setup.inner.parameters()))
    results: dict[str, Any] = {
        **asdict(settings),
        "parameters": sum(p.numel() for p in setup.inner.parameters()),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} thread(s)",
        "torch": torch.__version__,
        "gflops_per_sample": step_flops / settings.micro_batch / 1e9,
        "forward_share": share,
        "peak_mib_of_one_micro_batch": single / 2**20,
        "rows": [],
    }
    free = torch.tensor([available_bytes(device) or 0], device=device)
    if setup.world_size > 1:  # the least of all ranks'
        free //= setup.world_size if device.type == "cpu" else 1
        dist.all_reduce(free, dist.ReduceOp.MIN)
    for steps in settings.steps:
        contestants = ways(setup, steps, settings.loss_chunk, int(free) > 1.2 * graph * steps)
        timed = measure_times(setup, contestants, batches[:steps], settings.rounds)
        plain_flops = counts(setup, contestants["plain micro-batches"], batches[:steps])[2]
        for row, way in contestants.items():
            forwards, backwards, flops = counts(setup, way, batches[:steps])
            record = {
                "way": row,
                "steps": steps,
                "retained": round(steps * (2 - forwards)) if row.startswith("ours") else None,
                "ideal": forwards / 3 + backwards * 2 / 3,
                "forwards_per_sample": forwards,
                "backwards_per_sample": backwards,
                "flops": flops / plain_flops,
                "flops_due": forwards * share + backwards * (1 - share),
                "memory": peak_bytes(setup, way, batches[:steps]) / single,
                "errors": errors.get(row),
            }
            if ratios := timed[row]:
                record["time"] = statistics.median(ratios)
                record["time_range"] = [min(ratios), max(ratios)]
            results["rows"].append(record)
    return results


def measure_times(
    setup: Setup, contestants: dict[str, Way], batches: Sequence[MicroBatch], rounds: int
) -> dict[str, list[float]]:
    """Measure each way's ratios to a step of plain training taken just before, round by round.

    Two steps in a row meet about the same load of other programs. Every round begins with another way.
    """
    yardstick = contestants["plain micro-batches"]
    for row, way in contestants.items():
        for _ in range(WARM_UP_STEPS if rounds or row.endswith("auto") else 0):
            seconds(setup, way, batches)
    ratios: dict[str, list[float]] = {row: [] for row in contestants}
    rows = list(contestants)
    for turn in range(rounds):
        first = turn % len(rows)
        for row in rows[first:] + rows[:first]:
            before = seconds(setup, yardstick, batches)
            ratios[row].append(seconds(setup, contestants[row], batches) / before)
    return ratios


def measure_errors(
    name: str, settings: Settings, device: torch.device, rank: int
) -> dict[str, dict[str, float]]:
    """Measure the gradient error of each way that should give the effective batch's gradient, on a small batch."""
    setup = make_setup(name, settings, device, rank, settings.error_precision)
    batches = make_batches(
        name, setup.inner, [settings.error_batch] * settings.error_steps, SEED + rank
    )
    reference = reference_gradient(setup, batches, SEED + rank)
    contestants = ways(setup, settings.error_steps, settings.loss_chunk, with_one_graph=False)
    contestants = {
        row: way
        for row, way in contestants.items()
        if row.startswith(("open_clip", "two-pass", "ours"))
    }
    references = {False: reference}
    if any(SORTED in row for row in contestants):
        references[True] = reference_gradient(setup, batches, SEED + rank, sort=True)
    # The rows "K/2 of K graphs" of other K get the error of this K.
    errors = {
        row: gradient_errors(setup, way, batches, SEED + rank, references[SORTED in row])
        for row, way in contestants.items()
    }
    half = errors.get(f"ours, retain {settings.error_steps // 2}")
    for steps in settings.steps:
        if half is not None and steps > 1:
            errors.setdefault(f"ours, retain {steps // 2}", half)
    return errors


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def steps_markdown(results: dict[str, Any]) -> str:
    """Write the rows as a table, below a line with the settings."""
    timed = results["rounds"] > 0
    header = ["K", "way"] + (["time / plain (range)", "ideal", "time / ideal"] if timed else [])
    header += ["forwards, backwards", "FLOPs (due)", "memory", "error of towers", "of logit_scale"]
    rows = []
    for row in results["rows"]:
        cells = [
            str(row["steps"]),
            row["way"] + (f" (R={row['retained']})" if row["way"].endswith("auto") else ""),
        ]
        if timed:
            low, high = row["time_range"]
            cells += [f"{row['time']:.3f} ({low:.3f}-{high:.3f})", f"{row['ideal']:.3f}"]
            cells += [f"{row['time'] / row['ideal']:.3f}"]
        cells += [f"{row['forwards_per_sample']:.4g}, {row['backwards_per_sample']:.4g}"]
        cells += [
            f"{row['flops']:.4f} ({row['flops_due']:.4f})",
            f"{row['memory']:.3f}",
        ]
        cells += [
            f"{row['errors'][part]:.1e}" if row["errors"] else "-"
            for part in ("towers", "logit_scale")
        ]
        rows.append(cells)
    about = (
        f"{results['model']} ({results['parameters'] / 1e6:.1f} M parameters, {results['gflops_per_sample']:.2f} GFLOP a "
        f"sample, forward share {results['forward_share']:.4f}), micro-batch {results['micro_batch']}, {results['ranks']} "
        f"rank(s), {results['precision']}, token drop {results['token_drop']}, dropout {results['dropout']}, "
        f"{results['rounds']} rounds; {results['device']}, torch {results['torch']}; one "
        f"micro-batch peaks at {results['peak_mib_of_one_micro_batch']:.0f} MiB"
    )
    if results["error_steps"]:
        precision, steps, batch = (
            results[f"error_{part}"] for part in ("precision", "steps", "batch")
        )
        about += f"; errors in {precision} at K={steps}, micro-batch {batch}"
    return f"{about}.\n\n{markdown_table(header, rows)}"


def step(
    *,
    settings: Settings,
    out: A[Path | None, "all numbers; the table goes into FILE.md", "FILE.json"] = None,
) -> None:
    """Measure each way to take a step, and print the table."""
    with tempfile.TemporaryDirectory() as scratch:
        if settings.ranks > 1:
            torch.multiprocessing.spawn(measure_rank, (settings, scratch), nprocs=settings.ranks)
        else:
            measure_rank(0, settings, scratch)
        results = json.loads((Path(scratch) / "results.json").read_text(encoding="utf-8"))
    write(results, steps_markdown(results), out)


if __name__ == "__main__":
    sys.exit(program(step))
