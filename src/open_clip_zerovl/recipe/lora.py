"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft on the linear layers of towers: W + (alpha / rank) B A; A and B train.

Adapted are all linear layers of a tower: query, key, value and output of attention, and the MLP. B begins at zero, so that the
model is unchanged. Projections and the temperature train whole. `checkpoints.weights` merges the adapters of a checkpoint.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from open_clip.transformer import Attention
from torch import nn

from open_clip_zerovl.checkpoints.weights import is_adapter
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.recipe.flags import TOWERS
from open_clip_zerovl.recipe.towers import batch_norms, freeze, group_of

#: Attentions with the weights of query, key and value in one parameter: torch's, and open_clip's own (all of them in 4.x).
PACKED = (nn.MultiheadAttention, Attention)
ALPHA = 2  # times the rank: the scale of peft's and the paper's examples, whatever the rank


def add_lora(model: nn.Module, rank: int, on: str) -> None:
    """Put adapters on the towers `on` (image, text, both) and make all else of both towers constant.

    Call it once the starting weights are loaded, and before DistributedDataParallel and the optimizer are made.

    Raises:
        UserError: a tower without linear layers, or with weights that adapters would not reach.
    """
    import peft

    trained = [
        p
        for name, p in model.named_parameters()
        if p.requires_grad and not group_of(name).endswith(" tower")
    ]
    towers = TOWERS if on == "both" else (on,)
    names = [name for tower in towers for name in _adapted_layers(model, tower)]
    config = peft.LoraConfig(
        r=rank, lora_alpha=ALPHA * rank, target_modules="|".join(map(re.escape, names))
    )
    config._register_custom_module(dict.fromkeys(PACKED, _packed_attention()))
    for module in map(model.get_submodule, names):
        if isinstance(module, Attention):  # peft asks for the sizes of what it does not know
            module.out_features, module.in_features = module.in_proj_weight.shape
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unsupported layer type")
        peft.inject_adapter_in_model(config, model)
    for layer in map(model.get_submodule, names):
        if isinstance(layer.base_layer, Attention):  # peft looks for the dtype in its `weight`
            layer.lora_A.to(layer.base_layer.in_proj_weight)
            layer.lora_B.to(layer.base_layer.in_proj_weight)
    for parameter in trained:
        parameter.requires_grad_(True)
    if on != "both":
        freeze(model, set(TOWERS) - set(towers), projection=False)
    _require_effect(model, names)


def lora_entry(rank: int) -> dict[str, int]:
    """Return the entry of a checkpoint for merging its adapters, with their scale."""
    return {"rank": rank, "alpha": ALPHA * rank}


def _adapted_layers(model: nn.Module, tower: str) -> list[str]:
    """Return the names of a tower's linear layers and packed attentions.

    Raises:
        UserError: there are none, or batch norms, whose statistics a constant tower would go on changing.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if group_of(f"{name}.") == f"{tower} tower"
    }
    packed = {
        name
        for name, module in modules.items()
        if isinstance(module, PACKED) and module.in_proj_weight is not None
    }
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    # the adapter of the attention holds it
    linear -= {f"{name}.out_proj" for name in packed}
    norms = sorted(batch_norms(model).keys() & modules.keys())
    bare = [
        name
        for name, _ in model.named_parameters()
        if group_of(name) == f"{tower} tower"
        and name.endswith("proj_weight")
        and (name.rpartition(".")[0] not in packed or not name.endswith("in_proj_weight"))
    ]
    if norms or bare or not linear | packed:
        obstacle = f"has {(norms or bare)[0]}" if norms or bare else "has no linear layers"
        raise UserError(
            f"--lora is for transformers of linear layers, and the {tower} tower {obstacle}; give --lora-on the other tower, "
            "or leave --lora out"
        )
    return sorted(linear | packed)


def _packed_attention() -> type[nn.Module]:
    """Declare peft's adapter of nn.MultiheadAttention, made exact and for all of PACKED, which needs peft."""
    from peft.tuners.lora.layer import MultiheadAttention

    class PackedAttention(MultiheadAttention):
        """Query, key and value together have one adapter, the output another.

        peft adds adapters to the weights before each forward pass and takes them away after it, which changes the weights by
        rounding; release 0.21.2 adds that of the output twice. Here the pass reads the sums and leaves the weights alone.
        """

        named_modules = nn.Module.named_modules  # peft's make new parameters of the weights
        state_dict = nn.Module.state_dict

        def forward(self, query: torch.Tensor, *args: Any, **options: Any) -> Any:
            """Attend as the adapted module does."""
            base: Any = self.base_layer
            adapter = self.active_adapters[0]
            sums = {"in_proj_weight": base.in_proj_weight + self.get_delta_weight(adapter)}
            if isinstance(base, nn.MultiheadAttention):  # reads this weight and calls no layer
                out: Any = base.out_proj  # peft's layer by now
                sums["out_proj.base_layer.weight"] = out.weight + out.get_delta_weight(adapter)
            return torch.func.functional_call(base, sums, (query, *args), options)

    return PackedAttention


@torch.no_grad()
def _require_effect(model: Any, names: list[str]) -> None:
    """Refuse an adapted layer that a forward pass does not call: its tower reads the bare weight."""
    called: set[str] = set()
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
        for name in names
    ]
    # open_clip's fp16 and bf16 cast linear layers and convolutions alone; pictures have their dtype
    first = next(p for name, p in model.named_parameters() if is_adapter(name))
    side = model.visual.image_size
    training = {module: module.training for module in model.modules()}
    shape = (side, side) if isinstance(side, int) else side
    model.eval()
    hugging_face = hasattr(getattr(model, "text", None), "config")  # takes texts of any length
    try:
        model.encode_image(torch.zeros(1, 3, *shape, device=first.device, dtype=first.dtype))
        model.encode_text(
            torch.full((1, 8 if hugging_face else model.context_length), 2, device=first.device)
        )
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in training.items():
            module.training = mode
    if missed := [name for name in names if name not in called]:
        raise UserError(
            f"--lora cannot train {missed[0]}: its tower does not call it as a layer, and an adapter would have no effect"
            f"{f' (and {len(missed) - 1} more)' if len(missed) > 1 else ''}; give --lora-on the other one, or leave --lora out"
        )
