"""Flags of open_clip that do not work with the recipe, by theme.

What a single flag of ours needs or contradicts is declared with that flag (`recipe.flags`); so are ranges. Mistakes that
open_clip's main reports in a sentence of its own are left to it (`run.Run`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import conflicts, out_of_range
from open_clip_zerovl.core.releases import line_here
from open_clip_zerovl.recipe.flags import AllFlags


class Refusal(NamedTuple):
    """A flag of open_clip that does not work with a part of the recipe.

    Attributes:
        flag: open_clip's flag in the sentence; `{0.name}` is replaced by a flag's value.
        recipe: the part of the recipe in the sentence.
        when: whether both were given.
        advice: why, and what to do.
    """

    flag: str
    recipe: str
    when: Callable[[AllFlags], bool]
    advice: str


class Need(NamedTuple):
    """A flag of open_clip that does nothing, or ends in a traceback, without another one.

    Attributes:
        flag: the flag in the sentence; `{0.name}` is replaced by a flag's value.
        when: whether it was given without what it needs.
        needs: what it needs, and what to do.
    """

    flag: str
    when: Callable[[AllFlags], bool]
    needs: str


class Later(NamedTuple):
    """Flags that open_clip 4 has and 3.3 has not, and that a part of the recipe would pass over.

    Attributes:
        flags: as they are written; one was given where its value is not its default.
        recipe, when, advice: as of `Refusal`.
    """

    flags: str
    recipe: str
    when: Callable[[AllFlags], bool]
    advice: str


THE_RECIPE = "the recipe's flags"
THE_STEP = "the recipe's step (--sampling, --dga-steps, --loss-chunk ...)"
STEP_FLAGS = (
    "--dga-steps, --dga-retain, --dga-check, --sort-text, --loss-chunk, --cross-source-weight, --positives, --teacher, "
    "--captions FIELD+FIELD or --ablate"
)
OTHER_MODELS = ("genlip", "genlap", "clap")
OF_SOFTMAX = ("detached-gather", "mixup-both", "mixup-embeddings", "no-replay", "temperature-parameter")


def _scripted_and_changed(f: AllFlags) -> bool:
    changed = (f.lock_image, f.lock_text, f.freeze, f.cache_frozen, f.coin_flip_mixup, f.temperature_constant)
    return f.torchscript and any((*changed, f.token_drop, f.init_from, f.init_image, f.init_text))


REFUSALS = (
    # the program
    Refusal("--horovod", THE_RECIPE, lambda f: f.horovod and f.active, "use torchrun"),
    Refusal("--trace", THE_RECIPE, lambda f: f.trace and f.active, "a traced model cannot be trained"),
    # the step
    Refusal(
        "--accum-freq {0.accum_freq}", THE_STEP, lambda f: f.accum_freq > 1 and (f.own_step or f.mixture),
        "it multiplies the temperature's gradient by its number and redraws dropout; give --dga-steps instead",
    ),
    Refusal(
        "--local-loss without --gather-with-grad", THE_STEP,
        lambda f: f.local_loss and not f.gather_with_grad and f.own_step and "detached-gather" not in f.ablate,
        "it loses the other ranks' gradients (paper section 4.1); leave both out, the recipe's loss is local and exact, or ask "
        "for the ablation with --ablate detached-gather",
    ),
    Refusal(
        "--ddp-static-graph", THE_STEP, lambda f: f.ddp_static_graph and f.own_step,
        "a static graph counts on one backward pass a step, and the recipe's step takes one a micro-batch",
    ),
    # the loss
    Refusal(
        "--model {0.model}", THE_RECIPE, lambda f: f.active and any(kind in f.model.lower() for kind in OTHER_MODELS),
        "it is for models with an image tower and a text tower",
    ),
    Refusal(
        "--model {0.model}", STEP_FLAGS, lambda f: "coca" in f.model.lower() and f.step_flags,
        "CoCa's generative loss cannot be decoupled from its graph",
    ),
    Refusal(
        "--distill-model", STEP_FLAGS, lambda f: f.distill_model is not None and f.step_flags,
        "the distillation loss needs the teacher's features of the whole effective batch",
    ),
    Refusal(
        "--siglip", f"--ablate {', '.join(OF_SOFTMAX)} or --coin-flip-mixup",
        lambda f: f.siglip and (f.coin_flip_mixup or any(name in OF_SOFTMAX for name in f.ablate)),
        "they belong to the softmax loss",
    ),
    Refusal(
        "--siglip", "--teacher with --distill-weight 1",
        lambda f: f.siglip and f.teacher is not None and f.distill_weight == 1,
        "the loss then is the distillation alone, of softmaxes; give a smaller --distill-weight, or leave --siglip out",
    ),
    # the model
    Refusal(
        "--torchscript", "--torchcompile", lambda f: f.torchscript and f.torchcompile,
        "torch.compile takes no scripted model; give one of them",
    ),
    Refusal(
        "--torchscript",
        "--lock-*, --freeze, --cache-frozen, --coin-flip-mixup, --temperature-constant, --token-drop or --init-*",
        _scripted_and_changed,
        "they change the model after it is made, and a scripted one can no longer be changed; --torchcompile can",
    ),
    # the data
    Refusal(
        "--dataset-type {0.dataset_type}", THE_RECIPE, lambda f: f.dataset_type.endswith("-audio") and f.active,
        "it is for pairs of an image and a text",
    ),
    Refusal(
        "--dataset-type {0.dataset_type}", "named sources or --sampling",
        lambda f: f.dataset_type not in ("auto", "webdataset") and f.mixture, "sources are webdataset shards",
    ),
)  # fmt: skip
LATER = (
    Later(
        "--pretrained-audio --audio-zeroshot-dataset", THE_RECIPE, lambda f: f.active,
        "it is for models of sounds; leave it out",
    ),
    Later(
        "--fsdp --use-naflex --force-naflex-vision", THE_STEP, lambda f: f.own_step,
        "it takes a model as it is, in DistributedDataParallel; leave it out",
    ),
    Later(
        "--image-key --text-key --json-text-key --json-text-key-probs --max-image-pixels --length-bucketing "
        "--naflex-max-text-tokens", "named sources", lambda f: f.mixture,
        "they read shards in their own way (docs/data.md); leave it out, or give --train-data without names",
    ),
    Later(
        "--opt-kwargs --opt-fallback-list --text-layer-decay --image-layer-decay --audio-layer-decay --wd-exclude",
        "--no-embedding-decay", lambda f: f.no_embedding_decay, "each makes its own groups of parameters; give one of them",
    ),
)  # fmt: skip
NEEDS = (
    Need("--opt {0.opt}", lambda f: "timm" in f.opt and f.lr is None, "--lr: open_clip has a default for adamw alone"),
    Need("--opt {0.opt}", lambda f: "timm" in f.opt and f.eps is None, "--eps: open_clip has a default for adamw alone"),
    Need(
        "--distill-model", lambda f: f.distill_model is not None and f.distill_pretrained is None,
        "--distill-pretrained, the teacher's weights: open_clip distils nothing without",
    ),
    Need(
        "--distill-pretrained", lambda f: f.distill_pretrained is not None and f.distill_model is None,
        "--distill-model, the teacher's name: open_clip distils nothing without",
    ),
    Need(
        "--report-to {0.report_to}", lambda f: "trackio" in line_here().reports and {"trackio", "wandb"} <= _reports(f),
        "one of wandb and trackio: open_clip reports to one of them",
    ),
    Need(
        "--report-to {0.report_to}", lambda f: bool(f.report_to) and not _reports(f),
        f"one of the names {', '.join(line_here().reports)}",
    ),
)  # fmt: skip


def _reports(f: AllFlags) -> set[str]:
    return {name for name in line_here().reports if name in f.report_to}


def check(given: AllFlags, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse flags that contradict each other and values out of range.

    Args:
        parser: open_clip's, which made `args`.

    Raises:
        UserError: the first of them, both flags named.
    """
    for refusal in REFUSALS:
        if refusal.when(given):
            raise UserError(f"{refusal.flag.format(given)} does not work with {refusal.recipe}: {refusal.advice}")
    for later in LATER:
        for option in later.flags.split() if later.when(given) else ():
            action = parser._option_string_actions.get(option)  # None: this release has no such flag
            if action is not None and getattr(args, action.dest) != action.default:
                raise UserError(f"{option} does not work with {later.recipe}: {later.advice}")
    if given.own_step and args.torchcompile and getattr(args, "torchcompile_strategy", "model") != "model":
        raise UserError(
            f"--torchcompile-strategy {args.torchcompile_strategy} compiles open_clip's own step, which the recipe's takes the "
            "place of; give --torchcompile-strategy model"
        )
    for sentence in conflicts(given):
        raise UserError(sentence)
    for need in NEEDS:
        if need.when(given):
            raise UserError(f"{need.flag.format(given)} needs {need.needs}")
    for sentence in out_of_range(given):
        raise UserError(sentence)
