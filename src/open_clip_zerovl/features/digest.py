"""Digests of a tower with the preprocessing of its inputs: features with the same digest are the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from open_clip_zerovl.core.files import digest_of, digest_of_all

_SCALES = ("logit_scale", "logit_bias")
# Settings of layers on which features do not depend, besides those of random layers, which evaluation turns off.
_NOT_OF_OUTPUTS = {
    "training",
    "grad_checkpointing",
    "gradient_checkpointing",
    "output_dict",
    "name_or_path",
}


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


def plain_repr(thing: Any) -> str:
    """Write a transform or module without the memory addresses of objects, which differ in each process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))


def _described(inputs: Any) -> list[Any]:
    """Describe a tokenizer or transform as JSON."""
    inner = getattr(inputs, "tokenizer", None)
    if inner is None:
        return [type(inputs).__name__, getattr(inputs, "context_length", None), plain_repr(inputs)]
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
