"""The cost of each method (sections 3.2 and 4.2): FLOPs, time and memory of a training step at paper size.

    python scripts/bench/methods.py [--device cuda] [--precision amp_bf16] [--batch-size 2] [--dga-steps 4] [--rounds 3]

ViT-B/16 (and, for the auxiliary encoder of Table 8, ViT-B/32) at 224 px and BERT-base at 25 tokens with random weights, one
step of decoupled gradient accumulation (retain 1), forward and backward, without data loading and optimizer. A line has

    FLOPs       of matrix products a sample (a multiply-add counts twice), and their ratio to the model's baseline
    time        milliseconds a sample, median over rounds in which every mode takes a turn, and the median of the rounds'
                ratios to the baseline; on a CPU by the process's CPU time, which is still noisy on a shared machine
    memory      GiB at the peak of a step, with parameters, gradients and AdamW's two averages: on a GPU of the allocator, at
                --batch-size; else live tensor bytes at --memory-batch, simulated with bf16 autocast

`--rounds 0` leaves the times out (about three minutes on one core).
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import torch
from accumulation import keep_heap, simulated_peak_bytes
from open_clip_train.precision import get_autocast
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig

from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.frozen_cache import FrozenCache
from open_clip_zerovl.recipe.mixup import CoinFlipMixup, Mix
from open_clip_zerovl.recipe.towers import freeze

BASELINES = ("baseline", "ViT-B/32")
MODES = (
    "baseline",
    "image mixup",
    "text mixup",
    "token drop 0.25",
    "frozen text",
    "frozen text, cached",
    "frozen image",
    "ViT-B/32",
    "ViT-B/32, frozen text",
    "ViT-B/32, frozen text, cached",
)


def baseline_of(mode: str) -> str:
    return "ViT-B/32" if mode.startswith("ViT-B/32") else "baseline"


def build(mode: str, text_folder: str) -> torch.nn.Module:
    """The paper's model with the mode's towers."""
    torch.manual_seed(0)
    vision = {
        "timm_model_name": "vit_base_patch32_224" if mode.startswith("ViT-B/32") else "vit_base_patch16_224",
        "timm_model_pretrained": False,
        "timm_pool": "token",
        "timm_proj": "linear",
        "image_size": 224,
        "patch_dropout": 0.25 if mode == "token drop 0.25" else 0.0,
    }
    text = {
        "hf_model_name": text_folder,
        "hf_model_pretrained": False,
        "hf_proj_type": "linear",
        "hf_pooler_type": "cls_last_hidden_state_pooler",
    }
    model = open_clip.CustomTextCLIP(
        embed_dim=512, vision_cfg=vision, text_cfg=text, init_logit_scale=math.log(50), output_dict=True
    )
    if "frozen" in mode:
        freeze(model, ["image" if "frozen image" in mode else "text"])
    return model.train()


class Step:
    """A mode's training step: the gradient of K micro-batches of B random pairs."""

    def __init__(self, mode: str, model: torch.nn.Module, precision: str, cache_folder: Path) -> None:
        self.mode, self.model, self.cache_folder = mode, model, cache_folder
        self.device = next(model.parameters()).device
        self._dga = DecoupledGradientAccumulation(
            model,
            ContrastiveLoss(chunk_size=1024),
            autocast=get_autocast(precision, device_type=self.device.type),
            retain=1,
            check="never",
        )

    def run(self, batch: int, steps: int) -> None:
        self.model.zero_grad()
        micro_batches: list[tuple[torch.Tensor, ...]]
        micro_batches = [(torch.randn(batch, 3, 224, 224), torch.randint(1, 30_000, (batch, 25))) for _ in range(steps)]
        prepare: Callable[..., Any] | None = None
        loss_inputs: dict[str, Any] = {}
        with ExitStack() as stack:
            if "mixup" in self.mode:
                mixup, mix = CoinFlipMixup(), Mix(mixes_images="image" in self.mode, weight=0.7)
                mixup.attach(self.model)
                stack.callback(mixup.detach)
                stack.enter_context(mixup.applied(mix))
                prepare, loss_inputs = mix.prepare, mix.loss_inputs([batch] * steps)
            if "cached" in self.mode:
                cache = self._cache(batch * steps)
                rows = torch.arange(batch * steps).split(batch)
                micro_batches = [
                    (images, texts, torch.stack([torch.zeros_like(row), row], dim=1))
                    for (images, texts, *_), row in zip(micro_batches, rows, strict=True)
                ]
                prepare = cache.prepare
            self._dga.backward(micro_batches, prepare=prepare, **loss_inputs)

    def _cache(self, samples: int) -> FrozenCache:
        if not hasattr(self, "_frozen"):  # filled in the first step, read in all later ones
            source = Source("bench", ("0.tar",), (samples,))
            self._frozen = FrozenCache(self.cache_folder, [source], tower="text", width=512, fingerprint="bench")
            self._frozen.attach(self.model)
        return self._frozen

    def seconds(self, batch: int, steps: int) -> float:
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        start = clock()
        self.run(batch, steps)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    def flops(self, batch: int, steps: int) -> int:
        with FlopCounterMode(display=False) as counter:
            self.run(batch, steps)
        return counter.get_total_flops()


