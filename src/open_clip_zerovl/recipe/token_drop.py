"""TokenDrop (section 4.2): whether a model can drop patch tokens."""

from __future__ import annotations

import timm.layers
from open_clip.transformer import PatchDropout
from torch import nn

from open_clip_zerovl.core.errors import UserError

_PATCH_DROPOUTS = (PatchDropout, timm.layers.PatchDropout, timm.layers.PatchDropoutWithIndices)


def check_token_drop(model: nn.Module, rate: float) -> None:
    """Make sure that the image tower drops `rate` of its patch tokens in training.

    TokenDrop is open_clip's patch dropout (`create_model(force_patch_dropout=rate)`), which towers without tokens ignore.
    The class token stays, and evaluation has all tokens.

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
