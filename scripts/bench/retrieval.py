"""Time and memory of the retrieval metrics and of open_clip's get_clip_metrics (sizes of the paper's section 5).

    python -m scripts.bench.retrieval [--repeats 3] [--width 512] [--device cpu]

Rows: 5,000 images x 5,000 captions with both programs (open_clip's needs a square), 5,000 x 25,000 with ours. Times are the
least of the repeats, taken in turn, so that other load affects both alike; CPU seconds are summed over threads. Memory on a CPU
is the peak resident set minus the resident set before the call (Linux), without mapped files, since pages of libraries that are
read again are not an allocation; on a GPU it is the peak that torch allocated. Features are not counted.
Expected: at least 5 times as fast at 5,000 x 5,000, and at most 1 GiB above the features everywhere.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from open_clip_train.train import get_clip_metrics

from open_clip_zerovl.evaluate.retrieval.metrics import retrieval_metrics
from open_clip_zerovl.report.tables import markdown_table

LEAST_SPEEDUP = 5.0
MOST_MIB = 1024.0


def features(
    images: int, captions_each: int, width: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random features; captions are near their images, so that recalls are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(images, width, generator=generator)
    links = torch.arange(images).repeat_interleave(captions_each)
    text = image[links] + 3.5 * torch.randn(len(links), width, generator=generator)
    return (
        F.normalize(image, dim=-1).to(device),
        F.normalize(text, dim=-1).to(device),
        links.to(device),
    )


def measured(call: Callable[[], dict], device: str) -> tuple[float, float, float, dict]:
    """Seconds, CPU seconds, peak MiB above the start, and the result."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(
            0
        )  # memory that an earlier call has freed must not count as resident before this one
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # resets the peak to the memory that is resident now
        before = _status("RssAnon")
    start, start_cpu = time.perf_counter(), time.process_time()
    result = call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    peak = (
        torch.cuda.max_memory_allocated()
        if device.startswith("cuda")
        else _status("VmHWM") - _status("RssFile")
    )
    return seconds, cpu_seconds, (peak - before) / 2**20, result


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    small, large = (features(5000, each, args.width, args.device) for each in (1, 5))
    calls: dict[str, Callable[[], dict]] = {
        "5,000 x 5,000, open_clip get_clip_metrics": lambda: get_clip_metrics(
            *small[:2], torch.tensor(100.0)
        ),
        "5,000 x 5,000, retrieval_metrics": lambda: retrieval_metrics(*small),
        "5,000 x 25,000, retrieval_metrics": lambda: retrieval_metrics(*large),
    }
    best = dict.fromkeys(calls, (math.inf, math.inf, 0.0))
    results: dict[str, dict] = {}
    for _ in range(args.repeats):
        for name, call in calls.items():
            seconds, cpu_seconds, mib, results[name] = measured(call, args.device)
            best[name] = (
                min(best[name][0], seconds),
                min(best[name][1], cpu_seconds),
                max(best[name][2], mib),
            )

    rows = [
        [name, f"{wall:.2f}", f"{cpu:.2f}", f"{mib:.0f}"] for name, (wall, cpu, mib) in best.items()
    ]
    print(
        markdown_table(
            ["images x captions, program", "seconds", "CPU seconds", "peak MiB above the features"],
            rows,
        )
    )
    theirs, ours, larger = calls
    difference = max(
        abs(float(results[theirs][f"{way}_R@{k}"]) - results[ours][f"{way}_R@{k}"])
        for way in ("image_to_text", "text_to_image")
        for k in (1, 5, 10)
    )
    speedup = best[theirs][0] / best[ours][0]
    print(f"\n{speedup:.1f} times as fast; recalls differ by {difference:.1e} at most")
    print(
        f"R@1 {results[ours]['image_to_text_R@1']:.3f}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    enough = speedup >= LEAST_SPEEDUP and max(best[ours][2], best[larger][2]) <= MOST_MIB
    return 0 if enough else 1


if __name__ == "__main__":
    raise SystemExit(main())
