"""The model, transform and tokenizer of a planned run, built as in training but with random weights.

Time, memory and FLOPs do not depend on the weights, so a plan fetches nothing.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import timm
import torch
from huggingface_hub import try_to_load_from_cache
from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME
from open_clip.factory import parse_model_name
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.images import normalize, split_normalize
from open_clip_zerovl.data.words import WordAugment
from open_clip_zerovl.models.build import (
    check_model,
    registered_config,
    registered_name,
    with_text_model,
)
from open_clip_zerovl.models.configs import ClipModel
from open_clip_zerovl.plan.batching import PlanSettings
from open_clip_zerovl.recipe.apply import build_model
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.optimizer import parameter_groups
from open_clip_zerovl.recipe.step import autocast_of, prepare

_WEIGHTS = (".pt", ".pth", ".bin", ".safetensors")


@dataclass
class PlannedModel:
    """A model in training mode, with its transform, tokenizer and mixup.

    Attributes:
        transform: PIL image -> (C, H, W), uint8 if normalisation is done on the device.
        normalize: the normalisation on the device, or None.
        tokenizer: captions -> (B, L).
    """

    model: ClipModel
    transform: Callable[..., Tensor]
    normalize: Callable[[Tensor], Tensor] | None
    tokenizer: Callable[[list[str]], Tensor]
    augment_caption: Callable[[str, int], str] | None
    mixup: CoinFlipMixup | None
    device: torch.device
    precision: str

    @property
    def parameters(self) -> tuple[int, int]:
        """Number of parameters, and of those that are trained."""
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)

    @property
    def state_bytes(self) -> int:
        """Weights and AdamW's two moments: memory that stays on the device, and the size of a checkpoint."""
        return sum(p.nbytes * (3 if p.requires_grad else 1) for p in self.model.parameters())

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass, as in training."""
        return autocast_of(self.precision, self.device)()

    def prepare(self, images: Tensor, texts: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Normalise and cast a micro-batch on the device, as a training step without mixup does."""
        return prepare(images, texts, precision=self.precision, normalize=self.normalize)

    def micro_batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Random images (B, C, H, W) and texts (B, L) in the loader's form."""
        side = self.model.visual.image_size
        height, width = (side, side) if isinstance(side, int) else side
        generator = torch.Generator().manual_seed(0)
        if self.normalize is not None:
            images = torch.randint(
                0, 256, (size, 3, height, width), dtype=torch.uint8, generator=generator
            )
            images = images.contiguous(memory_format=torch.channels_last)
        else:
            images = torch.randn(size, 3, height, width, generator=generator)
        return images, self.tokenizer(["a photo of a cat beside two dogs on the road"] * size)

    def optimizer(self, settings: PlanSettings) -> torch.optim.Optimizer:
        """Training's AdamW with a learning rate of zero, which takes the same time and does not change the weights."""
        groups = parameter_groups(
            self.model, settings.wd, exempt_embeddings=settings.no_embedding_decay
        )
        return torch.optim.AdamW(groups, lr=0.0)


