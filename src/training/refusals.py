"""Flags of open_clip that do not work with the recipe, by theme.

The requirements and contradictions of a single flag of ours are declared with that flag (`recipe.flags`); so are
ranges. Mistakes that open_clip's main reports in a sentence of its own are left to it (`run.TrainingRun`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import Contradiction, Requirement, Values, conflicts, out_of_range
from open_clip_zerovl.core.releases import line_here
from open_clip_zerovl.recipe.flags import AllFlags


class Later(NamedTuple):
    """Flags of open_clip 4 alone that a part of the recipe would ignore.

    Attributes:
        flags: in their written form; a flag counts as given if its value is not its default.
        recipe: the part of the recipe in the sentence.
        when: whether that part was asked for.
        advice: the reason and the remedy.
    """

    flags: str
    recipe: str
    when: Callable[[AllFlags], bool]
    advice: str


THE_RECIPE = "the recipe's flags"
THE_STEP = "the recipe's step (--sampling, --dga-steps, --loss-chunk ...)"
OF_OUR_LOSS = "--siglip, --sort-text, --loss-chunk, --positives, --coin-flip-mixup or --ablate detached-gather"
OTHER_MODELS = ("genlip", "genlap", "clap")


def _scripted_and_changed(f: AllFlags) -> bool:
    changed = (
        f.lock_image,
        f.lock_text,
        f.freeze,
        f.coin_flip_mixup,
        f.temperature_constant,
        f.lora,
    )
    return f.torchscript and any((*changed, f.token_drop, f.init_from, f.init_image, f.init_text))


def _needs_our_loss(f: AllFlags) -> bool:
    """Return whether a flag needs `ContrastiveLoss`, in a run with our step."""
    ours = f.changes("loss_chunk", "coin_flip_mixup", "sort_text") or f.positives in (
        "caption",
        "image",
        "both",
    )
    return f.own_step and (ours or "detached-gather" in f.ablate or f.siglip)


def _refusal(
    flag: str, recipe: str, when: Callable[[AllFlags], bool], advice: str
) -> Contradiction:
    return Contradiction(flag, when, advice, recipe)


REFUSALS = (
    # the program
    _refusal("--horovod", THE_RECIPE, lambda f: f.horovod and f.active, "use torchrun"),
    _refusal("--trace", THE_RECIPE, lambda f: f.trace and f.active, "a traced model cannot be trained"),
    # the step
    _refusal(
        "--accum-freq {accum_freq}", THE_STEP, lambda f: f.accum_freq > 1 and (f.own_step or f.mixture),
        "its gradients of the temperature and with dropout are wrong; give --dga-steps instead",
    ),
    _refusal(
        "--local-loss without --gather-with-grad", THE_STEP,
        lambda f: f.local_loss and not f.gather_with_grad and f.own_step and "detached-gather" not in f.ablate,
        "it loses the other ranks' gradients (paper section 4.1); leave both out, the recipe's loss is local and exact, or ask "
        "for the ablation with --ablate detached-gather",
    ),
    _refusal(
        "--ddp-static-graph", THE_STEP, lambda f: f.ddp_static_graph and f.own_step,
        "a static graph counts on one backward pass a step, and the recipe's step takes one a micro-batch",
    ),
    # the loss
    _refusal(
        "--model {model}", THE_RECIPE, lambda f: f.active and any(kind in f.model.lower() for kind in OTHER_MODELS),
        "it is for models with an image tower and a text tower",
    ),
    _refusal(
        "--model {model}", "--sort-text", lambda f: f.captions_images and f.sort_text,
        "it writes the caption of each picture, from that picture's tokens",
    ),
    _refusal(
        "--distill-model", "--model {model}", lambda f: f.distill_model is not None and f.captions_images and f.own_step,
        "open_clip does not distil captioners",
    ),
    _refusal(
        "--distill-model", OF_OUR_LOSS, lambda f: f.distill_model is not None and _needs_our_loss(f),
        "the loss then is open_clip's DistillClipLoss; leave one of them out",
    ),
    _refusal(
        "--siglip", "--ablate or --coin-flip-mixup", lambda f: f.siglip and bool(f.coin_flip_mixup or f.ablate),
        "they belong to the softmax loss",
    ),
    # the model
    _refusal(
        "--torchscript", "--torchcompile", lambda f: f.torchscript and f.torchcompile,
        "torch.compile takes no scripted model; give one of them",
    ),
    _refusal(
        "--torchscript",
        "--lock-*, --freeze, --coin-flip-mixup, --temperature-constant, --lora, --token-drop or --init-*",
        _scripted_and_changed,
        "they change the model after it is made, and a scripted one can no longer be changed; --torchcompile can",
    ),
    # the data
    _refusal(
        "--dataset-type {dataset_type}", THE_RECIPE, lambda f: f.dataset_type.endswith("-audio") and f.active,
        "it is for pairs of an image and a text",
    ),
    _refusal(
        "--dataset-type {dataset_type}", "named sources or --sampling",
        lambda f: f.dataset_type not in ("auto", "webdataset") and f.mixture, "sources are webdataset shards",
    ),
)  # fmt: skip
LATER = (
    Later(
        "--pretrained-audio --audio-zeroshot-dataset", THE_RECIPE, lambda f: f.active,
        "it is for models of sounds; leave it out",
    ),
    Later(
        "--fsdp --use-naflex --force-naflex-vision --force-naflex-patch-interp", THE_STEP, lambda f: f.own_step,
        "it takes a model as it is, in DistributedDataParallel; leave it out",
    ),
    Later("--fsdp", "--lora", lambda f: f.lora is not None, "it shards a model of one precision; leave it out"),
    Later(
        "--image-key --text-key --json-text-key --json-text-key-probs --max-image-pixels --length-bucketing "
        "--naflex-max-text-tokens", "named sources", lambda f: f.mixture,
        "they read shards in their own way (docs/data.md); leave it out, or give --train-data without names",
    ),
    Later(
        "--opt-kwargs --opt-fallback-list --text-layer-decay --image-layer-decay --audio-layer-decay --wd-exclude",
        "--no-embedding-decay, --lr-image, --lr-text, --lr-head or --layer-decay",
        lambda f: f.no_embedding_decay or f.own_rates, "each makes its own groups of parameters; give one of them",
    ),
)  # fmt: skip
NEEDS = (
    Requirement(
        "--lr and --eps: open_clip has defaults for adamw only",
        lambda f: "timm" not in f.opt or None not in (f.lr, f.eps), "--opt {opt}",
    ),
    Requirement(
        "--distill-pretrained, the teacher's weights: without it open_clip does not distil",
        lambda f: f.distill_model is None or f.distill_pretrained is not None, "--distill-model",
    ),
    Requirement(
        "--distill-model, the teacher's name: without it open_clip does not distil",
        lambda f: f.distill_pretrained is None or f.distill_model is not None, "--distill-pretrained",
    ),
    Requirement(
        "one of wandb and trackio: open_clip reports to one of them",
        lambda f: "trackio" not in line_here().reports or not {"trackio", "wandb"} <= _reports(f), "--report-to {report_to}",
    ),
    Requirement(
        f"one of the names {', '.join(line_here().reports)}", lambda f: not f.report_to or bool(_reports(f)),
        "--report-to {report_to}",
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
    words = Values(given)
    for refusal in REFUSALS:
        if refusal.when(given):
            raise UserError(
                f"{refusal.other.format_map(words)} does not work with {refusal.flag}: {refusal.advice}"
            )
    for later in LATER:
        for option in later.flags.split() if later.when(given) else ():
            # None: this release has no such flag
            action = parser._option_string_actions.get(option)
            if action is not None and getattr(args, action.dest) != action.default:
                raise UserError(f"{option} does not work with {later.recipe}: {later.advice}")
    strategy = getattr(args, "torchcompile_strategy", "model")
    if given.own_step and args.torchcompile and strategy not in ("model", "blocks"):
        raise UserError(
            f"--torchcompile-strategy {strategy} compiles open_clip's own step, which the recipe's replaces; give "
            "--torchcompile-strategy model or blocks"
        )
    for sentence in conflicts(given):
        raise UserError(sentence)
    for need in NEEDS:
        if not need.met(given):
            raise UserError(f"{str(need.flag).format_map(words)} needs {need.other}")
    for sentence in out_of_range(given):
        raise UserError(sentence)
