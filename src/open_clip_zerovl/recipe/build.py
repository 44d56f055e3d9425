"""The paper's methods applied to a model, and its starting weights from another run (section 4.2).

`init_from` loads weights group by group, with a report of the loaded groups.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from open_clip.model import convert_to_custom_text_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from open_clip_zerovl.checkpoints.loading import (
    NOT_OF_FUNCTION,
    OF_FILES,
    OF_PROJECTION,
    ModelSpec,
    first_difference,
    read_model_spec,
    read_params,
    spec_of_run,
    tower_difference,
)
from open_clip_zerovl.checkpoints.weights import (
    WEIGHTS_FILE,
    read_state_dict,
    require_finite_weights,
)
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.data.images import with_auto_augment
from open_clip_zerovl.models.configs import CONFIG_FILE, LOCAL_DIR
from open_clip_zerovl.recipe.flags import TOWERS, RecipeConfig
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.step import text_padding
from open_clip_zerovl.recipe.towers import (
    GROUPS,
    add_lora,
    check_token_drop,
    checkpoint_without_reentry,
    freeze,
    freeze_norm_statistics,
    group_of,
)

# a constant that transformers before 4.31 stored
_UNSTORED = frozenset({"text.transformer.embeddings.position_ids"})

# Entries of a Hugging Face config about files, training and shapes.
_NOT_OF_TEXT = OF_FILES | {
    "initializer_range",
    "use_cache",
    "gradient_checkpointing",
    "max_position_embeddings",
}


@dataclass(frozen=True)
class InitReport:
    """Result of `init_from`, of which `str()` makes a table.

    Attributes:
        tensors: group -> number of its tensors in the model.
        left: group -> why it was not loaded, of those that were not.
    """

    path: str
    tensors: dict[str, int]
    left: dict[str, str]

    @property
    def loaded(self) -> tuple[str, ...]:
        """Return the names of the groups that were loaded."""
        return tuple(group for group in self.tensors if group not in self.left)

    def __str__(self) -> str:
        done = {
            group: f"left: {self.left[group]}" if group in self.left else "loaded"
            for group in self.tensors
        }
        lines = [
            f"  {group:<16} {count:>4} tensors  {done[group]}"
            for group, count in self.tensors.items()
        ]
        return "\n".join([f"initialised from {self.path}:", *lines])


def init_from(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    model_cfg: Mapping[str, Any] | None = None,
) -> InitReport:
    """Load into `model` each group of a checkpoint whose tensor names and shapes all match.

    A projection is loaded only together with its tower, because it does not fit another tower's features.

    Args:
        model: an open_clip model, changed in place.
        checkpoint: a training checkpoint, a folder that `zerovl export` wrote, or a `.safetensors` file.
        model_cfg: the model's config; a tower is then compared with that of the checkpoint's config (`params.txt` of its run,
            `open_clip_config.json` of a folder) by the settings that no shape shows. A `.safetensors` file has none.

    Returns:
        The groups that were loaded, and the reason for each group that was not.

    Raises:
        UserError: no such file, no tower of it fits (with the reason), or a tower that fits computes another function or
            holds numbers that are not finite.
    """
    weights = _read_weights(Path(checkpoint))
    if isinstance(getattr(model, "text", None), nn.Module):
        weights = convert_to_custom_text_state_dict(weights)  # from open_clip's plain CLIP class
    theirs = _by_group(weights)
    model_groups = _by_group(model.state_dict())
    left: dict[str, str] = {}
    for group in [group for group in GROUPS if group in model_groups]:
        tower = group.replace("projection", "tower")
        reason = _misfit(model_groups[group], theirs.get(group, {}))
        if reason is None and tower != group and tower in left:
            reason = f"its {tower} was left"
        if reason is not None:
            left[group] = reason
    report = InitReport(
        os.fspath(checkpoint),
        {group: len(model_groups[group]) for group in GROUPS if group in model_groups},
        left,
    )
    if not {"image tower", "text tower"} & set(report.loaded):
        reasons = "; ".join(
            f"{group}: {reason}" for group, reason in left.items() if group.endswith("tower")
        )
        raise UserError(
            f"no tower of {checkpoint} fits this model, so nothing was loaded: {reasons}"
        )
    if model_cfg is not None:
        _require_same_function(model, model_cfg, Path(checkpoint), report.loaded)
    selected = {name: weights[name] for group in report.loaded for name in model_groups[group]}
    require_finite_weights(selected, dict(model.named_parameters()), checkpoint)
    model.load_state_dict(selected, strict=False)
    return report


def _require_same_function(
    model: nn.Module, model_cfg: Mapping[str, Any], checkpoint: Path, groups: tuple[str, ...]
) -> None:
    """Refuse a tower among `groups` with another setting than in the checkpoint's config, and warn of a config to doubt."""
    try:
        spec = _spec_of(checkpoint)
        if spec is None:
            return
        text = _text_configs(model, spec) if "text tower" in groups else ({}, {})
    except (UserError, OSError) as error:
        logging.warning(
            f"The model's config of {checkpoint} is not compared, only names and shapes of tensors: {error}"
        )
        return
    for tower in [tower for tower in TOWERS if f"{tower} tower" in groups]:
        ignored = (
            NOT_OF_FUNCTION if f"{tower} projection" in groups else NOT_OF_FUNCTION | OF_PROJECTION
        )
        difference = tower_difference(spec.model_cfg, model_cfg, tower, ignored)
        if difference is None and tower == "text":
            difference = first_difference(*text, _NOT_OF_TEXT)
        if difference is not None:
            key, there, here = difference
            raise UserError(
                f"the {tower} tower of {checkpoint} has the model's shapes and computes another function: {key} is {there} "
                f"there and {here} here; give the model that setting, or --init-from the .safetensors file of an export, "
                "which has no config to compare"
            )


