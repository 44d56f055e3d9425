"""A step on a GPU: towers for which the host never waits, and torch.compile under which both passes draw the same masks.

Code in other libraries' towers makes the host wait for the GPU in every forward pass. After a wait the GPU has no work until
the host has launched the next kernels: with K micro-batches forwarded twice that is up to 2K times a step. timm's attention
writes the gradient of its queries, keys and values twice. The replacements compute the same as the original code.

torch.compile takes the blocks one by one. dynamo makes a graph of a function for each form in which it is called: with and
without gradients, per width, for one and for any number of tokens. At its limit it runs the function eagerly in a new form and
keeps the graphs that it has. Generated and eager code draw masks in other orders, and code with and without gradients rounds
otherwise, so both passes of a step take the graphs with gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

import open_clip.transformer
import torch
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.model import is_compiled

_TRANSFORMERS_4 = version("transformers").startswith("4.")


def without_gpu_syncs(model: nn.Module) -> None:
    """Replace code of `model` that waits or copies.

    Call it before the first forward pass and before the model is compiled.

    - Hugging Face's BERT, RoBERTa and XLM-RoBERTa read whether a batch has padding, to leave the mask out if there is none.
      They are given the mask in the form that the attention takes, which they do not read. ModernBERT reads it twice, for its
      layers with and without a window, and is given both masks (transformers 5.1; earlier ones do not read it).
    - open_clip's patch dropout draws on the CPU and indexes with CPU tensors. The replacement draws on the images' device: on a
      GPU other masks than open_clip's, on a CPU the same.
    - timm's attention splits the heads first and the queries, keys and values afterwards, whose gradients are then stacked and
      copied into the order of the projection. The replacement splits them in that order.
    """
    for module in model.modules():
        prepare = (
            _prepared_mask
            if _reads_masks(module)
            else _both_masks
            if _reads_both_masks(module)
            else None
        )
        if prepare is not None and prepare not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(prepare, with_kwargs=True)
        elif type(module) is open_clip.transformer.PatchDropout:
            module.__class__ = DevicePatchDropout
        elif type(module) is Attention:
            module.__class__ = SplitAttention


def _reads_masks(module: nn.Module) -> bool:
    """Return whether a module is a bidirectional BERT or RoBERTa with torch's attention, which takes a boolean mask."""
    config = getattr(module, "config", None)
    return (
        type(module).__name__ in ("BertModel", "RobertaModel", "XLMRobertaModel")
        and not getattr(config, "is_decoder", False)
        and getattr(config, "_attn_implementation", None) == "sdpa"
    )


def _reads_both_masks(module: nn.Module) -> bool:
    """Return whether a module is a ModernBERT with torch's attention, which takes one mask per kind of layer."""
    return (
        type(module).__name__ == "ModernBertModel"
        and getattr(module.config, "_attn_implementation", None) == "sdpa"
        and "sliding_window_mask"
        not in inspect.signature(module.forward).parameters  # of transformers before 5.1
    )


def _prepared_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert numbers (B, L), 0 for padding, to booleans (B, 1, L, L): which token attends to which.

    transformers 4 takes (B, L, L), makes numbers of them and adds the dimension of the heads itself. torch.compile of torch
    2.6 breaks its graph at `kwargs | {...}`.
    """
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    seen = mask.bool()[:, None, :].expand(-1, mask.shape[1], -1)
    return args, {**kwargs, "attention_mask": seen if _TRANSFORMERS_4 else seen[:, None]}


def _both_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert numbers (B, L), 0 for padding, to booleans (B, 1, L, L) for layers that see all tokens, and for those with a
    window.
    """
    from transformers.masking_utils import (
        create_bidirectional_mask,
        create_bidirectional_sliding_window_mask,
    )

    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    common = {
        "config": module.config,
        "inputs_embeds": mask.new_empty(
            (*mask.shape, 0), dtype=torch.float32
        ),  # its sizes alone are read
        "attention_mask": mask,
        "allow_is_bidirectional_skip": False,  # else the mask is read
    }
    masks = {
        "full_attention": create_bidirectional_mask(**common),
        "sliding_attention": create_bidirectional_sliding_window_mask(**common),
    }
    return args, {**kwargs, "attention_mask": masks}


