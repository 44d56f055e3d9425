"""Starting weights from another run (section 4.2), group by group, with a report of the loaded groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from open_clip.model import convert_to_custom_text_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from open_clip_zerovl.checkpoints.weights import WEIGHTS_FILE, read_state_dict
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import UNREADABLE
from open_clip_zerovl.recipe.towers import GROUPS, group_of

_UNSTORED = frozenset({"text.transformer.embeddings.position_ids"})  # a constant that transformers before 4.31 stored


@dataclass(frozen=True)
class InitReport:
    """Result of `init_from`; `str()` makes a table of it.

    Attributes:
        tensors: group -> number of its tensors in the model.
        left: group -> why it was not loaded, of those that were not.
    """

    path: str
    tensors: dict[str, int]
    left: dict[str, str]

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the groups that were loaded."""
        return tuple(group for group in self.tensors if group not in self.left)

    def __str__(self) -> str:
        done = {group: f"left: {self.left[group]}" if group in self.left else "loaded" for group in self.tensors}
        lines = [f"  {group:<16} {count:>4} tensors  {done[group]}" for group, count in self.tensors.items()]
        return "\n".join([f"initialised from {self.path}:", *lines])


def init_from(model: nn.Module, checkpoint: str | os.PathLike[str]) -> InitReport:
    """Load into `model` each group of a checkpoint whose tensor names and shapes all match.

    A projection is loaded only together with its tower, because it does not fit another tower's features.

    Args:
        model: an open_clip model, changed in place.
        checkpoint: a training checkpoint, a folder that `zerovl export` wrote, or a `.safetensors` file.

    Returns:
        The groups that were loaded, and the reason for each group that was not.

    Raises:
        UserError: no such file, or no tower of it fits (with the reason).
    """
    weights = _read_weights(Path(checkpoint))
    if isinstance(getattr(model, "text", None), nn.Module):
        weights = convert_to_custom_text_state_dict(weights)  # from open_clip's plain CLIP class
    own, theirs = _by_group(model.state_dict()), _by_group(weights)
    left: dict[str, str] = {}
    for group in [group for group in GROUPS if group in own]:
        tower = group.replace("projection", "tower")
        reason = _misfit(own[group], theirs.get(group, {}))
        if reason is None and tower != group and tower in left:
            reason = f"its {tower} was left"
        if reason is not None:
            left[group] = reason
    report = InitReport(os.fspath(checkpoint), {group: len(own[group]) for group in GROUPS if group in own}, left)
    if not {"image tower", "text tower"} & set(report.loaded):
        reasons = "; ".join(f"{group}: {reason}" for group, reason in left.items() if group.endswith("tower"))
        raise UserError(f"no tower of {checkpoint} fits this model, so nothing was loaded: {reasons}")
    selected = {name: weights[name] for group in report.loaded for name in own[group]}
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
    except (SafetensorError, *UNREADABLE) as error:
        raise UserError(f"{path} cannot be read as safetensors ({first_line(error)}); give a whole file") from error


def _by_group(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name not in _UNSTORED:
            groups.setdefault(group_of(name), {})[name] = tensor
    return groups


def _misfit(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """The reason why `theirs` cannot replace `own`, or None."""
    if not theirs:
        return "the checkpoint has none"
    for kind, names in (("lacks", own.keys() - theirs.keys()), ("also has", theirs.keys() - own.keys())):
        if names:
            return f"the checkpoint {kind} {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    for name, tensor in own.items():
        if theirs[name].shape != tensor.shape:
            return f"{name} is {tuple(theirs[name].shape)} there and {tuple(tensor.shape)} here"
    return None
