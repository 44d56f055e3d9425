"""The two towers as groups of tensors: freezing one (auxiliary encoders), TokenDrop (section 4.2), and adapters.

A model's tensors fall into six groups, each loaded or frozen as a whole: the image tower, its projection, the text tower,
its projection, `logit_scale` and `logit_bias`.

Low-rank adapters (LoRA, arXiv 2106.09685) by peft make W + (alpha / rank) B A of each linear layer of a tower, of which A and B
train: query, key, value and output of attention, and the MLP. B begins at zero, so that the model is unchanged.
Projections and the temperature train whole. `checkpoints.weights` merges the adapters of a checkpoint.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import timm.layers
import torch
from open_clip.transformer import Attention, PatchDropout
from timm.models._manipulate import group_with_matcher
from torch import nn

from open_clip_zerovl.checkpoints.weights import is_adapter
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.recipe.flags import TOWERS

# timm before 1.0.18 has no PatchDropoutWithIndices.
_WITH_INDICES = getattr(timm.layers, "PatchDropoutWithIndices", timm.layers.PatchDropout)
_PATCH_DROPOUTS = (PatchDropout, timm.layers.PatchDropout, _WITH_INDICES)
# Layers of open_clip's and Hugging Face's transformers, for timm's `group_with_matcher`.
_LAYERS = {
    "stem": r".*?\b(?:conv1|ln_pre|shared|class_embedding|cls_emb|\w*embeddings?|embed_tokens)\b",
    "blocks": [
        (r".*?\.(?:resblocks|layers?|block|h)\.(\d+)\.", None),
        (
            r".*\b(?:ln_post|ln_final|final_norm|final_layer_norm)\b",
            (99999,),
        ),  # timm's mark: with the block before it
    ],
}
GROUPS = (
    "image tower",
    "image projection",
    "text tower",
    "text projection",
    "logit_scale",
    "logit_bias",
)


def group_of(name: str) -> str:
    """Find the group (of GROUPS) of a parameter or buffer of an open_clip model, by its name."""
    if name in ("logit_scale", "logit_bias"):
        return name
    if name.startswith("visual."):
        projection = name == "visual.proj" or name.startswith(
            ("visual.head.", "visual.trunk.head.")
        )
        return "image projection" if projection else "image tower"
    inner_name = name.removeprefix("text.")
    projection = inner_name == "text_projection" or inner_name.startswith(
        ("text_projection.", "proj.")
    )
    return "text projection" if projection else "text tower"


def layers_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Number the layers of both towers' parameters, and the layer above the top block: 0 for embeddings, then the blocks.

    timm's towers define it (`group_matcher`); open_clip's and Hugging Face's transformers follow `_LAYERS`.

    Raises:
        UserError: a tower of which something is trained, and whose blocks are not to be found.
    """
    all_layers: dict[str, tuple[int, int]] = {}
    for tower in TOWERS:
        names = {
            name: p.requires_grad
            for name, p in model.named_parameters()
            if group_of(name) == f"{tower} tower"
        }
        trunk: Any = (
            getattr(getattr(model, "visual", None), "trunk", None) if tower == "image" else None
        )
        of_timm = hasattr(trunk, "group_matcher")
        prefix = "visual.trunk." if of_timm else ""
        named = [(name.removeprefix(prefix), None) for name in names]
        # A name that matches nothing is above all layers.
        layers = group_with_matcher(
            [*named, ("", None)], trunk.group_matcher() if of_timm else _LAYERS, reverse=True
        )
        top = layers.pop("")
        if top < 2 and any(names.values()):
            raise UserError(
                f"--layer-decay does not find the layers of the {tower} tower; leave it out"
            )
        all_layers |= {prefix + name: (layer, top) for name, layer in layers.items()}
    return all_layers


