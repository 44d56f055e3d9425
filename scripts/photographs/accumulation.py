"""open_clip's `--accum-freq` against `--dga-steps` end to end, with a BERT that has dropout (study.yaml, 4).

    python -m scripts.photographs.styles --tars DIR --features DIR
    python -m scripts.photographs.accumulation --tars DIR --features DIR [--minutes 30]

The towers: two BERT layers of width 128 from random weights, with dropout, on the stored token states of MiniLM-L6, and a
residual tower on the stored features of the photographs. open_clip's arm is its own `train_one_epoch`; both arms see the same
micro-batches in the same order at the same rates. A stopped call continues: each finished run is a line of
docs/results/photographs/accumulation.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from open_clip.loss import ClipLoss
from open_clip_train.train import train_one_epoch
from timm.optim import Lars
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from open_clip_zerovl.core.files import save_atomically
from open_clip_zerovl.core.randomness import Purpose, seed_step, seeded, stream, stream_seed
from open_clip_zerovl.dga import DecoupledGradientAccumulation
from open_clip_zerovl.evaluate.metrics import retrieval_metrics
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.optimizer import optimizer_step, parameter_groups, warmup_cosine
from scripts.photographs.heads import EMBED_DIM, HIDDEN, START_SCALE, Training, epoch_order
from scripts.photographs.mixtures import WIDTH, Store, principal_components
from scripts.photographs.study import append_records, commit, read_protocol, read_records
from scripts.photographs.styles import flickr8k_split, read_captions

PART = "accumulation"
TOKENS = 24
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.0, betas=(0.9, 0.98), eps=1e-6),
    "lars": partial(Lars, lr=0.0, momentum=0.9, always_adapt=True),
}


class Towers(nn.Module):
    """A picture's residual tower and a caption's BERT layers, with open_clip's outputs."""

    def __init__(self, states: int, settings: dict[str, Any], seed: int) -> None:
        super().__init__()
        width = settings["width"]
        config = BertConfig(
            vocab_size=1,
            hidden_size=width,
            num_hidden_layers=settings["layers"],
            num_attention_heads=settings["heads"],
            intermediate_size=4 * width,
            hidden_dropout_prob=settings["dropout"],
            attention_probs_dropout_prob=settings["dropout"],
        )
        with seeded(stream_seed(seed, Purpose.ALIGN_HEADS)):
            self.straight = nn.Linear(WIDTH, EMBED_DIM, bias=False)
            self.inner = nn.Linear(WIDTH, HIDDEN, bias=False)
            self.outer = nn.Linear(HIDDEN, EMBED_DIM, bias=False)
            self.lift = nn.Linear(states, width)
            self.text = BertModel(config, add_pooling_layer=False)
            self.proj = nn.Linear(width, EMBED_DIM, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(START_SCALE))

    def encode_image(self, rows: Tensor) -> Tensor:
        return F.normalize(self.straight(rows) + self.outer(F.gelu(self.inner(rows))), dim=-1)

    def encode_text(self, states: Tensor) -> Tensor:
        inputs = self.lift(states.float())
        outputs = self.text(inputs_embeds=inputs, attention_mask=is_token(states))
        return F.normalize(self.proj(outputs.last_hidden_state[:, 0]), dim=-1)

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        features = {"image_features": self.encode_image(images)}
        features["text_features"] = self.encode_text(texts)
        return features | {"logit_scale": self.logit_scale.exp()}


@dataclass
class Data:
    """Principal components of the photographs (n, W), and token states of their captions (n, 5, T, D), part by part."""

    images: dict[str, Tensor]
    states: dict[str, Tensor]


def read_data(tars: Path, features: Path) -> Data:
    """Read the stored features and the captions' token states, which are made once."""
    file = features / "states.pt"
    if not file.is_file():
        captions = read_captions(tars / "flickr8k.tar")
        encoder = features / "encoders" / "minilm"
        tokenizer, model = (
            AutoTokenizer.from_pretrained(encoder),
            AutoModel.from_pretrained(encoder),
        )
        made = {}
        for part, names in flickr8k_split(list(captions)).items():
            flat = [caption for name in names for caption in captions[name]]
            states = token_states(flat, tokenizer, model.eval())
            made[part] = states.view(len(names), 5, *states.shape[1:])
        save_atomically(made, file)
    store = Store(features)
    reduce = principal_components(store.train["pictures"]["plain"])
    parts = {"train": store.train, "validation": store.validation, "test": store.test}
    images = {name: reduce(part["pictures"]["plain"]) for name, part in parts.items()}
    return Data(images, torch.load(file, weights_only=True, mmap=True))


@torch.inference_mode()
def token_states(captions: Sequence[str], tokenizer: Any, model: Any) -> Tensor:
    """Compute the last hidden states (n, T, D) of captions in half precision, zero where a caption has no token."""
    settings = {"padding": "max_length", "truncation": True, "max_length": TOKENS}
    tokens = tokenizer(list(captions), return_tensors="pt", **settings)
    order = tokens["attention_mask"].sum(1).argsort()
    states = torch.zeros(len(captions), TOKENS, model.config.hidden_size, dtype=torch.half)
    for rows in order.split(64):
        mask = tokens["attention_mask"][rows]
        length = int(mask.sum(1).max())
        outputs = model(tokens["input_ids"][rows, :length], attention_mask=mask[:, :length])
        states[rows, :length] = (outputs.last_hidden_state * mask[:, :length, None]).half()
    return states.clone()


def is_token(states: Tensor) -> Tensor:
    """Mark the tokens (..., T) of padded states (..., T, D)."""
    return states.any(-1)


