"""Fast training (section 4.3): TokenDrop, and auxiliary encoders: a tower from another run, frozen, teaches a new one.

A model's tensors fall into six groups, each loaded or frozen as a whole: the image tower, its projection, the text tower,
its projection, `logit_scale` and `logit_bias`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import timm.layers
from open_clip.model import convert_to_custom_text_state_dict
from open_clip.transformer import PatchDropout
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.loading import WEIGHTS_FILE, read_state_dict

TOWERS = ("image", "text")
GROUPS = ("image tower", "image projection", "text tower", "text projection", "logit_scale", "logit_bias")

_PATCH_DROPOUTS = (PatchDropout, timm.layers.PatchDropout, timm.layers.PatchDropoutWithIndices)
_UNSTORED = frozenset({"text.transformer.embeddings.position_ids"})  # a constant that transformers before 4.31 stored


def group_of(name: str) -> str:
    """The group, of GROUPS, that a parameter or buffer of an open_clip model belongs to, by its name."""
    if name in ("logit_scale", "logit_bias"):
        return name
    if name.startswith("visual."):
        projection = name == "visual.proj" or name.startswith(("visual.head.", "visual.trunk.head."))
        return "image projection" if projection else "image tower"
    own = name.removeprefix("text.")
    projection = own == "text_projection" or own.startswith(("text_projection.", "proj."))
    return "text projection" if projection else "text tower"


# ---------------------------------------------------------------------------------------------------------------------
# Initialising from another run
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupReport:
    """What became of one group: `tensors` of the model, and why it was left as it was (None: it was loaded)."""

    group: str
    tensors: int
    left_because: str | None


@dataclass(frozen=True)
class InitReport:
    """What `init_from` did, a line per group; `str()` makes a table of it."""

    path: str
    groups: tuple[GroupReport, ...]

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the groups that were loaded."""
        return tuple(report.group for report in self.groups if report.left_because is None)

    def __str__(self) -> str:
        lines = [f"initialised from {self.path}:"]
        for report in self.groups:
            what = "loaded" if report.left_because is None else f"left: {report.left_because}"
            lines.append(f"  {report.group:<16} {report.tensors:>4} tensors  {what}")
        return "\n".join(lines)


def init_from(model: nn.Module, checkpoint: str | os.PathLike[str]) -> InitReport:
    """Load into `model` each group of a checkpoint that fits wholly: the same tensor names and shapes.

    A projection is loaded only together with its tower: it says nothing about another tower's features.

    Args:
        model: an open_clip model, changed in place.
        checkpoint: a training checkpoint, a folder that `zerovl export` wrote, or a `.safetensors` file.

    Returns:
        What was loaded, and what was left and why.

    Raises:
        UserError: no such file, or one of which no tower fits (the table says why).
    """
    weights = _read_weights(Path(checkpoint))
    if isinstance(getattr(model, "text", None), nn.Module):
        weights = convert_to_custom_text_state_dict(weights)  # from open_clip's plain CLIP class
    own, theirs = _by_group(model.state_dict()), _by_group(weights)
    reports: list[GroupReport] = []
    selected: dict[str, Tensor] = {}
    for group in GROUPS:
        if group not in own:
            continue
        reason = _misfit(own[group], theirs.get(group, {}))
        tower = group.replace("projection", "tower")
        if reason is None and tower != group and any(r.group == tower and r.left_because for r in reports):
            reason = f"its {tower} was left"
        if reason is None:
            selected.update({name: weights[name] for name in own[group]})
        reports.append(GroupReport(group, len(own[group]), reason))
    report = InitReport(os.fspath(checkpoint), tuple(reports))
    if not {"image tower", "text tower"} & set(report.loaded):
        raise UserError(
            f"no tower of {checkpoint} fits this model, so nothing was loaded: "
            + "; ".join(f"{r.group}: {r.left_because}" for r in reports if r.group in ("image tower", "text tower"))
        )
    model.load_state_dict(selected, strict=False)
    return report


