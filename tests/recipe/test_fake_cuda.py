"""Every recipe's step on fake CUDA tensors: nothing on the wrong device, and no wait that is not listed with its reason."""

from functools import partial
from unittest import mock

import open_clip
import pytest
import torch
from open_clip.loss import SigLipLoss

from open_clip_zerovl.data import images as images_module
from open_clip_zerovl.data.images import normalize
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe import step as step_module
from open_clip_zerovl.recipe.mixup import CoinFlipMixup, Mix
from open_clip_zerovl.recipe.optimizer import parameter_groups
from open_clip_zerovl.recipe.step import RecipeStep, text_padding
from open_clip_zerovl.recipe.towers import freeze
from support.fake_cuda import GIB, Waits, fake_cuda, to_fake_cuda
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    TIMM_VISION,
    bert_text,
    register,
    write_bert,
    write_modernbert,
)

K, B = 3, 4
# Waits allowed, by a part of their line: (the most times per step, why).
ALLOWED = {
    "torch/amp/grad_scaler.py": (1, "GradScaler reads once a step whether gradients overflowed")
}
FIRST_STEP = {
    # One read; a fake tensor gives its list number by number, two for each of two features of each micro-batch, and for each
    # micro-batch's logit_scale beside the last one's.
    "dga/replay.py _numbers": (
        4 * K + 2 * (K - 1),
        "check=first reads the largest difference in the first step that replays",
    ),
    "data/images.py _scale_and_shift": (2, "mean and std are brought to the device once"),
    "torch/amp/grad_scaler.py": (3, "GradScaler makes its scale"),
}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake")
    text = bert_text(write_bert(folder / "bert"))
    clip = {**CLIP_TEXT, "vocab_size": 64, "layers": 1}
    vision = {**NATIVE_VISION, "layers": 1}
    return {
        "timm and BERT": register(folder, "fake-timm-bert", TIMM_VISION, text),
        "native and BERT": register(folder, "fake-native-bert", vision, text),
        "native and CLIP": register(folder, "fake-native-clip", vision, clip),
        "native and ModernBERT": register(
            folder, "fake-modernbert", vision, bert_text(write_modernbert(folder / "modern"))
        ),
        "with a bias": register(folder, "fake-bias", vision, text, init_logit_bias=-10.0),
    }


RECIPES = {
    "DGA": {},
    "timm": {"model": "timm and BERT", "retain": "auto", "steps": 3},
    "CLIP's text tower": {"model": "native and CLIP", "checkpointing": True},
    "ModernBERT": {"model": "native and ModernBERT"},
    "ModernBERT, texts sorted, pure bf16": {
        "model": "native and ModernBERT",
        "sort_text": True,
        "precision": "pure_bf16",
    },
    "all replayed": {"retain": 0},
    "GradScaler": {"precision": "amp"},
    "pure bf16": {"precision": "pure_bf16"},
    "mixup of images": {"mix": Mix(True, 0.3)},
    "mixup of texts, GradScaler": {"mix": Mix(False, 0.3), "precision": "amp"},
    "frozen text": {"frozen": "text"},
    "frozen image, all replayed": {"frozen": "image", "retain": 0},
    "SigLIP in fp32": {"model": "with a bias", "siglip": True, "precision": "fp32"},
    "shared captions in chunks, all kept": {
        "chunk": 3,
        "retain": K,
        "loss": {"positives": "both"},
    },
    "gradient checkpointing": {"checkpointing": True},
    "texts sorted": {"sort_text": True},
    "texts sorted and mixed": {"sort_text": True, "mix": Mix(False, 0.3)},
}


