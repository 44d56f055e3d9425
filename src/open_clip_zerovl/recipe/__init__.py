"""The recipe on a model (sections 2.2, 3.2, 4.2, A.9): its flags, mixup, token drop, frozen towers, optimizer, step."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.recipe.mixup": ["CoinFlipMixup"],
        "open_clip_zerovl.recipe.towers": ["freeze"],
        "open_clip_zerovl.recipe.start": ["init_from"],
        "open_clip_zerovl.recipe.frozen_cache": ["FrozenCache"],
        "open_clip_zerovl.recipe.optimizer": ["optimizer_step", "parameter_groups"],
        "open_clip_zerovl.recipe.step": ["RecipeStep"],
        "open_clip_zerovl.recipe.apply": ["apply_methods", "build_model"],
    },
)
