"""Started by tests, alone or under torchrun: registers a test's model config, then runs a training program.

    python training_script.py {stock|ours} CONFIG.json [--record FILE | --gradient FILE] -- ARGS

`--record` writes the caption tokens of every optimizer step that our loop takes, one line of JSON a step and rank.
`--gradient` keeps all that went into the first two steps and the gradients that came out, one torch file a rank.
"""

from __future__ import annotations

import json
import os
import sys

import open_clip
import torch


def record_steps(path: str) -> None:
    from open_clip_zerovl.dga.step import DecoupledGradientAccumulation

    stock = DecoupledGradientAccumulation.backward

    def backward(self, micro_batches, **options):
        losses = stock(self, micro_batches, **options)
        row = {
            "rank": int(os.environ.get("RANK", 0)),
            "tokens": [texts.tolist() for _, texts, *_ in micro_batches],
            "pixels": [images[:, :, 0, 0].tolist() for images, *_ in micro_batches],
            "loss": float(losses["loss"]),
        }
        with open(f"{path}.{row['rank']}", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return losses

    DecoupledGradientAccumulation.backward = backward


def record_gradients(path: str) -> None:
    from open_clip_zerovl.dga.step import DecoupledGradientAccumulation

    stock = DecoupledGradientAccumulation.backward
    rank = int(os.environ.get("RANK", 0))
    steps = []

    def backward(self, micro_batches, *, prepare=None, **loss_inputs):
        inner = self._inner
        entry = {
            "weights": {name: value.clone() for name, value in inner.state_dict().items()},
            "rng": torch.get_rng_state(),
            "prepared": [prepare(*micro_batch) for micro_batch in micro_batches],
            "loss_inputs": loss_inputs,
        }
        losses = stock(self, micro_batches, prepare=prepare, **loss_inputs)
        entry["gradients"] = {
            name: parameter.grad.clone() for name, parameter in inner.named_parameters()
        }
        entry["loss"] = losses["loss"]
        steps.append(entry)
        torch.save(steps, f"{path}.{rank}")
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
    from training import stopping
    from training.main import main as our_main

    open_clip.add_model_config(config)
    if rest:
        {"--record": record_steps, "--gradient": record_gradients}[rest[0]](rest[1])
    return stopping.run(lambda: our_main(arguments))


if __name__ == "__main__":
    sys.exit(main())