def _spec_of(checkpoint: Path) -> ModelSpec | None:
    """Read the configs of a checkpoint's model.

    Returns:
        None if none lies with it.

    Raises:
        UserError: they cannot be read.
    """
    if checkpoint.is_dir():
        return (
            spec_of_run(LOCAL_DIR + str(checkpoint), {})
            if (checkpoint / CONFIG_FILE).is_file()
            else None
        )
    named = checkpoint.suffix != ".safetensors" and read_params(checkpoint).get("model")
    return read_model_spec(checkpoint) if named else None


def _text_configs(model: nn.Module, spec: ModelSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checkpoint's and the model's config of a Hugging Face text tower.

    Returns:
        Empty for open_clip's own.
    """
    config: Any = getattr(getattr(model, "text", None), "config", None)
    if config is None or spec.text_source is None:
        return {}, {}
    from transformers import AutoConfig

    with reading(f"the config of the text tower {spec.text_source}"):
        theirs = AutoConfig.from_pretrained(spec.text_source, local_files_only=True)
    # Dropout and the like are settings of a training.
    there, here = (
        {k: v for k, v in c.to_dict().items() if "dropout" not in k} for c in (theirs, config)
    )
    return there, here


def _read_weights(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        path = path / WEIGHTS_FILE
    if path.suffix != ".safetensors":
        return read_state_dict(path)
    with reading(path):
        return load_file(path)


def _by_group(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name not in _UNSTORED:
            groups.setdefault(group_of(name), {})[name] = tensor
    return groups


def _misfit(model_tensors: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """Describe why `theirs` cannot replace `model_tensors`.

    Returns:
        None if it can.
    """
    if not theirs:
        return "the checkpoint has none"
    for kind, names in (
        ("lacks", model_tensors.keys() - theirs.keys()),
        ("also has", theirs.keys() - model_tensors.keys()),
    ):
        if names:
            return f"the checkpoint {kind} {min(names)}" + (
                f" and {len(names) - 1} more" if len(names) > 1 else ""
            )
    for name, tensor in model_tensors.items():
        if theirs[name].shape != tensor.shape:
            return f"{name} is {tuple(theirs[name].shape)} there and {tuple(tensor.shape)} here"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Methods
# ---------------------------------------------------------------------------------------------------------------------


def apply_methods(
    model: Any, transform: Callable[..., Any], methods: RecipeConfig, *, seed: int
) -> tuple[Callable[..., Any], CoinFlipMixup | None]:
    """Make a run's changes to the model, in order: norms, memory format, adapters, frozen towers, temperature, mixup, padding.

    Call it once the starting weights are loaded, and before DDP and compile.

    Args:
        transform: of training images.
        seed: the seed of mixup's draws.

    Returns:
        The transform (with AutoAugment if asked for), and the mixup if asked for.

    Raises:
        UserError: a tower that does not support a method.
    """
    if methods.token_drop is not None:
        check_token_drop(model, methods.token_drop)
    if methods.freeze_norm_statistics:
        count = freeze_norm_statistics(model)
        logging.info(f"Running statistics of {count} batch norms are frozen.")
    if methods.channels_last:
        model.visual.to(memory_format=torch.channels_last)
    if methods.lora is not None:
        add_lora(model, methods.lora, methods.lora_on)
    if methods.freeze:
        count = freeze(model, methods.freeze)
        logging.info(f"Frozen: {' and '.join(methods.freeze)} ({count / 1e6:.1f} M parameters).")
    if methods.temperature_constant:
        model.logit_scale.requires_grad_(False)
    mixup = None
    if methods.coin_flip_mixup:
        mixup = CoinFlipMixup(methods.mixup_alpha, seed=seed)
        mixup.attach(model)
    if methods.sort_text:
        text_padding(model)
    if methods.auto_augment is not None:
        transform = with_auto_augment(transform, methods.auto_augment)
    checkpoint_without_reentry(model)
    return transform, mixup
