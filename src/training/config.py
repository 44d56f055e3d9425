"""The settings of a run: our flags (`RecipeConfig`) and open_clip's namespace, in one record."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from open_clip_zerovl.core.flags import flags_of
from open_clip_zerovl.recipe.flags import AllFlags, OpenClipFlags, RecipeConfig, values_of

__all__ = ["RecipeConfig", "all_flags", "uses_own_step"]


def all_flags(config: RecipeConfig, args: argparse.Namespace) -> AllFlags:
    """Our flags and those of open_clip's that `recipe.flags` declares, in one record."""
    # Another release of open_clip may lack a flag, which then counts as not given.
    stock = {each.name: getattr(args, each.name, each.default) for each in flags_of(OpenClipFlags)}
    return AllFlags(**values_of(stock), **asdict(config))


def uses_own_step(config: RecipeConfig, args: argparse.Namespace) -> bool:
    """Whether the run takes our optimizer step; see `AllFlags.own_step`."""
    return all_flags(config, args).own_step
