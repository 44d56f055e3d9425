"""Flags of open_clip that do not work with the recipe, by theme.

What a single flag of ours contradicts is declared with that flag (`recipe.flags`); so are ranges.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import out_of_range
from open_clip_zerovl.core.releases import line_here
from open_clip_zerovl.recipe.flags import AllFlags, contradicted


@dataclass(frozen=True)
class Refusal:
    """A flag of open_clip that does not work with a part of the recipe.

    Attributes:
        flag: open_clip's flag in the sentence; `{0.name}` is replaced by a flag's value.
        given: whether it was given.
        recipe: the part of the recipe in the sentence.
        wanted: whether that part was asked for.
        advice: why, and what to do.
    """

    flag: str
    given: Callable[[AllFlags], bool]
    recipe: str
    wanted: Callable[[AllFlags], bool]
    advice: str


@dataclass(frozen=True)
class Need:
    """A flag of open_clip that does nothing, or ends in a traceback, without another flag or package.

    Attributes:
        flag: the flag in the sentence; `{0.name}` is replaced by a flag's value.
        when: whether it was given without what it needs.
        needs: what it needs, and what to do.
    """

    flag: str
    when: Callable[[AllFlags], bool]
    needs: str


@dataclass(frozen=True)
class Later:
    """Flags that open_clip 4 has and 3.3 has not, and that a part of the recipe would pass over.

    Attributes:
        flags: as they are written; one was given where its value is not its default.
        recipe, wanted, advice: as of `Refusal`.
    """

    flags: tuple[str, ...]
    recipe: str
    wanted: Callable[[AllFlags], bool]
    advice: str


THE_RECIPE = "the recipe's flags"
THE_STEP = "the recipe's step (--sampling, --dga-steps, --loss-chunk ...)"
STEP_FLAGS = (
    "--dga-steps, --dga-retain, --dga-check, --sort-text, --loss-chunk, --cross-source-weight, --positives, --teacher, "
    "--captions FIELD+FIELD, --temperature-parameter or --ablate"
)

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
        lambda f: any(kind in f.model.lower() for kind in ("genlip", "genlap", "clap")),
        THE_RECIPE,
        lambda f: f.active,
        "it is for models with an image tower and a text tower",
    ),
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
        "--ablate or --coin-flip-mixup",
        lambda f: bool(f.ablate or f.coin_flip_mixup),
        "they belong to the softmax loss",
    ),
    Refusal(
        "--siglip",
        lambda f: f.siglip,
        "--teacher with --distill-weight 1",
        lambda f: f.teacher is not None and f.distill_weight == 1,
        "the loss then is the distillation alone, of softmaxes; give a smaller --distill-weight, or leave --siglip out",
    ),
)
METHODS = (
    Refusal(
        "--torchscript",
        lambda f: f.torchscript,
        "--torchcompile",
        lambda f: f.torchcompile,
        "torch.compile takes no scripted model; give one of them",
    ),
    Refusal(
        "--torchscript",
        lambda f: f.torchscript,
        "--lock-*, --freeze, --cache-frozen, --coin-flip-mixup, --temperature-constant, --token-drop or --init-*",
        lambda f: bool(
            f.lock_image
            or f.lock_text
            or f.freeze
            or f.cache_frozen
            or f.coin_flip_mixup
            or f.temperature_constant
            or f.token_drop
            or f.init_from
            or f.init_image
            or f.init_text
        ),
        "they change the model after it is made, and a scripted one can no longer be changed; --torchcompile can",
    ),
)
DATA = (
    Refusal(
        "--dataset-type {0.dataset_type}",
        lambda f: f.dataset_type.endswith("-audio"),
        THE_RECIPE,
        lambda f: f.active,
        "it is for pairs of an image and a text",
    ),
    Refusal(
        "--dataset-type {0.dataset_type}",
        lambda f: f.dataset_type not in ("auto", "webdataset"),
        "named sources or --sampling",
        lambda f: f.mixture,
        "sources are webdataset shards",
    ),
)
LATER = (
    Later(
        ("--pretrained-audio", "--audio-zeroshot-dataset"),
        THE_RECIPE,
        lambda f: f.active,
        "it is for models of sounds; leave it out",
    ),
    Later(
        ("--fsdp", "--use-naflex", "--force-naflex-vision"),
        THE_STEP,
        lambda f: f.own_step,
        "it takes a model as it is, in DistributedDataParallel; leave it out",
    ),
    Later(
        (
            "--image-key", "--text-key", "--json-text-key", "--json-text-key-probs", "--max-image-pixels",
            "--length-bucketing", "--naflex-max-text-tokens",
        ),
        "named sources",
        lambda f: f.mixture,
        "they read shards in their own way (docs/data.md); leave it out, or give --train-data without names",
    ),
    Later(
        (
            "--opt-kwargs", "--opt-fallback-list", "--text-layer-decay", "--image-layer-decay", "--audio-layer-decay",
            "--wd-exclude",
        ),
        "--no-embedding-decay",
        lambda f: f.no_embedding_decay,
        "each makes its own groups of parameters; give one of them",
    ),
)  # fmt: skip
THEMES = (PROGRAM, STEP, LOSS, METHODS, DATA)


def _timm(f: AllFlags) -> bool:
    return "timm" in f.opt


def _lacks(package: str) -> bool:
    return importlib.util.find_spec(package) is None


NEEDS = (
    Need("--opt {0.opt}", lambda f: _timm(f) and f.lr is None, "--lr: open_clip has a default for adamw alone"),
    Need("--opt {0.opt}", lambda f: _timm(f) and f.eps is None, "--eps: open_clip has a default for adamw alone"),
    Need(
        "--opt {0.opt}",
        lambda f: _timm(f) and (f.beta1 is None) != (f.beta2 is None),
        "both --beta1 and --beta2, or neither",
    ),
    Need(
        "--lr-scheduler const-cooldown",
        lambda f: f.lr_scheduler == "const-cooldown" and f.epochs_cooldown is None,
        "--epochs-cooldown: how many of the last epochs the rate falls in",
    ),
    Need(
        "--distill-model",
        lambda f: f.distill_model is not None and f.distill_pretrained is None,
        "--distill-pretrained, the teacher's weights: open_clip distils nothing without",
    ),
    Need(
        "--distill-pretrained",
        lambda f: f.distill_pretrained is not None and f.distill_model is None,
        "--distill-model, the teacher's name: open_clip distils nothing without",
    ),
    Need("--horovod", lambda f: f.horovod and _lacks("horovod"), "the package horovod; use torchrun"),
    Need(
        "--report-to {0.report_to}",
        lambda f: "trackio" in line_here().reports and "trackio" in f.report_to and "wandb" in f.report_to,
        "one of wandb and trackio: open_clip reports to one of them",
    ),
    Need(
        "--report-to wandb",
        lambda f: ("wandb" in f.report_to or "all" in f.report_to) and _lacks("wandb"),
        "the package wandb: pip install wandb",
    ),
    Need(
        "--report-to tensorboard",
        lambda f: ("tensorboard" in f.report_to or "all" in f.report_to) and _lacks("tensorboard"),
        "the package tensorboard: pip install tensorboard",
    ),
    Need(
        "--report-to {0.report_to}",
        lambda f: bool(f.report_to) and not any(name in f.report_to for name in line_here().reports),
        f"one of the names {', '.join(line_here().reports)}",
    ),
    Need(
        "--report-to trackio",
        lambda f: "trackio" in f.report_to and "trackio" in line_here().reports and _lacks("trackio"),
        "the package trackio: pip install trackio",
    ),
    Need(
        "--use-bnb-linear",
        lambda f: f.use_bnb_linear is not None and _lacks("bitsandbytes"),
        "the package bitsandbytes: pip install bitsandbytes triton",
    ),
    Need(
        "--imagenet-v2 {0.imagenet_v2}",
        lambda f: f.imagenet_v2 is not None and _lacks("imagenetv2_pytorch"),
        "the package imagenetv2_pytorch: pip install git+https://github.com/modestyachts/ImageNetV2_pytorch",
    ),
)


def check(given: AllFlags, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse flags that contradict each other and values out of range.

    Args:
        parser: open_clip's, which made `args`.

    Raises:
        UserError: the first of them, both flags named.
    """
    for theme in THEMES:
        for refusal in theme:
            if refusal.given(given) and refusal.wanted(given):
                flag = refusal.flag.format(given)
                raise UserError(f"{flag} does not work with {refusal.recipe}: {refusal.advice}")
    for later in LATER:
        for option in later.flags if later.wanted(given) else ():
            action = parser._option_string_actions.get(option)  # None: this release has no such flag
            if action is not None and getattr(args, action.dest) != action.default:
                raise UserError(f"{option} does not work with {later.recipe}: {later.advice}")
    if given.own_step and args.torchcompile and getattr(args, "torchcompile_strategy", "model") != "model":
        raise UserError(
            f"--torchcompile-strategy {args.torchcompile_strategy} compiles open_clip's own step, which the recipe's takes the "
            "place of; give --torchcompile-strategy model"
        )
    for sentence in contradicted(given):
        raise UserError(sentence)
    for need in NEEDS:
        if need.when(given):
            raise UserError(f"{need.flag.format(given)} needs {need.needs}")
    for sentence in out_of_range(given):
        raise UserError(sentence)
