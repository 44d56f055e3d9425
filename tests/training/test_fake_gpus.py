"""An epoch of the whole training loop on the first of eight fake GPUs: its waits for the GPU besides those of the log."""

from __future__ import annotations

import argparse
from functools import partial
from types import SimpleNamespace

import open_clip
import torch

from open_clip_zerovl.data import images as images_module
from open_clip_zerovl.data.images import normalize
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.optimizer import parameter_groups
from support.fake_cuda import FakeDDP, Waits, fake_cuda, fake_ranks, to_fake_cuda
from support.tiny_clip import NATIVE_VISION, bert_text, register, write_bert
from training import train as train_module
from training.data import TrainData
from training.log import RunLog
from training.train import Trainer, create_loss

W, K, B, STEPS = 8, 2, 4, 3
# Waits allowed in the epoch, by a part of their line: (how often, why). A fake tensor gives a list number by number.
ALLOWED = {
    "data/images.py _scale_and_shift": (2, "mean and std are brought to the device once"),
    "losses/gathering.py gathered_sizes": (
        (W + 1) * STEPS,
        "how many rows each rank holds, once a step",
    ),
    "training/log.py": (4 * STEPS, "the loss is read in the steps that are logged, here all"),
}


class Loader:
    """Micro-batches as a loader leaves them."""

    num_batches, num_samples = STEPS, STEPS * K * B * W

    def __init__(self, side: int, length: int) -> None:
        self.side, self.length = side, length

    def __iter__(self):
        for number in range(STEPS * K):
            origin = torch.stack(
                [torch.zeros(B, dtype=torch.long), torch.arange(B) + number * B], dim=1
            )
            images = torch.empty(B, 3, self.side, self.side, dtype=torch.uint8)
            yield images, torch.ones(B, self.length, dtype=torch.long), origin

    def set_epoch(self, *_):
        pass


def test_an_epoch_over_eight_ranks_waits_only_where_it_must(tmp_path, monkeypatch):
    images_module._scale_and_shift.cache_clear()
    name = register(
        tmp_path,
        "fake-ranks",
        {**NATIVE_VISION, "layers": 1},
        bert_text(write_bert(tmp_path / "bert")),
    )
    model = open_clip.create_model(
        name,
        pretrained_text=False,
        pretrained_image=False,
        force_patch_dropout=0.25,
        output_dict=True,
    )
    mixup = CoinFlipMixup(seed=1)  # both coins in three steps
    mixup.attach(model)
    # The check, which reads once in the first step that replays, would take the values read for differences.
    config = AllFlags(
        sampling="debiased", dga_steps=K, dga_check="never", coin_flip_mixup=True, loss_chunk=5, sort_text=True,
        positives="pair",  # without it the captions of the first batch are compared, which fakes do not have
    )  # fmt: skip
    args = argparse.Namespace(
        device="cuda:0", precision="amp_bf16", seed=0, rank=0, local_rank=0, world_size=W, distributed=True, batch_size=B,
        workers=0, skip_scheduler=False, grad_clip_norm=1.0, log_every_n_steps=2, wandb=False, checkpoint_path=str(tmp_path),
        name="x", model="x", epochs=1, resume=None,
        save_logs=False, log_local=False, train_num_samples=None, dataset_resampled=False, siglip=False,
    )  # fmt: skip
    never = SimpleNamespace(agreed=lambda distributed: 0)
    monkeypatch.setattr("open_clip_zerovl.recipe.step.text_padding", lambda model: 0)
    # A count that is read of fake losses is not zero, and would end the run.
    stock_log = train_module.StepLog
    monkeypatch.setattr(
        train_module,
        "StepLog",
        lambda *given, **more: stock_log(*given, **{**more, "recovers": True}),
    )
    steps = []
    with fake_ranks(W), fake_cuda():
        to_fake_cuda(model)
        optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3))
        train = TrainData(Loader(32, 32), partial(normalize, mean=(0.5,) * 3, std=(0.5,) * 3))
        trainer = Trainer(config, never, RunLog(args, config), mixup=mixup)
        waits = Waits(read=K * B)
        with waits:
            trainer(
                FakeDDP(model),
                {"train": train},
                create_loss(config, args),
                0,
                optimizer,
                None,
                steps.append,
                args,
            )
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert steps == list(range(STEPS))
    found = waits.by_line()
    unexpected = {
        line: count
        for line, count in found.items()
        if count > max((most for part, (most, _) in ALLOWED.items() if part in line), default=0)
    }
    assert unexpected == {}
    assert any("gathered_sizes" in line for line in found) and any(
        "training/log" in line for line in found
    )
    images_module._scale_and_shift.cache_clear()
