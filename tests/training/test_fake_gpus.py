"""Epochs of the training loop on the first of eight fake GPUs: no tensor on the wrong device, and no wait without a reason."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import open_clip
import pytest
import torch

from open_clip_zerovl.data import images as images_module
from open_clip_zerovl.data.images import normalize
from open_clip_zerovl.recipe import step as step_module
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.optimizer import parameter_groups
from open_clip_zerovl.recipe.step import text_padding
from open_clip_zerovl.recipe.towers import freeze
from support.fake_cuda import FakeDDP, Waits, fake_cuda, fake_ranks, to_fake_cuda
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    TIMM_VISION,
    bert_text,
    register,
    write_bert,
    write_modernbert,
)
from training import train as train_module
from training.data import TrainData
from training.log import RunLog
from training.train import Trainer, create_loss

W, K, B, STEPS = 8, 3, 4, 3
# Waits allowed in the epoch, by a part of their line: (how often, why). A fake tensor gives a list number by number.
ALLOWED = {
    "data/images.py _scale_and_shift": (2, "mean and std are brought to the device once"),
    "losses/gathering.py gathered_sizes": (
        (W + 1) * STEPS,
        "how many rows each rank holds, once a step",
    ),
    "training/log.py": (5 * STEPS, "the loss is read in the steps that are logged, here all"),
    "dga/retain.py _smallest": (1, "ranks agree once how many graphs they keep"),
    "torch/amp/grad_scaler.py": (
        2 + STEPS,
        "GradScaler makes its scale, and reads once a step whether gradients overflowed",
    ),
}
# model, and flags beside DGA's: each way of the step through a tower, a loss or a precision comes once
RECIPES: dict[str, tuple[str, dict]] = {
    "mixup, texts sorted, row chunks": (
        "BERT", {"coin_flip_mixup": True, "sort_text": True, "loss_chunk": 5},
    ),
    "timm, graphs as memory allows": ("timm", {"dga_retain": "auto"}),
    "ModernBERT, pure bf16": ("ModernBERT", {"sort_text": True, "precision": "pure_bf16"}),
    "SigLIP in fp32": ("bias", {"siglip": True, "loss_chunk": 5, "precision": "fp32"}),
    "shared captions, most graphs": ("BERT", {"positives": "both", "dga_retain": K - 1}),
    "checkpointing, a GradScaler": ("CLIP", {"checkpointing": True, "precision": "amp"}),
    "frozen image, all replayed": ("BERT", {"freeze": ("image",), "dga_retain": 0}),
}  # fmt: skip


class Loader:
    """Micro-batches as a loader leaves them, with a source, and the pictures' and captions' digests of `--positives`."""

    num_batches, num_samples = STEPS, STEPS * K * B * W

    def __init__(self, side: int, length: int) -> None:
        self.side, self.length = side, length

    def __iter__(self):
        for _ in range(STEPS * K):
            images = torch.empty(B, 3, self.side, self.side, dtype=torch.uint8)
            texts = torch.ones(B, self.length, dtype=torch.long)
            yield images, texts, torch.zeros(B, 4, dtype=torch.long)

    def set_epoch(self, *_):
        pass


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake")
    text, modern = bert_text(write_bert(folder / "bert")), write_modernbert(folder / "modern")
    vision = {**NATIVE_VISION, "layers": 1}
    return {
        "timm": register(folder, "fake-timm-bert", TIMM_VISION, text),
        "BERT": register(folder, "fake-bert", vision, text),
        "CLIP": register(folder, "fake-clip", vision, {**CLIP_TEXT, "vocab_size": 64, "layers": 1}),
        "ModernBERT": register(folder, "fake-modernbert", vision, bert_text(modern)),
        "bias": register(folder, "fake-bias", vision, text, init_logit_bias=-10.0),
    }


@pytest.fixture
def epoch(names, tmp_path, monkeypatch):
    """Trains an epoch of a recipe: its waits by line, and how many micro-batches' pictures it copied to the GPU."""

    def train(recipe: str, plant: Callable = lambda loss: None) -> tuple[dict[str, int], int]:
        name, flags = RECIPES[recipe]
        flags = dict(flags)
        precision, siglip = flags.pop("precision", "amp_bf16"), flags.pop("siglip", False)
        checkpointing = flags.pop("checkpointing", False)
        # The check, which reads once in the first step that replays, would take the values read for differences.
        config = AllFlags(
            sampling="debiased", dga_steps=K, dga_check="never", **{"positives": "pair", **flags}
        )
        args = argparse.Namespace(
            device="cuda:0", precision=precision, seed=0, rank=0, local_rank=0, world_size=W, distributed=True, batch_size=B,
            workers=0, skip_scheduler=False, grad_clip_norm=1.0, log_every_n_steps=2, wandb=False,
            checkpoint_path=str(tmp_path), name="x", model="x", epochs=1, resume=None, save_logs=False, log_local=False,
            train_num_samples=None, dataset_resampled=False, siglip=siglip,
        )  # fmt: skip
        model = open_clip.create_model(
            names[name], pretrained_text=False, pretrained_image=False, force_patch_dropout=0.25, force_custom_text=True,
            output_dict=True,
        )  # fmt: skip
        if checkpointing:
            model.set_grad_checkpointing()
        freeze(model, config.freeze)
        mixup = (
            CoinFlipMixup(seed=1) if config.coin_flip_mixup else None
        )  # both coins in three steps
        if mixup is not None:
            mixup.attach(model)
        if precision == "pure_bf16":
            model.to(torch.bfloat16)
        padding = text_padding(model) if config.sort_text else None
        monkeypatch.setattr(step_module, "text_padding", lambda model: padding)
        # A count that is read of fake losses is not zero, and would end the run.
        stock_log = train_module.StepLog
        monkeypatch.setattr(
            train_module,
            "StepLog",
            lambda *given, **more: stock_log(*given, **{**more, "recovers": True}),
        )
        size, length = model.visual.image_size, model.context_length or 12
        side = size[0] if isinstance(size, tuple) else size
        steps: list[int] = []
        images_module._scale_and_shift.cache_clear()
        with fake_ranks(W), fake_cuda():
            to_fake_cuda(model)
            optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3))
            data = TrainData(
                Loader(side, length), partial(normalize, mean=(0.5,) * 3, std=(0.5,) * 3)
            )
            trainer = Trainer(
                config,
                SimpleNamespace(agreed=lambda distributed: 0),
                RunLog(args, config),
                mixup=mixup,
            )
            scaler = torch.amp.GradScaler("cuda") if precision == "amp" else None
            loss = create_loss(config, args)
            plant(loss)
            with Waits(read=K * B) as waits:
                trainer(
                    FakeDDP(model), {"train": data}, loss, 0, optimizer, scaler, steps.append, args
                )
            lacking = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        images_module._scale_and_shift.cache_clear()
        assert steps == list(range(STEPS))
        assert not lacking or config.dga_retain == "auto"  # whose decision at the end drops them
        return waits.by_line, waits.bytes_to_device // (B * 3 * side**2)

    return train


