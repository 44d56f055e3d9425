"""What each method costs or saves (sections 3.2 and 4.3): FLOPs, time and memory of a training step at paper size.

    python scripts/bench/methods.py [--device cuda] [--precision amp_bf16] [--batch-size 2] [--dga-steps 4] [--repeats 3]

ViT-B/16 at 224 px and BERT-base at 25 tokens with random weights, one step of decoupled gradient accumulation (retain 1),
forward and backward, without data loading and optimizer. Each line has the FLOPs of matrix products a sample (multiply-adds
count twice), the median time over the repeats, on a GPU the peak memory, and ratios to the first line. On the CPU time is
that of the process, which a shared machine makes noisy; `--repeats 0` counts FLOPs only (about three minutes on one core).
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import open_clip
import torch
from open_clip_train.precision import get_autocast
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig

from open_clip_zerovl.auxiliary import freeze
from open_clip_zerovl.dga import DecoupledGradientAccumulation
from open_clip_zerovl.frozen_cache import FrozenCache
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.mixup import CoinFlipMixup, Mix
from open_clip_zerovl.sources import Source

MODES = (
    "baseline",
    "image mixup",
    "text mixup",
    "token drop 0.25",
    "frozen text",
    "frozen text, cached",
    "frozen image",
)


def build(mode: str, text_folder: str) -> torch.nn.Module:
    """The paper's model with the mode's towers."""
    torch.manual_seed(0)
    vision = {
        "timm_model_name": "vit_base_patch16_224",
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
    if mode.startswith("frozen"):
        freeze(model, ["image" if "image" in mode else "text"])
    return model.train()


def measure(mode: str, args: argparse.Namespace, text_folder: str, cache_folder: str) -> tuple[int, float, float]:
    """FLOPs and seconds of a step (nan without repeats), and peak GPU memory in GiB (nan on the CPU)."""
    device = torch.device(args.device)
    model = build(mode, text_folder).to(device)
    batch, steps = args.batch_size, args.dga_steps
    micro_batches = [(torch.randn(batch, 3, 224, 224), torch.randint(1, 30_000, (batch, 25))) for _ in range(steps)]
    prepare: Callable[..., Any] | None = None
    loss_inputs: dict[str, Any] = {}
    with ExitStack() as stack:
        if "mixup" in mode:
            mixup, mix = CoinFlipMixup(), Mix(mixes_images="image" in mode, weight=0.7)
            mixup.attach(model)
            stack.enter_context(mixup.applied(mix))
            prepare, loss_inputs = mix.prepare, mix.loss_inputs([batch] * steps)
        if "cached" in mode:
            source = Source("bench", ("0.tar",), (batch * steps,))
            cache = FrozenCache(cache_folder, [source], tower="text", width=512, fingerprint="bench")
            cache.attach(model)
            rows = torch.arange(batch * steps).split(batch)
            micro_batches = [
                (images, cache.pack(texts, torch.stack([torch.zeros_like(row), row], dim=1)))
                for (images, texts), row in zip(micro_batches, rows, strict=True)
            ]
            prepare = cache.prepare
        autocast = get_autocast(args.precision, device_type=device.type)
        dga = DecoupledGradientAccumulation(model, ContrastiveLoss(), autocast=autocast, retain=1, check="never")
        flops, seconds = 0, []
        for repeat in range(-2, args.repeats):  # the first warms up and fills the cache, the second is counted
            model.zero_grad()
            clock = time.perf_counter if device.type == "cuda" else time.process_time
            with FlopCounterMode(display=False) if repeat == -1 else nullcontext() as counter:
                start = clock()
                dga.backward(micro_batches, prepare=prepare, **loss_inputs)
                if device.type == "cuda":
                    torch.cuda.synchronize()
            if counter is not None:
                flops = counter.get_total_flops()
            elif repeat >= 0:
                seconds.append(clock() - start)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else math.nan
    return flops, statistics.median(seconds) if seconds else math.nan, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", help="open_clip's, of autocast: fp32, amp, amp_bf16")
    parser.add_argument("--batch-size", type=int, default=2, help="micro-batch")
    parser.add_argument("--dga-steps", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    args = parser.parse_args()
    samples = args.batch_size * args.dga_steps
    first: tuple[int, float] | None = None
    print(f"{'':<20} GFLOPs a sample, ratio    ms a sample, ratio    GiB")
    with tempfile.TemporaryDirectory() as text_folder, tempfile.TemporaryDirectory() as cache_folder:
        BertConfig().save_pretrained(text_folder)
        for mode in args.modes:
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            flops, seconds, memory = measure(mode, args, text_folder, cache_folder)
            first = first or (flops, seconds)
            print(
                f"{mode:<20} {flops / samples / 1e9:15.1f} {flops / first[0]:6.3f} {seconds / samples * 1e3:14.2f} "
                f"{seconds / first[1]:6.3f} {memory:6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
