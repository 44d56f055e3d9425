"""Started by tests, alone or under torchrun: registers a test's model config, then runs a training program.

    python training_script.py {stock|ours} CONFIG.json [--record FILE] -- ARGS

`--record` writes the caption tokens of every optimizer step that our loop takes, one line of JSON a step and rank.
"""

from __future__ import annotations

import json
import os
import sys

import open_clip
import torch


def record_steps(path: str) -> None:
    from open_clip_zerovl.dga import DecoupledGradientAccumulation

    stock = DecoupledGradientAccumulation.backward

    def backward(self, micro_batches, **options):
        losses = stock(self, micro_batches, **options)
        row = {
            "rank": int(os.environ.get("RANK", 0)),
            "tokens": [texts.tolist() for _, texts in micro_batches],
            "pixels": [images[:, :, 0, 0].tolist() for images, _ in micro_batches],
            "loss": float(losses["loss"]),
        }
        with open(f"{path}.{row['rank']}", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return losses

    DecoupledGradientAccumulation.backward = backward


def main() -> int:
    split = sys.argv.index("--")
    program, config, *rest = sys.argv[1:split]
    arguments = sys.argv[split + 1 :]
    torch.use_deterministic_algorithms(True)
    if program == "stock":
        open_clip.add_model_config(config)
        from open_clip_train.main import main as stock_main

        return stock_main(arguments) or 0
    from training.main import main as our_main

    open_clip.add_model_config(config)
    if rest:
        record_steps(rest[1])
    return our_main(arguments)


if __name__ == "__main__":
    sys.exit(main())