def unexpected(waits: dict[str, int]) -> dict[str, int]:
    """Lines that wait more often than ALLOWED permits."""
    return {
        line: count
        for line, count in waits.items()
        if count > max((most for part, (most, _) in ALLOWED.items() if part in line), default=0)
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_epoch_over_eight_ranks_waits_only_where_it_must(recipe, epoch):
    waits, copied = epoch(recipe)
    assert unexpected(waits) == {}
    assert (
        copied == STEPS * K + 1
    )  # each once for both passes, and the first to settle DDP's buckets
    assert any("gathered_sizes" in line for line in waits) and any(
        "training/log" in line for line in waits
    )


def reads(loss):
    loss.register_forward_hook(lambda *given: print(given[-1]["contrastive_loss"].item()))


def takes_a_cpu_tensor(loss):
    def planted(_, args, given):
        return args, {**given, "logit_scale": given["logit_scale"] * torch.ones(1)}

    loss.register_forward_pre_hook(planted, with_kwargs=True)


def test_a_planted_read_and_a_planted_cpu_tensor_are_found(epoch):
    (line,) = unexpected(epoch("frozen image, all replayed", reads)[0])
    assert "<lambda>: " in line and "contrastive_loss" in line
    # torch 2.11: "found two different devices cuda:0, cpu"
    with pytest.raises(RuntimeError, match="found .*two .*devices,? cuda:0"):
        epoch("frozen image, all replayed", takes_a_cpu_tensor)
