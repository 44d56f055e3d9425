"""A frozen model on its device: pictures and captions to embeddings, or to features before the projection, with their digest.

`b` pictures or captions at once, `S` side of the model's pictures, `D` width of its embeddings, `F` of its features.
Features of the same input with the same digest of tower, preprocessing and precision are the same.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from open_clip.hf_model import HFTextEncoder
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import digest_of, digest_of_all
from open_clip_zerovl.core.memory import keep_freed_memory
from open_clip_zerovl.data.images import normalize, split_normalize

CPU_PICTURES = 16  # in a forward pass on a CPU: more leave its caches, and take 1.2 times the time of a picture

_SCALES = ("logit_scale", "logit_bias")
# Settings of layers on which features do not depend, besides those of random layers, which evaluation turns off.
_NOT_OF_OUTPUTS = {
    "training",
    "grad_checkpointing",
    "gradient_checkpointing",
    "output_dict",
    "name_or_path",
}


@dataclass
class FrozenModel:
    """A frozen model on its device.

    Attributes:
        name: for messages.
        image_tower: normalised pictures (b, 3, S, S) -> (b, D); None of a model of texts alone.
        text_tower: tokens (b, L) -> (b, D); None of a model of pictures alone.
        tokenizer: captions -> tokens.
        text_padding: `padding_of` the text tower; tokens are cut to the longest of the captions.
        picture_transform: PIL image -> picture (3, S, S) as `images` takes it: uint8, or normalised.
        mean, std: of uint8 pictures, for pixels in 0..1.
        context: makes the context of a forward pass, such as one of mixed precision.
        input_dtype: normalised pictures are cast to it.
        unit_length: divide each row by its L2 norm.
        fingerprints: digest of weights, preprocessing and precision of each tower, "image" and "text".
        logit_scale: the factor of its logits, `exp` of the parameter.
    """

    name: str
    image_tower: Callable[[Tensor], Tensor] | None = None
    text_tower: Callable[[Tensor], Tensor] | None = None
    tokenizer: Callable[[list[str]], Tensor] | None = None
    text_padding: int | None = None
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    picture_transform: Callable[[Any], Tensor] | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    input_dtype: torch.dtype | None = None
    unit_length: bool = True
    fingerprints: dict[str, str] = field(default_factory=dict)
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.device.type == "cpu":
            keep_freed_memory()

    @classmethod
    def load(cls, encoder: Encoder, *, amp: bool = False) -> FrozenModel:
        """Load the model of an encoder, with or without bf16.

        Raises:
            UserError: it cannot be loaded.
        """
        network, preprocess, tokenizer, device = encoder.load()
        precision = "amp_bf16" if amp else "fp32"
        inputs = {"image": preprocess, "text": tokenizer}
        digests = {
            tower: tower_digest(network, tower, inputs=inputs[tower], precision=precision)
            for tower in inputs
        }
        return cls.of(
            str(encoder.model),
            (network, preprocess, tokenizer, device),
            context=autocast(device, amp),
            fingerprints=digests,
            logit_scale=network.logit_scale.exp().item(),
        )

    @classmethod
    def of(
        cls, name: str, loaded: tuple[Any, Callable[..., Tensor], Any, torch.device], **more: Any
    ) -> FrozenModel:
        """Wrap a loaded model, as `Encoder.load` gives it (network, evaluation transform, tokenizer, device)."""
        network, preprocess, tokenizer, device = loaded
        return cls(
            name,
            network.encode_image,
            network.encode_text,
            tokenizer,
            padding_of(network),
            device,
            *split_transform(preprocess),
            **more,
        )

    def features(self, inputs: Tensor | list[str]) -> Tensor:
        """Return the features of pictures, as `images`, or of captions, as `texts`."""
        return self.texts(inputs) if isinstance(inputs, list) else self.images(inputs)

    @torch.no_grad()
    def images(self, pixels: Tensor) -> Tensor:
        """Encode pictures of `picture_transform` (b, 3, S, S) -> (b, D), fp32 on the device."""
        at_once = CPU_PICTURES if self.device.type == "cpu" else len(pixels)
        return torch.cat([self._images(part) for part in pixels.split(max(1, at_once))])

    def _images(self, pixels: Tensor) -> Tensor:
        assert self.image_tower is not None
        pixels = pixels.to(self.device)
        if pixels.dtype == torch.uint8:
            pixels = normalize(pixels, self.mean, self.std)
        return self._encoded(self.image_tower, pixels.to(dtype=self.input_dtype))

    @torch.no_grad()
    def texts(self, captions: list[str]) -> Tensor:
        """Encode captions -> (b, D), fp32 on the device."""
        assert self.tokenizer is not None and self.text_tower is not None
        tokens = self.tokenizer(captions)
        if self.text_padding is not None:
            places = (tokens != self.text_padding).any(dim=0).nonzero()
            tokens = tokens[:, : int(places[-1]) + 1] if len(places) else tokens
        return self._encoded(self.text_tower, tokens.to(self.device))

    def _encoded(self, tower: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        with self.context():
            features = tower(inputs)
        return F.normalize(features.float(), dim=-1) if self.unit_length else features.float()

    def image_width(self) -> int:
        """Return the width of `images`, from one made-up picture."""
        assert self.picture_transform is not None
        return self.images(self.picture_transform(Image.new("RGB", (32, 32)))[None]).shape[1]


def padding_of(network: Any) -> int | None:
    """Return the padding token after the texts of an open_clip model, which may be cut off without changing a feature.

    Returns:
        The number of Hugging Face's towers, which mask padding; None for open_clip's own, which take their whole context.
    """
    text = getattr(network, "text", None)
    return text.config.pad_token_id if isinstance(text, HFTextEncoder) else None


def autocast(device: torch.device, amp: bool) -> Callable[[], AbstractContextManager[Any]]:
    """Make the context of a forward pass in bf16, or of one as it is."""
    return partial(torch.autocast, device.type, torch.bfloat16) if amp else nullcontext


def split_transform(
    preprocess: Callable[[Any], Tensor],
) -> tuple[Callable[[Any], Tensor], tuple[float, ...], tuple[float, ...]]:
    """Split a transform by `split_normalize`, where it can be split (pictures of another travel as floats)."""
    try:
        return split_normalize(preprocess)
    except UserError:
        return preprocess, (), ()


# ---------------------------------------------------------------------------------------------------------------------
# Before the projection
# ---------------------------------------------------------------------------------------------------------------------


class _TimmFeatures(nn.Module):
    """A timm trunk up to its pooled, normalised features, without its classifier (which some towers use as projection)."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        self.trunk = trunk  # timm's

    def forward(self, images: Tensor) -> Tensor:
        trunk: Any = self.trunk
        return trunk.forward_head(trunk.forward_features(images), pre_logits=True)