def freeze(model: nn.Module, towers: Iterable[str], *, projection: bool = True) -> int:
    """Make towers constant: no gradient, no graph, no optimizer state.

    Dropout, token drop and batch norm stay off.

    The frozen modules stay in evaluation mode when `train()` is called on them or on a module around them. Call this before
    DistributedDataParallel and the optimizer are made. `DecoupledGradientAccumulation` then forwards a tower that is frozen
    together with its projection once per micro-batch, without graph.

    Args:
        model: an open_clip model, changed in place.
        towers: of TOWERS.
        projection: freeze the towers' projections, too.

    Returns:
        How many parameters (numbers, not tensors) were frozen.
    """
    parts = ("tower", "projection") if projection else ("tower",)
    frozen = {f"{tower} {part}" for tower in towers for part in parts}
    count = 0
    for name, parameter in model.named_parameters():
        if group_of(name) in frozen:
            parameter.requires_grad_(False)
            count += parameter.numel()
    for name, child in model.named_children():
        _hold_in_eval(child, name, frozen)
    return count


def _hold_in_eval(module: nn.Module, name: str, frozen: set[str]) -> bool:
    """Keep `module` in evaluation mode if it is of a frozen group.

    Returns:
        Whether something inside still follows `train`.
    """
    if group_of(f"{name}.") not in frozen:
        return True
    following = tuple(
        child_name
        for child_name, child in module.named_children()
        if _hold_in_eval(child, f"{name}.{child_name}", frozen)
    )
    module.training = False
    # Set on the instance, where nn.Module.train of every parent calls it. A partial, unlike a closure, is copied and pickled
    # together with its module.
    vars(module)["train"] = partial(_train_only, module, following)
    return bool(following)


def _train_only(module: nn.Module, following: tuple[str, ...], mode: bool = True) -> nn.Module:
    for name in following:
        module.get_submodule(name).train(mode)
    return module


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules of a model that change running statistics in training mode, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        and module.track_running_stats
        and "train" not in vars(module)  # which `freeze` and `freeze_norm_statistics` replace
    }


def freeze_norm_statistics(model: nn.Module) -> int:
    """Keep batch norms in evaluation mode: the running statistics normalise and stay, while weights and biases train.

    Statistics of small or one-source batches replace those of a trained tower within a few steps, and its features with them,
    although no weight changes (docs/methods.md). Call this before DistributedDataParallel is made.

    Returns:
        The number of norms whose statistics are frozen.
    """
    norms = batch_norms(model)
    for module in norms.values():
        module.training = False
        vars(module)["train"] = partial(_train_only, module, ())
    return len(norms)


def checkpoint_without_reentry(model: nn.Module) -> None:
    """Make gradient checkpointing of a Hugging Face text tower give gradients where the embeddings are constant.

    The default of transformers 4, reentrant checkpoints, gives none to a layer whose input needs none: adapters, or the layers
    that `--lock-text-unlocked-layers` trains, would stay as they are.
    """
    text: Any = getattr(model, "text", None)
    if hasattr(getattr(text, "transformer", None), "gradient_checkpointing_enable"):
        vars(text)["set_grad_checkpointing"] = partial(_enable_checkpointing, text.transformer)


def _enable_checkpointing(transformer: Any, enable: bool = True, impl: str = "inline") -> None:
    """Turn checkpoints on.

    `impl`, which open_clip 4 passes, chooses nothing for a Hugging Face tower there either.
    """
    if enable:
        transformer.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )


def check_token_drop(model: nn.Module, rate: float) -> None:
    """Make sure that the image tower drops `rate` of its patch tokens in training.

    TokenDrop is open_clip's patch dropout (`create_model(force_patch_dropout=rate)`), which towers without tokens ignore.
    The class token stays, and evaluation has all tokens.

    Raises:
        UserError: a tower without patch dropout, or with another rate.
    """
    visual: Any = model.visual
    rates = {module.prob for module in visual.modules() if isinstance(module, _PATCH_DROPOUTS)}
    if rates != {rate}:
        tower = getattr(visual, "trunk", visual)
        raise UserError(
            f"the image tower {type(tower).__name__} does not drop {rate} of its tokens; leave the token drop out, or choose a "
            "ViT"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Adapters
# ---------------------------------------------------------------------------------------------------------------------

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
