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

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from open_clip_zerovl.core.memory import available_bytes, keep_freed_memory
from open_clip_zerovl.report.tables import markdown_table
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

SEED = 1  # of micro-batches and masks; each rank adds its number
WARM_UP_STEPS = 2  # retain="auto" measures in the first and decides in the second


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="small",
        help="small, tiny, ViT-B-16+BERT-base, or an open_clip model name",
    )
    parser.add_argument(
        "--text-model",
        metavar="DIR",
        help="folder of the HF text tower (its config sets the dropout)",
    )
    parser.add_argument(
        "--micro-batch", type=int, default=16, metavar="B", help="samples a micro-batch and rank"
    )
    parser.add_argument("--steps", default="1,4,16", metavar="K,K", help="micro-batches a step")
    parser.add_argument("--ranks", type=int, default=1, metavar="W")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--precision", choices=("fp32", "amp_bf16"), default="fp32")
    parser.add_argument(
        "--token-drop", type=float, default=0.25, help="share of patch tokens dropped"
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="of the random BERT")
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed steps of each way; 0: counts and memory only"
    )
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: this process' own CPU time"
    )
    parser.add_argument(
        "--error-steps", type=int, default=4, metavar="K", help="0 leaves the errors out"
    )
    parser.add_argument("--error-batch", type=int, default=4, metavar="B")
    parser.add_argument("--error-precision", choices=("fp64", "fp32", "amp_bf16"), default="fp64")
    parser.add_argument(
        "--no-one-graph", action="store_true", help="leave out one graph over all, even if it fits"
    )
    parser.add_argument(
        "--peak-tflops", type=float, default=989.0, help="the GPU's in bf16, for its utilisation"
    )
    parser.add_argument(
        "--loss-chunk", type=int, default=1024, help="rows of the logit matrix alive at once"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    try:
        args.steps = [int(k) for k in args.steps.split(",")]
    except ValueError as error:
        parser.error(f"--steps are numbers separated by commas ({error})")
    if min([args.micro_batch, args.ranks, *args.steps]) < 1 or args.rounds < 0:
        parser.error("--micro-batch, --steps and --ranks must be at least 1, --rounds not negative")
    if args.device == "cuda" and args.clock == "cpu":
        parser.error("--clock cpu does not measure the work of a GPU")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------------------------------


def measure_rank(rank: int, args: argparse.Namespace, scratch: str) -> None:
    """Measure on one rank; rank 0 writes the results into the folder `scratch`."""
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if device.type == "cpu":
        keep_freed_memory()
    if args.ranks > 1:
        store = dist.FileStore(os.path.join(scratch, "store"), args.ranks)
        backend = "nccl" if args.ranks <= gpus else "gloo"  # NCCL refuses two ranks on one GPU
        dist.init_process_group(backend, store=store, rank=rank, world_size=args.ranks)
    try:
        own = Path(scratch) / f"rank{rank}"
        own.mkdir()
        name = register(args.model, args.text_model, args.dropout, own)
        results = measure_steps(name, args, device, rank)
        if rank == 0:
            (Path(scratch) / "results.json").write_text(json.dumps(results), encoding="utf-8")
    finally:
        if args.ranks > 1:
            dist.destroy_process_group()


def make_setup(
    name: str,
    args: argparse.Namespace,
    device: torch.device,
    rank: int,
    precision: str,
) -> Setup:
    dtype = torch.float64 if precision == "fp64" else torch.float32
    amp = partial(torch.autocast, device.type, dtype=torch.bfloat16)
    model = build(name, args.token_drop, device, dtype)
    return Setup(model, device, amp if precision == "amp_bf16" else nullcontext, rank, args.ranks)


def measure_steps(
    name: str, args: argparse.Namespace, device: torch.device, rank: int
) -> dict[str, Any]:
    errors = measure_errors(name, args, device, rank) if args.error_steps else {}
    setup = make_setup(name, args, device, rank, args.precision)
    most = max(args.steps)
    batches = make_batches(name, setup.inner, [args.micro_batch] * most, SEED + rank)
    one = partial(plain, setup)
    for _ in range(WARM_UP_STEPS):  # DDP rearranges its buckets after the first
        one(batches[:1])
    forward_flops, step_flops = tower_flops(setup, batches[0])
    single = peak_bytes(setup, one, batches[:1])
    share = forward_flops / step_flops
    graph = max(1, single - sum(p.nbytes for p in setup.inner.parameters()))
    results: dict[str, Any] = {
        "model": args.model,
        "parameters": sum(p.numel() for p in setup.inner.parameters()),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} thread(s)",
        "torch": torch.__version__,
        "gflops_per_sample": step_flops / args.micro_batch / 1e9,
        "forward_share": share,
        "peak_mib_of_one_micro_batch": single / 2**20,
        **{
            key: getattr(args, key)
            for key in ("micro_batch", "ranks", "precision", "token_drop", "dropout", "rounds")
        },
        **{
            key: getattr(args, key)
            for key in ("clock", "loss_chunk", "error_steps", "error_batch", "error_precision")
        },
        "rows": [],
    }
    for steps in args.steps:
        fits = not args.no_one_graph and _agreed_free(setup) > 1.2 * graph * steps
        contestants = ways(setup, steps, args.loss_chunk, fits)
        timed = measure_times(setup, contestants, batches[:steps], args)
        plain_flops = counts(setup, contestants["plain micro-batches"], batches[:steps]).flops
        for row, way in contestants.items():
            counted = counts(setup, way, batches[:steps])
            record = {
                "way": row,
                "steps": steps,
                "retained": round(steps * (2 - counted.forwards))
                if row.startswith("ours")
                else None,
                "ideal": counted.forwards / 3 + counted.backwards * 2 / 3,
                "forwards_per_sample": counted.forwards,
                "backwards_per_sample": counted.backwards,
                "flops": counted.flops / plain_flops,
                "flops_due": counted.forwards * share + counted.backwards * (1 - share),
                "memory": peak_bytes(setup, way, batches[:steps]) / single,
                "errors": errors.get(row),
            }
            if args.rounds:
                ratios, per_second = (
                    timed[row]["ratios"],
                    1 / statistics.median(timed[row]["seconds_per_sample"]),
                )
                record |= {
                    "time": statistics.median(ratios),
                    "time_range": [min(ratios), max(ratios)],
                }
                record |= {"samples_per_second": args.ranks * per_second}
                if device.type == "cuda":
                    model_flops = per_second * step_flops / args.micro_batch  # without the replay
                    record |= {"flops_utilisation": model_flops / (args.peak_tflops * 1e12)}
            results["rows"].append(record)
    return results