def _read_weights(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        path = path / WEIGHTS_FILE
    if path.suffix != ".safetensors":
        return read_state_dict(path)
    if not path.is_file():
        raise UserError(f"there is no file {path} to initialise from")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read as safetensors ({error}); give a whole file") from error


def _by_group(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name not in _UNSTORED:
            groups.setdefault(group_of(name), {})[name] = tensor
    return groups


def _misfit(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """Why `theirs` does not fit in the place of `own`, or None."""
    if not theirs:
        return "the checkpoint has none"
    for kind, names in (("lacks", own.keys() - theirs.keys()), ("also has", theirs.keys() - own.keys())):
        if names:
            return f"the checkpoint {kind} {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    for name, tensor in own.items():
        if theirs[name].shape != tensor.shape:
            return f"{name} is {tuple(theirs[name].shape)} there and {tuple(tensor.shape)} here"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Freezing
# ---------------------------------------------------------------------------------------------------------------------


def freeze(model: nn.Module, towers: Iterable[str], *, projection: bool = True) -> int:
    """Make towers constants: no gradient, no graph, no optimizer state; dropout, token drop and batch norm off for good.

    The frozen modules stay in evaluation mode whatever `train()` is called on them or around them. To be called before
    DistributedDataParallel and the optimizer are made. `DecoupledGradientAccumulation` then forwards a tower that is
    frozen together with its projection once per micro-batch, without graph.

    Args:
        model: an open_clip model, changed in place.
        towers: of TOWERS.
        projection: freeze the towers' projections, too.

    Returns:
        How many parameters (numbers, not tensors) no longer learn.

    Raises:
        UserError: an unknown tower, or no weights left to learn.
    """
    chosen = sorted(set(towers))
    unknown = [tower for tower in chosen if tower not in TOWERS]
    if unknown:
        raise UserError(f"there is no tower {unknown[0]!r} to freeze; give image or text.")
    frozen = {f"{tower} tower" for tower in chosen}
    if projection:
        frozen |= {f"{tower} projection" for tower in chosen}
        if len(chosen) == len(TOWERS):
            raise UserError("with both towers and their projections frozen there is nothing left to learn; freeze one.")
    count = 0
    for name, parameter in model.named_parameters():
        if group_of(name) in frozen:
            parameter.requires_grad_(False)
            count += parameter.numel()
    for name, child in model.named_children():
        _hold_in_eval(child, name, frozen)
    return count


def _hold_in_eval(module: nn.Module, name: str, frozen: set[str]) -> bool:
    """Fix `module` in evaluation mode if it is of a frozen group; tells whether something inside still follows `train`."""
    if group_of(f"{name}.") not in frozen:
        return True
    following = tuple(
        child_name
        for child_name, child in module.named_children()
        if _hold_in_eval(child, f"{name}.{child_name}", frozen)
    )
    module.training = False
    # On the instance, where nn.Module.train of every parent finds it. A partial, unlike a closure, is copied and pickled
    # together with the module it belongs to.
    module.train = partial(_train_only, module, following)
    return bool(following)


def _train_only(module: nn.Module, following: tuple[str, ...], mode: bool = True) -> nn.Module:
    for name in following:
        module.get_submodule(name).train(mode)
    return module


def lock_text_layers(model: nn.Module, unlocked_layers: int = 0, freeze_layer_norm: bool = True) -> None:
    """open_clip's `lock_text_tower` for Hugging Face text towers, BERT included (open_clip 3.3 raises KeyError there).

    The embeddings and all but the last `unlocked_layers` layers get no gradient; what follows the layers (pooler,
    projection) goes on learning. Dropout stays on, as in open_clip; `freeze` turns it off.

    Args:
        unlocked_layers: layers, from the last, that go on learning; 0 locks the whole transformer.
        freeze_layer_norm: lock the LayerNorms of what is locked, too.

    Raises:
        UserError: a text tower that is not Hugging Face's or whose layers are not to be found, or too many layers.
    """
    transformer = getattr(getattr(model, "text", None), "transformer", None)
    if not isinstance(transformer, nn.Module) or not hasattr(transformer, "config"):
        raise UserError(
            f"the text tower of {type(model).__name__} is not a Hugging Face model; lock it by open_clip's way."
        )
    if unlocked_layers == 0:
        locked: list[nn.Module] = [transformer]
    else:
        encoder = getattr(transformer, "encoder", transformer)
        lists = [child for child in encoder.children() if isinstance(child, nn.ModuleList)]
        embeddings = getattr(transformer, "embeddings", None)
        if len(lists) != 1 or not isinstance(embeddings, nn.Module):
            raise UserError(f"the layers of {type(transformer).__name__} are not where BERT has them; lock all of it.")
        stages = [embeddings, *lists[0]]
        if not 0 < unlocked_layers <= len(stages):
            raise UserError(
                f"{type(transformer).__name__} has {len(stages) - 1} layers and its embeddings, so that 0 to {len(stages)} "
                f"can be unlocked, not {unlocked_layers}."
            )
        locked = stages[:-unlocked_layers]
    for module in locked:
        for name, parameter in module.named_parameters():
            if freeze_layer_norm or "LayerNorm" not in name.split("."):
                parameter.requires_grad_(False)


# ---------------------------------------------------------------------------------------------------------------------
# TokenDrop
# ---------------------------------------------------------------------------------------------------------------------


def check_token_drop(model: nn.Module, rate: float) -> None:
    """Make sure that the image tower really drops `rate` of its patch tokens in training.

    TokenDrop is open_clip's patch dropout (`create_model(force_patch_dropout=rate)`), which towers without tokens ignore.
    The tokens before the patches (the class token) stay, and evaluation sees all tokens.

    Raises:
        UserError: a rate outside of (0, 1); a tower without patch dropout, or with another rate.
    """
    if not 0 < rate < 1:
        raise UserError(f"the share of tokens to drop must lie between 0 and 1, but is {rate}.")
    visual = getattr(model, "visual", None)
    found = [module.prob for module in visual.modules() if isinstance(module, _PATCH_DROPOUTS)] if visual else []
    if not found:
        tower = getattr(visual, "trunk", visual)
        raise UserError(
            f"the image tower {type(tower).__name__} drops no tokens: token drop {rate} needs a ViT; leave it out or "
            "choose another model."
        )
    if any(prob != rate for prob in found):
        raise UserError(f"the image tower drops {found[0]} of its tokens instead of {rate}; build it with that rate.")
