"""Training FLOPs, and CPU time, of the paper's image tower and whole model with and without TokenDrop (section 4.2, Table 7).

    python scripts/bench/token_drop.py [--rate 0.25] [--batch-size 2]

Counts matrix products of one forward and backward pass on the CPU with random weights: ViT-B/16 at 224 px, BERT-base at
25 tokens. Multiply-adds count twice. Then times the image tower's passes (median of three, CPU seconds of this process).
About a minute; needs about 3 GB of memory. Expected: 0.744 of the image tower's FLOPs, 0.771 of both towers'.
"""

from __future__ import annotations

import argparse
import statistics
import time

import open_clip
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel

VISION = {
    "timm_model_name": "vit_base_patch16_224",
    "timm_model_pretrained": False,
    "timm_pool": "token",
    "timm_proj": "linear",
    "image_size": 224,
}


def image_cost(rate: float, batch_size: int) -> tuple[int, float]:
    """FLOPs and CPU seconds of a forward and backward pass of the image tower and its projection."""
    torch.manual_seed(0)
    text = {"context_length": 8, "width": 32, "heads": 2, "layers": 1}
    model = open_clip.CLIP(embed_dim=512, vision_cfg=VISION | {"patch_dropout": rate}, text_cfg=text).train()
    images = torch.randn(batch_size, 3, 224, 224)
    with FlopCounterMode(display=False) as counter:
        model.encode_image(images).sum().backward()
    seconds = []
    for _ in range(3):
        start = time.process_time()
        model.encode_image(images).sum().backward()
        seconds.append(time.process_time() - start)
    return counter.get_total_flops(), statistics.median(seconds)


def text_flops(batch_size: int) -> int:
    """FLOPs of a forward and backward pass of BERT-base over 25 tokens."""
    model = BertModel(BertConfig(), add_pooling_layer=False).train()
    tokens = torch.randint(1, 30_000, (batch_size, 25))
    with FlopCounterMode(display=False) as counter:
        model(tokens).last_hidden_state[:, 0].sum().backward()
    return counter.get_total_flops()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.25, help="share of patch tokens dropped")
    parser.add_argument("--batch-size", type=int, default=2)
    args = parser.parse_args()
    costs = [image_cost(rate, args.batch_size) for rate in (0.0, args.rate)]
    whole, dropped = (flops / args.batch_size / 1e9 for flops, _ in costs)
    text = text_flops(args.batch_size) / args.batch_size / 1e9
    print(f"image tower, GFLOPs a sample, forward and backward: {whole:.1f}; with TokenDrop {args.rate}: {dropped:.1f}")
    print(f"text tower: {text:.1f}")
    print(f"image tower: {dropped / whole:.3f} of the FLOPs; both towers: {(dropped + text) / (whole + text):.3f}")
    print(f"image tower: {costs[1][1] / costs[0][1]:.3f} of the CPU time ({costs[0][1]:.2f} s, {costs[1][1]:.2f} s)")


if __name__ == "__main__":
    main()
