"""The reference for decoupled gradient accumulation: tiny real towers, and the same gradient from one graph.

Shapes: `B` micro-batch, `K` micro-batches, `D` embedding width 16. Error of a parameter's gradient g against g_ref:
|g - g_ref| / max(|g_ref|, 1e-6 * norm of all gradients), the largest over parameters (BERT's key biases have a true
gradient of zero, hence the floor).
"""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch import Tensor, nn
from transformers import BertConfig

from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from support.tiny_clip import bert_text

# From ARCHITECTURE, invariant 1.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5}
FEATURES = ("image_features", "text_features")
CONTEXT = 12
VOCABULARY = 64


@cache
def bert_folder() -> str:
    folder = Path(tempfile.mkdtemp(prefix="tiny-bert-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    BertConfig(**sizes, intermediate_size=64, max_position_embeddings=CONTEXT).save_pretrained(
        folder
    )  # dropout 0.1
    return str(folder)


def vit(patch_dropout: float = 0.25) -> dict[str, Any]:
    sizes = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32}
    return {**sizes, "patch_dropout": patch_dropout}


def bert_clip(
    dtype: torch.dtype = torch.float64, *, bias: bool = False, seed: int = 0, **vision: Any
) -> nn.Module:
    """Build open_clip's ViT with token drop 0.25 and a Hugging Face BERT with dropout 0.1, in training mode."""
    torch.manual_seed(seed)
    model = open_clip.CustomTextCLIP(
        embed_dim=16,
        vision_cfg=vit() | vision,
        text_cfg=bert_text(bert_folder()),
        init_logit_scale=math.log(20.0),
        init_logit_bias=-10.0 if bias else None,
        output_dict=True,
    )
    return model.to(dtype).train()


def batches(
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float64,
    seed: int = 1,
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 3, 32, 32, generator=generator, dtype=dtype),
            torch.randint(1, VOCABULARY, (size, CONTEXT), generator=generator),
        )
        for size in sizes
    ]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Take every trainable parameter's gradient from the model, by the name it has inside of wrappers."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} got no gradient"
            found[name.replace("module.", "").replace("_orig_mod.", "")] = (
                parameter.grad.detach().clone()
            )
            parameter.grad = None
        else:
            assert parameter.grad is None, f"{name} is frozen and got a gradient"
    return found


def one_graph(
    model: nn.Module,
    loss: Callable[..., Any],
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    *,
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    autocast: Callable[[], Any] = nullcontext,
    rng_states: Sequence[Tensor | None] | None = None,
    terms: Callable[..., Any] | None = None,
    teacher: Callable[..., Any] | None = None,
    more: Sequence[str] = (),
    **loss_inputs: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole batch in one graph: all forwards, one loss, one backward.

    `terms`, `teacher` and `more` (further features): as `DecoupledGradientAccumulation` takes them.

    The forwards draw their masks one after the other, as decoupled accumulation's first pass does; `rng_states[k]` sets
    the generator before micro-batch k (to play the ranks of a distributed run one after another).
    """
    outputs, of_terms, taught = [], [], []
    for k, (images, texts, *further) in enumerate(micro_batches):
        if rng_states is not None and rng_states[k] is not None:
            torch.set_rng_state(rng_states[k])
        if prepare is not None:
            images, texts = prepare(images, texts, *further)
        with autocast():
            found = model(images, texts)
            found = found if isinstance(found, dict) else dict(zip(FEATURES, found, strict=True))
            outputs.append(found)
            if terms is not None:
                of_terms.append(terms(found, images, texts, *further))
            if teacher is not None:
                taught.append(teacher(images, texts))
    sides = [[output[name] for output in outputs] for name in FEATURES]
    features = dict(zip(FEATURES, map(torch.cat, sides), strict=True))
    features = {
        name: value.to(torch.promote_types(value.dtype, torch.float32))
        for name, value in features.items()
    }
    scalars = {
        name: outputs[-1][name] for name in ("logit_scale", "logit_bias") if name in outputs[-1]
    }
    features |= {name: torch.cat([output[name] for output in outputs]) for name in more}
    if teacher is not None:
        for name in FEATURES:
            loss_inputs[f"dist_{name}"] = torch.cat([output[name] for output in taught]).detach()
        loss_inputs["dist_logit_scale"] = taught[-1]["logit_scale"].detach()
    value = sum(loss(**features, **scalars, **loss_inputs, output_dict=True).values())
    for name in of_terms[0] if of_terms else ():
        pairs = [each[name] for each in of_terms]
        if isinstance(pairs[0], tuple):
            count = sum(count for _, count in pairs)
            value = value + sum(total for total, _ in pairs) / (count or 1)  # nothing: no loss
        else:
            value = value + sum(pairs)
    value.backward()
    return value.detach(), gradients(model)


def error(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Compute the largest parameter error, as the module's head defines it, NaN if one is NaN."""
    return torch.tensor(list(errors(found, reference).values())).max().item()


def errors(found: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    return _relative(found, reference, lambda own, total: max(own, 1e-6 * total))


def sharp_error(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Compute the largest error against the parameter's own gradient, or against all where its own is below 1e-6 of them.

    There the error is that of rounding in a sum whose true value is zero, which `error` divides by as little as 1e-6.
    """
    relative = _relative(found, reference, lambda own, total: own if own >= 1e-6 * total else total)
    return torch.tensor(list(relative.values())).max().item()


def error_of_all(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Compute the error of all gradients as one vector."""
    return math.hypot(*_relative(found, reference, lambda own, total: total).values())


def _relative(
    found: dict[str, Tensor],
    reference: dict[str, Tensor],
    measure: Callable[[float, float], float],
) -> dict[str, float]:
    """Compute each gradient's error by a measure of (its norm, the norm of all), itself where all are zero."""
    assert found.keys() == reference.keys()
    norms = {name: g.double().norm().item() for name, g in reference.items()}
    total = math.hypot(*norms.values())
    return {
        name: (found[name].double() - g.double()).norm().item() / (measure(norms[name], total) or 1)
        for name, g in reference.items()
    }


SEED = 5


def reference(
    model: nn.Module, loss: Callable[..., Any], micro_batches: Sequence[Any], **options: Any
) -> Any:
    """Run `one_graph` from the seed."""
    torch.manual_seed(SEED)
    return one_graph(model, loss, micro_batches, **options)


def accumulated(
    model: nn.Module,
    loss: Callable[..., Any],
    micro_batches: Sequence[Any],
    *,
    prepare: Callable[..., Any] | None = None,
    loss_inputs: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Losses and gradients of one decoupled step from the seed."""
    torch.manual_seed(SEED)
    step = DecoupledGradientAccumulation(model, loss, **options)
    losses = step.backward(micro_batches, prepare=prepare, **(loss_inputs or {}))
    return losses, gradients(model)