def _agreed_free(setup: Setup) -> int:
    """Free memory of the device, the least of all ranks'; 0 if it is not known."""
    free = torch.tensor([available_bytes(setup.device) or 0], device=setup.device)
    if setup.world_size > 1:
        free //= setup.world_size if setup.device.type == "cpu" else 1
        dist.all_reduce(free, dist.ReduceOp.MIN)
    return int(free.item())


def measure_times(
    setup: Setup,
    contestants: dict[str, Way],
    batches: Sequence[MicroBatch],
    args: argparse.Namespace,
) -> dict[str, dict[str, list[float]]]:
    """Each way's seconds a sample, and their ratios to a step of plain training taken just before, round by round.

    Two steps in a row meet about the same load of other programs. Every round begins with another way.
    """
    yardstick = contestants["plain micro-batches"]
    samples = sum(len(images) for images, _ in batches)
    found: dict[str, dict[str, list[float]]] = {
        row: {"ratios": [], "seconds_per_sample": []} for row in contestants
    }
    for row, way in contestants.items():
        for _ in range(WARM_UP_STEPS if args.rounds or row.endswith("auto") else 0):
            seconds(setup, way, batches, args.clock)
    rows = list(contestants)
    for turn in range(args.rounds):
        first = turn % len(rows)
        for row in rows[first:] + rows[:first]:
            before = seconds(setup, yardstick, batches, args.clock)
            took = seconds(setup, contestants[row], batches, args.clock)
            found[row]["ratios"].append(took / before)
            found[row]["seconds_per_sample"].append(took / samples)
    return found


def measure_errors(
    name: str, args: argparse.Namespace, device: torch.device, rank: int
) -> dict[str, dict[str, float]]:
    """The gradient error of each way that should give the effective batch's gradient, on a small batch."""
    setup = make_setup(name, args, device, rank, args.error_precision)
    batches = make_batches(name, setup.inner, [args.error_batch] * args.error_steps, SEED + rank)
    reference = reference_gradient(setup, batches, SEED + rank)
    contestants = ways(setup, args.error_steps, args.loss_chunk, with_one_graph=False)
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
    half = errors.get(f"ours, retain {args.error_steps // 2}")
    for steps in args.steps:
        if half is not None and steps > 1:
            errors.setdefault(f"ours, retain {steps // 2}", half)
    return errors


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def steps_markdown(results: dict[str, Any]) -> str:
    """The rows as a table, below a line with the settings."""
    gpu = any("flops_utilisation" in row for row in results["rows"])
    timed = results["rounds"] > 0
    header = ["K", "way"] + (["time / plain (range)", "ideal", "time / ideal"] if timed else [])
    header += ["forwards, backwards", "FLOPs (due)", "memory", "error of towers", "of logit_scale"]
    header += ["samples/s", "FLOPs utilisation"] if gpu else []
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
        if gpu:
            cells += [f"{row['samples_per_second']:.0f}", f"{row['flops_utilisation']:.1%}"]
        rows.append(cells)
    about = (
        f"{results['model']} ({results['parameters'] / 1e6:.1f} M parameters, {results['gflops_per_sample']:.2f} GFLOP a "
        f"sample, forward share {results['forward_share']:.4f}), micro-batch {results['micro_batch']}, {results['ranks']} "
        f"rank(s), {results['precision']}, token drop {results['token_drop']}, dropout {results['dropout']}, "
        f"{results['rounds']} rounds by the {results['clock']} clock; {results['device']}, torch {results['torch']}; one "
        f"micro-batch peaks at {results['peak_mib_of_one_micro_batch']:.0f} MiB"
    )
    if results["error_steps"]:
        precision, steps, batch = (
            results[f"error_{part}"] for part in ("precision", "steps", "batch")
        )
        about += f"; errors in {precision} at K={steps}, micro-batch {batch}"
    return f"{about}.\n\n{markdown_table(header, rows)}"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        if args.ranks > 1:
            torch.multiprocessing.spawn(measure_rank, (args, scratch), nprocs=args.ranks)
        else:
            measure_rank(0, args, scratch)
        results = json.loads((Path(scratch) / "results.json").read_text(encoding="utf-8"))
    write(results, steps_markdown(results), args.out)


if __name__ == "__main__":
    main()