def build(settings: PlanSettings, device: torch.device, precision: str) -> PlannedModel:
    """Build the model that a run with these settings trains.

    Raises:
        UserError: an unknown model, a text tower that is not here, flags that the towers cannot follow.
    """
    with quiet():
        name = _model_name(settings)
        size = settings.force_image_size
        model, transform, _, mixup = build_model(
            name,
            None,
            settings,
            seed=settings.seed,
            precision=precision,
            device=device,
            force_patch_dropout=settings.token_drop,
            force_image_size=list(size) if isinstance(size, tuple) else size,
            force_context_length=settings.force_context_length,
            image_mean=settings.image_mean,
            image_std=settings.image_std,
            image_interpolation=settings.image_interpolation,
            aug_cfg=settings.aug_cfg,
            pretrained_image=False,
            pretrained_text=False,
            output_dict=True,
        )
        length = settings.force_context_length
        options = {} if length is None else {"context_length": length}
        tokenizer = open_clip.get_tokenizer(name, **options)
    if settings.lock_image:
        model.lock_image_tower()
    if settings.lock_text:
        model.lock_text_tower()
    if settings.grad_checkpointing:
        model.set_grad_checkpointing()
    normalizer = None
    try:
        transform, mean, std = split_normalize(transform)
        normalizer = partial(normalize, mean=mean, std=std)
    except UserError:  # timm's transforms normalise themselves: images are floats, as in training
        pass
    augment = (
        WordAugment(tokenizer, settings.text_augment) if settings.text_augment is not None else None
    )
    return PlannedModel(
        model.train(),
        transform,
        normalizer,
        tokenizer,
        augment,
        mixup,
        device,
        precision,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, such as that of random weights, which a plan uses on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _model_name(settings: PlanSettings) -> str:
    """The name under which open_clip builds the model without a hub."""
    if settings.text_model is not None:
        return with_text_model(settings.model, settings.text_model)
    check_model(settings.model)
    tower = registered_config(settings.model).get("text_cfg", {}).get("hf_model_name")
    if tower and not Path(tower).is_dir() and not _is_cached(tower, "config.json"):
        raise UserError(
            f"the text tower {tower} of {settings.model} is not in the Hugging Face cache and nothing is fetched for a plan; "
            f"fetch its config and tokenizer (hf download {tower}), or give its folder with --text-model"
        )
    return settings.model


def weights_to_fetch(settings: PlanSettings) -> dict[str, str]:
    """Pretrained weights that training would fetch from the hub -> how to do without the hub.

    Raises:
        UserError: `--pretrained` is neither a file's name nor a tag of the model, or a tag beside `--text-model`.
    """
    # such a model's weights come with its config
    if parse_model_name(settings.model)[0] is not None:
        return {}
    if settings.pretrained:  # of all towers; open_clip then leaves --pretrained-image out
        if is_file_name(settings.pretrained) or _has_weights(settings):
            return {}
        return {f"the weights {settings.pretrained} of {settings.model}": "--pretrained FILE"}
    name = registered_config(settings.model).get("vision_cfg", {}).get("timm_model_name")
    if settings.pretrained_image and name:
        hub = getattr(timm.get_pretrained_cfg(name, allow_unregistered=True), "hf_hub_id", None)
        if hub and not _is_cached(hub, "model.safetensors", "pytorch_model.bin"):
            return {
                f"the image tower's weights {hub}": "--init-image FILE in place of --pretrained-image"
            }
    return {}


def is_file_name(pretrained: str) -> bool:
    """True if `--pretrained` names a file, which need not exist, rather than a tag."""
    return os.sep in pretrained or Path(pretrained).suffix in _WEIGHTS or Path(pretrained).is_file()


def _has_weights(settings: PlanSettings) -> bool:
    """True if the weights of `--pretrained TAG` are in the cache, under any name that open_clip looks for."""
    model, tag = registered_name(settings.model), settings.pretrained
    if settings.text_model is not None:
        raise UserError(
            f"--pretrained {tag} does not work with --text-model: open_clip's weights have their own text tower; give a file"
        )
    config = open_clip.get_pretrained_cfg(model, tag)
    if not config:
        tags = open_clip.list_pretrained_tags_by_model(model)
        raise UserError(
            f"--pretrained {tag} is neither a file nor a tag of {model}; "
            f"{'its tags are ' + ', '.join(tags) if tags else 'it has none'}"
        )
    repository, _, name = config.get("hf_hub", "").rpartition("/")
    names = (
        (name, Path(name).with_suffix(".safetensors").name)
        if name
        else (HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME)
    )
    return _is_cached(repository, *names, cache_dir=settings.cache_dir)


def _is_cached(repository: str, *files: str, cache_dir: str | None = None) -> bool:
    """True if one of these files of a repository is in the Hugging Face cache."""
    try:
        return any(
            isinstance(try_to_load_from_cache(repository, file, cache_dir=cache_dir), str)
            for file in files
        )
    except ValueError:  # a path instead of a repository's name
        return False