class Fixed(CoinFlipMixup):
    """Draws the mix it is given."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def draw(self):
        return self.mix


def watched_steps(
    name, *, precision="amp_bf16", retain=1, mix=None, frozen=None, siglip=False, chunk=None,
    checkpointing=False, steps=2, plant=None, total_bytes=141 * GIB, sort_text=False,
    last=B - 1, loss=None,
):  # fmt: skip
    """The waits of each of some optimizer steps, with micro-batches of uint8 images, the last one smaller."""
    images_module._scale_and_shift.cache_clear()
    model = open_clip.create_model(
        name,
        pretrained_text=False,
        pretrained_image=False,
        force_patch_dropout=0.25,
        force_custom_text=True,
        output_dict=True,
    ).train()
    size, length = model.visual.image_size, model.context_length or 12
    side = size[0] if isinstance(size, tuple) else size
    if frozen:
        freeze(model, [frozen])
    if checkpointing:
        model.set_grad_checkpointing()
    sizes = [B] * (K - 1) + [last]
    mixup = Fixed(mix) if mix else None
    if mixup:
        mixup.attach(model)
    if precision == "pure_bf16":
        model.to(torch.bfloat16)
    padding = text_padding(model) if sort_text else None
    with (
        fake_cuda(total_bytes=total_bytes),
        mock.patch.object(step_module, "text_padding", lambda model: padding),
    ):
        to_fake_cuda(model)
        optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3))
        step = RecipeStep(
            model,
            (plant or (lambda made: made))(
                SigLipLoss() if siglip else ContrastiveLoss(chunk_size=chunk, **(loss or {}))
            ),
            optimizer,
            precision=precision,
            scaler=torch.amp.GradScaler("cuda") if precision == "amp" else None,
            normalize=partial(normalize, mean=(0.5,) * 3, std=(0.5,) * 3),
            mixup=mixup,
            grad_clip_norm=1.0,
            sort_text=sort_text,
            retain=retain,
        )
        micro_batches = [
            (
                torch.empty(n, 3, side, side, dtype=torch.uint8),
                torch.ones(n, length, dtype=torch.long),
            )
            for n in sizes
        ]
        if loss:  # origins with a caption and a picture
            micro_batches = [
                (*pair, torch.zeros(len(pair[0]), 4, dtype=torch.long)) for pair in micro_batches
            ]
        waits = []
        for number in range(steps):
            waits.append(Waits())
            with waits[-1]:
                losses = step.take(micro_batches, number)
        for key, parameter in model.named_parameters():
            assert not parameter.requires_grad or parameter.grad is not None, (
                f"{key} has no gradient"
            )
        assert losses["loss"].dtype == torch.float32 and losses["loss"].device.type == "cuda"
    images_module._scale_and_shift.cache_clear()
    return waits


def unexpected(waits, allowed):
    """Lines that wait more often than `allowed` permits."""
    found = {}
    for line, count in waits.by_line().items():
        most = max((times for part, (times, _) in allowed.items() if part in line), default=0)
        if count > most:
            found[line] = count
    return found


# In the fast tests each setting comes once; slow: those that come together with another one.
TOGETHER = (
    "DGA",
    "all replayed",
    "mixup of images",
    "ModernBERT",
    "GradScaler",
    "pure bf16",
    "texts sorted",
    "frozen text",
    "gradient checkpointing",
)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in TOGETHER)) for name in RECIPES],
)
def test_a_step_waits_nowhere(recipe, names):
    options = dict(RECIPES[recipe])
    first, *later = watched_steps(names[options.pop("model", "native and BERT")], **options)
    assert unexpected(first, ALLOWED | FIRST_STEP) == {}
    for waits in later:
        assert unexpected(waits, ALLOWED) == {}


@pytest.mark.parametrize(("memory", "copies"), [(141 * GIB, 3), (2**18, 3 + 2)])
def test_inputs_cross_to_the_gpu_once_where_they_may_stay(memory, copies, names):
    """Each of three micro-batches once; without room the two that are forwarded twice cross twice."""
    side, length = 32, 32
    waits = watched_steps(names["native and BERT"], total_bytes=memory, last=B)[-1]
    assert waits.bytes_to_device == copies * B * (3 * side * side + 8 * length)


def reading(loss):
    def planted(**values):
        result = loss(**values)
        print(result["contrastive_loss"].item())
        return result

    return planted


def with_a_cpu_tensor(loss):
    return lambda logit_scale, **values: loss(logit_scale=logit_scale * torch.ones(1), **values)


def test_a_planted_read_and_a_planted_cpu_tensor_are_found(names):
    waits = watched_steps(names["native and BERT"], plant=reading)[-1]
    (line,) = unexpected(waits, ALLOWED)
    assert 'planted: print(result["contrastive_loss"].item())' in line
    # torch 2.11: "found two different devices cuda:0, cpu"
    with pytest.raises(RuntimeError, match="found .*two .*devices,? cuda:0"):
        watched_steps(names["native and BERT"], plant=with_a_cpu_tensor)