class DevicePatchDropout(open_clip.transformer.PatchDropout):
    """open_clip's patch dropout, drawn and applied on the device of the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Keep the class token and a random share of the patch tokens of x (B, T, D)."""
        if not self.training or self.prob == 0.0:
            return x
        first = x[:, :1]
        patches = x[:, 1:] if self.exclude_first_token else x
        count = max(1, int(patches.shape[1] * (1 - self.prob)))
        # (B, count)
        indices = torch.randn(patches.shape[:2], device=x.device).topk(count, dim=-1).indices
        patches = patches.gather(1, indices[..., None].expand(-1, -1, patches.shape[-1]))
        return torch.cat((first, patches), dim=1) if self.exclude_first_token else patches


class SplitAttention(Attention):
    """timm's attention, whose backward pass writes the gradient of queries, keys and values once."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attend among the tokens of x (B, T, D), with a mask or a gate by timm's own code."""
        is_masked = any(
            each is not None and each is not False for each in (*args, *kwargs.values())
        )
        if is_masked or not self.fused_attn or getattr(self, "gate", None) is not None:
            return super().forward(x, *args, **kwargs)
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, T, D / heads)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.attn_drop.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            self.q_norm(query), self.k_norm(key), value, dropout_p=dropout
        )
        return self.proj_drop(self.proj(self.norm(attended.transpose(1, 2).flatten(2))))


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile
# ---------------------------------------------------------------------------------------------------------------------

# Graphs of one function. The blocks of all towers of a kind share theirs.
RECOMPILE_LIMIT = 64
_LISTS = (nn.ModuleList, nn.Sequential)


@contextmanager
def same_masks(model: nn.Module, *, cut_texts: bool) -> Iterator[None]:
    """Set torch within the block such that both passes of a step draw the same masks.

    Args:
        cut_texts: micro-batches have texts of other lengths.

    Raises:
        UserError: a function of a compiled model needs more than RECOMPILE_LIMIT graphs.
    """
    with ExitStack() as settings:
        if cut_texts and torch.backends.cuda.cudnn_sdp_enabled():
            # torch 2.11 and later prefer cuDNN's attention on an H100. It plans each new length anew, and NaN gradients of
            # masked lengths are reported (pytorch#196678).
            torch.backends.cuda.enable_cudnn_sdp(False)
            settings.callback(torch.backends.cuda.enable_cudnn_sdp, True)
        if is_compiled(model):
            settings.enter_context(_settings_of_compiler())
        yield


@contextmanager
def _settings_of_compiler() -> Iterator[None]:
    """Allow enough graphs, all with the masks of the attention that is allowed."""
    import torch._dynamo
    import torch._inductor.config as inductor
    import torch.compiler.config as compiler

    # A graph holds the attention's kernel that was allowed when it was made. torch keeps graphs on disk for later processes
    # and takes them whatever is allowed there: another kernel, which draws other masks, in some micro-batches.
    allowed = [
        name
        for name in ("flash", "mem_efficient", "cudnn", "math")
        if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
    ]
    with (
        _patched(compiler, cache_key_tag=" ".join([compiler.cache_key_tag, *allowed])),
        _patched(
            torch._dynamo.config,
            recompile_limit=RECOMPILE_LIMIT,
            fail_on_recompile_limit_hit=True,
            # their names before torch 2.7
            cache_size_limit=RECOMPILE_LIMIT,
            fail_on_cache_limit_hit=True,
        ),
        # In torch 2.13 and 2.14 masks on a GPU depend on the form of the kernel that draws them (pytorch#198333).
        _patched(inductor, align_random_eager=True),
    ):
        try:
            yield
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise UserError(
                f"torch.compile needs more than {RECOMPILE_LIMIT} graphs of one function of the model, whose inputs have "
                "another form in many steps; leave --torchcompile out (TORCH_LOGS=recompiles names the reasons)"
            ) from error


def _patched(config: Any, **values: Any) -> Any:
    """Set those values of a config of torch that its release has."""
    return config.patch({name: value for name, value in values.items() if hasattr(config, name)})


def compile_blocks(model: nn.Module) -> int:
    """Replace each block of a model's towers by its compiled form.

    Equal blocks share their graphs, so that the first step comes soon.

    A block is a module of a list whose modules are all of one class, such as the layers of a transformer.

    Returns:
        The number of compiled blocks; 0 for a model without such a list, of which nothing is compiled.
    """
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and _is_list_of_blocks(module):
            blocks += module.children()
            inside.update(module.modules())
    for block in blocks:
        block.compile()
    return len(blocks)


def _is_list_of_blocks(module: nn.Module) -> bool:
    kinds = {type(child) for child in module.children()}
    return (
        isinstance(module, _LISTS)
        and len(kinds) == 1
        and not issubclass(kinds.pop(), _LISTS)
        and all(any(child.children()) for child in module)
    )