class _FirstOutput(nn.Module):
    """The pooled output of a tower that also returns its tokens (CoCa)."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, images: Tensor) -> Tensor:
        output = self.tower(images)
        return output[0] if isinstance(output, tuple) else output


def tower_before_projection(visual: Any) -> nn.Module:
    """Take an image tower without its projection: images (b, 3, H, W) -> features (b, F), with the weights of `visual`.

    Args:
        visual: `model.visual` of an open_clip model: a timm tower, open_clip's own ViT (CoCa's too), or CLIP's ResNet. Only
            the output projection of a ResNet's attention pool is left out.

    Raises:
        UserError: another kind of tower; a timm tower whose attention pool ends in a projection of its own.
    """
    kind = type(visual).__name__
    if kind == "TimmModel":
        if hasattr(visual.head, "pool"):
            raise UserError(
                "this timm tower pools by attention into the shared space, so that it has no features before the "
                "projection; take a tower with timm_pool token, avg or map"
            )
        return _TimmFeatures(visual.trunk)
    if kind == "VisionTransformer":
        # A shallow copy: the given model keeps its projection.
        tower = copy.copy(visual)
        tower._parameters = {**visual._parameters, "proj": None}
        return _FirstOutput(tower)
    if kind == "ModifiedResNet":
        tower = copy.copy(visual)
        pool = copy.copy(visual.attnpool)
        width = pool.c_proj.in_features
        identity = nn.Linear(width, width).to(pool.c_proj.weight)
        with torch.no_grad():
            identity.weight.copy_(torch.eye(width))
            identity.bias.zero_()
        pool._modules = {**pool._modules, "c_proj": identity}
        tower._modules = {**visual._modules, "attnpool": pool}
        return tower
    raise UserError(
        f"features before the projection are known of timm towers, open_clip's ViT and CLIP's ResNets; this tower is a {kind}"
    )


def text_tower_before_projection(text: Any) -> nn.Module:
    """Remove the projection of a text tower in place: tokens (b, L) -> features (b, F).

    Args:
        text: `model.text` of an open_clip model: open_clip's own transformer, or one of Hugging Face with its pooling.

    Raises:
        UserError: another kind of tower.
    """
    kind = type(text).__name__
    if kind == "HFTextEncoder":
        text.proj = nn.Identity()
    elif kind in ("TextTransformer", "CutTextTransformer"):
        text.text_projection = None
    else:
        raise UserError(
            f"features before the projection are known of open_clip's own and Hugging Face's text towers; this one is a {kind}"
        )
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Digests
# ---------------------------------------------------------------------------------------------------------------------


def tower_digest(model: nn.Module, tower: str, *, inputs: Any, precision: str = "fp32") -> str:
    """Digest everything on which a tower's features of an input depend.

    Args:
        model: with its weights loaded. Its image tower is `visual` with all below it; everything else is the text tower.
        tower: "image" or "text".
        inputs: the tokenizer of a text tower, the transform of an image tower.
        precision: the precision of the forward passes (open_clip's `--precision`).
    """
    tensors = {
        name: tensor
        for name, tensor in _tensors(model).items()
        if name not in _SCALES and name.startswith("visual.") == (tower == "image")
    }
    layers = [
        [name, *_settings(module)]
        for name, module in model.named_modules()
        if (name.split(".")[0] == "visual") == (tower == "image")
    ]
    return _digest(tensors, [tower, precision, layers, _described(inputs)])


def module_digest(module: nn.Module, *, inputs: Any, precision: str = "fp32") -> str:
    """Digest a module that is a whole tower, as `tower_digest`."""
    return _digest(
        _tensors(module),
        [
            precision,
            [[name, *_settings(part)] for name, part in module.named_modules()],
            _described(inputs),
        ],
    )


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Collect weights and buffers, also those that no checkpoint holds (the frequencies of rotary positions)."""
    return {**dict(module.named_buffers()), **module.state_dict()}


def _settings(module: nn.Module) -> list[Any]:
    """Describe a layer without its children: class, and settings that tensors do not show (activation, number of heads)."""
    plain = bool | int | float | str
    settings = {
        name: value
        for name, value in vars(module).items()
        if name[0] != "_"
        and name not in _NOT_OF_OUTPUTS
        and (
            isinstance(value, plain)
            or (isinstance(value, tuple | list) and all(isinstance(item, plain) for item in value))
        )
    }
    return [type(module).__name__, sorted(settings.items())]


def _digest(tensors: dict[str, torch.Tensor], facts: Any) -> str:
    def parts() -> Iterator[Any]:
        yield facts
        for name, tensor in sorted(tensors.items()):
            yield [name, str(tensor.dtype), list(tensor.shape)]
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    return digest_of_all(parts())


def _described(inputs: Any) -> list[Any]:
    """Describe a tokenizer or transform as JSON."""
    inner = getattr(inputs, "tokenizer", None)
    if inner is None:
        # without the addresses of objects, which differ in each process
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(inputs))
        return [type(inputs).__name__, getattr(inputs, "context_length", None), text]
    backend = getattr(inner, "backend_tokenizer", None)
    content = (
        _without_lengths(backend)
        if backend is not None
        else json.dumps(sorted(inner.get_vocab().items()))
    )
    return [
        type(inner).__name__,
        inputs.context_length,
        getattr(getattr(inputs, "clean_fn", None), "__name__", None),
        getattr(inputs, "strip_sep_token", None),
        getattr(inputs, "tokenizer_mode", None),
        digest_of(content),
    ]


def _without_lengths(backend: Any) -> str:
    """Write a tokenizer's content as JSON, without the truncation and padding that its last call has left in it."""
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy.to_str()