@dataclass
class Run:
    """A run of the protocol.

    Attributes:
        optimizer: "adamw" or "lars".
        arm: "accum-freq" or "dga".
        clip: the norm to which gradients are clipped; None: they are not.
    """

    optimizer: str
    arm: str
    steps: int
    clip: float | None
    rate: float
    seed: int

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer,
            "arm": self.arm,
            "K": self.steps,
            "clip": self.clip,
            "rate": self.rate,
            "seed": self.seed,
        }


def planned(settings: dict[str, Any]) -> Iterator[Run]:
    """Order runs by their value: one setting after the other, seed by seed, so that what is done is paired."""
    for setting in settings["settings"]:
        for rate in settings["rates"][setting["optimizer"]]:
            for seed in settings["seeds"]:
                for arm in ("dga", "accum-freq"):
                    yield Run(setting["optimizer"], arm, setting["K"], setting["clip"], rate, seed)


class Trainer:
    """A trainer of runs on micro-batches of (images, tokens).

    Args:
        settings: the protocol's.
    """

    def __init__(self, data: Data, settings: dict[str, Any]) -> None:
        self.data, self.settings = data, settings

    def __call__(self, run: Run) -> Towers:
        """Train the towers of a run."""
        micro = self.settings["micro_batch"]
        training = Training(
            micro * run.steps, "random", self.settings["epoch_samples"], self.settings["epochs"]
        )
        per_epoch = training.epoch_samples // training.batch
        width = self.data.states["train"].shape[-1]
        model = Towers(width, self.settings["bert"], run.seed)
        optimizer = OPTIMIZERS[run.optimizer](parameter_groups(model, training.weight_decay))
        total = training.epochs * per_epoch
        warmup = round(training.warmup_share * total)

        def schedule(step: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = warmup_cosine(step, total, run.rate, warmup)

        dga = DecoupledGradientAccumulation(model, ContrastiveLoss())
        for epoch in range(training.epochs):
            batches = self.micro_batches(training, micro, run.seed, epoch)
            if run.arm == "dga":
                model.train()
                for number in range(per_epoch):
                    step = epoch * per_epoch + number
                    seed_step(run.seed, step, 0)
                    schedule(step)
                    optimizer.zero_grad()
                    dga.backward(batches[number * run.steps : (number + 1) * run.steps])
                    optimizer_step(model, optimizer, grad_clip_norm=run.clip)
            else:
                seed_step(run.seed, epoch, 0)
                open_clip_epoch(model, batches, epoch, optimizer, schedule, run)
        return model

    def micro_batches(
        self, training: Training, micro: int, seed: int, epoch: int
    ) -> list[tuple[Tensor, Tensor]]:
        """List the micro-batches of an epoch in their order."""
        images, states = self.data.images["train"], self.data.states["train"]
        shift = stream(seed, Purpose.ALIGN_CAPTION).integers(0, 1 << 30, size=len(images))
        order = epoch_order([len(images)], training, seed, epoch).reshape(-1, micro)
        return [(images[rows], cut(states[rows, (shift[rows] + epoch) % 5])) for rows in order]

    @torch.no_grad()
    def score(self, model: Towers, part: str) -> float:
        """Score mean recall (RSUM / 6) on a part's photographs."""
        model.eval()
        states = self.data.states[part].flatten(0, 1)
        texts = torch.cat([model.encode_text(cut(block)) for block in states.split(100)])
        images = model.encode_image(self.data.images[part])
        owner = torch.arange(len(images)).repeat_interleave(5)
        return retrieval_metrics(images.nan_to_num(), texts.nan_to_num(), owner)["rsum"] / 6


def cut(states: Tensor) -> Tensor:
    """Leave out the padding that all texts of a micro-batch have."""
    return states[:, : int(is_token(states).sum(1).max())]


def open_clip_epoch(
    model: Towers,
    batches: Sequence[tuple[Tensor, Tensor]],
    epoch: int,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    run: Run,
) -> None:
    """Train an epoch with open_clip's loop."""
    loader = Loader(batches)
    data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda _: None)}
    args = SimpleNamespace(
        device="cpu", precision="fp32", distill=False, accum_freq=run.steps, skip_scheduler=False,
        horovod=False, grad_clip_norm=run.clip, world_size=1, rank=0, local_rank=0, distributed=False,
        log_every_n_steps=10**9, log_local=False, batch_size=len(batches[0][0]), wandb=False,
    )  # fmt: skip
    loss = ClipLoss(cache_labels=True)
    train_one_epoch(model, data, loss, epoch, optimizer, None, schedule, None, args)


class Loader(list):
    """Micro-batches as open_clip's loop reads them."""

    @property
    def num_batches(self) -> int:
        return len(self)

    @property
    def num_samples(self) -> int:
        return sum(len(images) for images, _ in self)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tars", type=Path, required=True, metavar="DIR")
    parser.add_argument("--features", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run later")
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = read_protocol()[PART]
    trainer = Trainer(read_data(given.tars, given.features), settings)
    end = time.monotonic() + 60 * given.minutes
    known = tuple(Run("", "", 0, None, 0.0, 0).facts)
    there = [{key: record[key] for key in known} for record in read_records(PART)]
    for run in planned(settings):
        if time.monotonic() > end:
            return
        if run.facts in there:
            continue
        begin = time.process_time()
        model = trainer(run)
        seconds = round(time.process_time() - begin, 1)
        score = partial(trainer.score, model)
        scores = {"validation": round(score("validation"), 3), "clean": round(score("test"), 3)}
        record = run.facts | {"cpu_seconds": seconds, "commit": commit(), "scores": scores}
        append_records(PART, [record])
        print(record, flush=True)


if __name__ == "__main__":
    main()
