"""What cannot go together: flags of open_clip with the recipe as a whole, by theme.

What a single flag of ours contradicts stands where that flag is declared (`recipe.flags`); so do ranges.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.recipe.flags import AllFlags, contradicted, out_of_range
from training.config import RecipeConfig, all_flags


@dataclass(frozen=True)
class Refusal:
    """A flag of open_clip that does not work with a part of the recipe.

    Attributes:
        flag: how open_clip's flag is called in the sentence; `{0.name}` stands for a flag's value.
        given: whether it was given.
        recipe: how the part of the recipe is called.
        wanted: whether that part was asked for.
        advice: why, and what to do.
    """

    flag: str
    given: Callable[[AllFlags], bool]
    recipe: str
    wanted: Callable[[AllFlags], bool]
    advice: str


THE_RECIPE = "the recipe's flags"
THE_STEP = "the recipe's step (--sampling, --dga-steps, --loss-chunk ...)"
STEP_FLAGS = "--dga-steps, --dga-retain, --dga-check, --loss-chunk or --ablate"

PROGRAM = (
    Refusal("--horovod", lambda f: f.horovod, THE_RECIPE, lambda f: f.active, "use torchrun"),
    Refusal("--trace", lambda f: f.trace, THE_RECIPE, lambda f: f.active, "a traced model cannot be trained"),
)
STEP = (
    Refusal(
        "--accum-freq {0.accum_freq}",
        lambda f: f.accum_freq > 1,
        THE_STEP,
        lambda f: f.own_step or f.mixture,
        "it multiplies the temperature's gradient by its number and redraws dropout; give --dga-steps instead",
    ),
    Refusal(
        "--local-loss without --gather-with-grad",
        lambda f: f.local_loss and not f.gather_with_grad,
        THE_STEP,
        lambda f: f.own_step and "detached-gather" not in f.ablate,
        "it loses the other ranks' gradients (paper section 4.1); leave both out, the recipe's loss is local and exact, or ask "
        "for the ablation with --ablate detached-gather",
    ),
    Refusal(
        "--ddp-static-graph",
        lambda f: f.ddp_static_graph,
        THE_STEP,
        lambda f: f.own_step,
        "a static graph counts on one backward pass a step, and the recipe's step takes one a micro-batch",
    ),
)
LOSS = (
    Refusal(
        "--model {0.model}",
        lambda f: "coca" in f.model.lower(),
        STEP_FLAGS,
        lambda f: f.step_flags,
        "CoCa's generative loss cannot be decoupled from its graph",
    ),
    Refusal(
        "--distill-model",
        lambda f: f.distill_model is not None,
        STEP_FLAGS,
        lambda f: f.step_flags,
        "the distillation loss needs the teacher's features of the whole effective batch",
    ),
    Refusal(
        "--siglip",
        lambda f: f.siglip,
        "--loss-chunk, --ablate or --coin-flip-mixup",
        lambda f: bool(f.loss_chunk or f.ablate or f.coin_flip_mixup),
        "they belong to the softmax loss",
    ),
)
DATA = (
    Refusal(
        "--dataset-type {0.dataset_type}",
        lambda f: f.dataset_type not in ("auto", "webdataset"),
        "named sources or --sampling",
        lambda f: f.mixture,
        "sources are webdataset shards",
    ),
)
THEMES = (PROGRAM, STEP, LOSS, DATA)


def check(config: RecipeConfig, args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other and values out of range.

    Raises:
        UserError: the first of them, both flags named.
    """
    given = all_flags(config, args)
    for theme in THEMES:
        for refusal in theme:
            if refusal.given(given) and refusal.wanted(given):
                flag = refusal.flag.format(given)
                raise UserError(f"{flag} does not work with {refusal.recipe}: {refusal.advice}")
    for sentence in contradicted(given):
        raise UserError(sentence)
    for sentence in out_of_range(given):
        raise UserError(sentence)