def memory_gib(mode: str, args: argparse.Namespace, text_folder: str, scratch: Path) -> float:
    """Peak of a step with two micro-batches, in GiB; nan where it cannot be simulated, since mixup and a cache read values."""
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif "cached" in mode or "mixup" in mode:
        return math.nan
    model = build(mode, text_folder).to(args.device)
    averages = sum(2 * parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    if args.device == "cuda":
        Step(mode, model, args.precision, scratch).run(args.batch_size, 2)
        peak = torch.cuda.max_memory_allocated()
    else:
        step = Step(mode, model, "amp_bf16", scratch)
        peak = simulated_peak_bytes(model, partial(step.run, args.memory_batch, 2))
    return (peak + averages) / 2**30


def measured_times(steps: dict[str, Step], args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Median seconds of a step, and the median ratio to the baseline's in the same round."""
    seconds: dict[str, list[float]] = {mode: [] for mode in steps}
    modes = list(steps)
    for turn in range(args.rounds):
        first = turn % len(modes)
        for mode in modes[first:] + modes[:first]:
            seconds[mode].append(steps[mode].seconds(args.batch_size, args.dga_steps))
    found = {}
    for mode, own in seconds.items():
        ratios = [mine / base for mine, base in zip(own, seconds[baseline_of(mode)], strict=True)]
        found[mode] = (statistics.median(own), statistics.median(ratios)) if own else (math.nan, math.nan)
    return found


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", default="fp32", help="open_clip's name of it: fp32, amp, amp_bf16")
    parser.add_argument("--batch-size", type=int, default=2, help="micro-batch")
    parser.add_argument("--memory-batch", type=int, default=128, help="micro-batch of the simulated memory")
    parser.add_argument("--dga-steps", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    args = parser.parse_args(argv)
    needed = {baseline_of(mode) for mode in args.modes}
    args.modes = [mode for mode in MODES if mode in args.modes or mode in needed]
    return args


def main() -> None:
    args = parse_args()
    if args.device == "cpu":
        keep_heap()
    samples = args.batch_size * args.dga_steps
    with tempfile.TemporaryDirectory() as scratch:
        text_folder = str(Path(scratch) / "bert")
        BertConfig().save_pretrained(text_folder)
        memory = {}
        for number, mode in enumerate(args.modes):
            memory[mode] = memory_gib(mode, args, text_folder, Path(scratch) / f"memory-{number}")
            gc.collect()
        steps = {
            mode: Step(
                mode, build(mode, text_folder).to(args.device), args.precision, Path(scratch) / f"cache-{number}"
            )
            for number, mode in enumerate(args.modes)
        }
        flops = {}
        for mode, step in steps.items():
            step.run(args.batch_size, args.dga_steps)  # warms up, and fills the cache
            flops[mode] = step.flops(args.batch_size, args.dga_steps)
        times = measured_times(steps, args)
    print(
        f"ViT-B + BERT-base, micro-batch {args.batch_size}, {args.dga_steps} of them, {args.precision}, {args.device}"
    )
    print("| mode | GFLOPs a sample | ratio | ms a sample | ratio | GiB | ratio |\n|---|--:|--:|--:|--:|--:|--:|")
    for mode in args.modes:
        base = baseline_of(mode)
        took, ratio = times[mode]
        cells = [f"{flops[mode] / samples / 1e9:.1f}", f"{flops[mode] / flops[base]:.3f}"]
        cells += [f"{took / samples * 1e3:.1f}", f"{ratio:.3f}"]
        cells += [f"{memory[mode]:.2f}", f"{memory[mode] / memory[base]:.3f}"]
        print("| " + " | ".join([mode, *("-" if cell == "nan" else cell for cell in cells)]) + " |")


if __name__ == "__main__":
    main()
