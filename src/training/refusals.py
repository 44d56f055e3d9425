"""What cannot go together: open_clip's flags with ours and ours with each other, as one table; and values out of range."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from open_clip_zerovl.errors import UserError
from training.config import RecipeConfig, uses_own_step


# open_clip flags that cannot work with one of ours: (its name, when it is on, our flag, when that is on, why and what to do)
def _refusals(config: RecipeConfig, args: argparse.Namespace) -> Iterator[tuple]:
    mixture = config.sampling is not None
    own_step = uses_own_step(config, args)
    step = "the recipe's step (--sampling, --dga-steps, --loss-chunk ...)"
    named = "named sources or --sampling"
    yield args.horovod, "--horovod", config.active, "the recipe's flags", "use torchrun"
    yield (
        args.accum_freq > 1,
        f"--accum-freq {args.accum_freq}",
        own_step or mixture,
        step,
        "it multiplies the temperature's gradient by its number and redraws dropout; give --dga-steps instead",
    )
    yield (
        args.local_loss and not args.gather_with_grad,
        "--local-loss without --gather-with-grad",
        own_step and "detached-gather" not in config.ablate,
        step,
        "it loses the other ranks' gradients (paper section 4.1); leave both out, the recipe's loss is local and exact, or ask "
        "for the ablation with --ablate detached-gather",
    )
    yield (
        args.ddp_static_graph,
        "--ddp-static-graph",
        own_step,
        step,
        "a static graph counts on one backward pass a step, and the recipe's step takes one a micro-batch",
    )
    yield (
        "coca" in args.model.lower(),
        f"--model {args.model}",
        config.step_flags,
        "--dga-steps, --dga-retain, --dga-check, --loss-chunk or --ablate",
        "CoCa's generative loss cannot be decoupled from its graph",
    )
    yield (
        args.distill_model is not None,
        "--distill-model",
        config.step_flags,
        "--dga-steps, --dga-retain, --dga-check, --loss-chunk or --ablate",
        "the distillation loss needs the teacher's features of the whole effective batch",
    )
    yield (
        args.siglip,
        "--siglip",
        bool(config.loss_chunk or config.ablate or config.coin_flip_mixup),
        "--loss-chunk, --ablate or --coin-flip-mixup",
        "they belong to the softmax loss",
    )
    yield (
        not config.coin_flip_mixup,
        "no --coin-flip-mixup",
        config.mixup_alpha != RecipeConfig.mixup_alpha,
        "--mixup-alpha",
        "it is mixup's parameter; give both",
    )
    yield (
        not mixture,
        "open_clip's own data pipeline",
        config.text_augment is not None,
        "--text-augment",
        "name the sources: --train-data NAME=SHARDS",
    )
    yield (
        args.force_patch_dropout is not None,
        f"--force-patch-dropout {args.force_patch_dropout}",
        config.token_drop is not None,
        "--token-drop",
        "they are the same; give one",
    )
    yield (
        "image" in config.freeze,
        "--freeze image",
        config.token_drop is not None,
        "--token-drop",
        "a frozen tower drops nothing",
    )
    for tower, locked in (("image", args.lock_image), ("text", args.lock_text)):
        yield locked, f"--lock-{tower}", tower in config.freeze, f"--freeze {tower}", "give one of them"
    yield (
        "image" in config.freeze,
        "--freeze image",
        "text" in config.freeze,
        "--freeze text",
        "nothing but the temperature would be trained; freeze one",
    )
    yield (
        len(config.freeze) != 1 or not mixture or not own_step,
        "anything but one frozen tower on named sources",
        config.cache_frozen is not None,
        "--cache-frozen",
        "give --freeze image or --freeze text and name the sources",
    )
    yield (
        config.freeze == ("text",) and config.text_augment is not None,
        "--text-augment",
        config.cache_frozen is not None,
        "--cache-frozen",
        "augmented captions have other features each epoch",
    )
    yield (
        config.coin_flip_mixup and config.freeze == ("image",),
        "--coin-flip-mixup",
        config.cache_frozen is not None,
        "--cache-frozen of the image tower",
        "mixed images have other features each step",
    )
    yield (
        "timm" in args.opt,
        f"--opt {args.opt}",
        config.no_embedding_decay,
        "--no-embedding-decay",
        "timm's optimizers group parameters by their own rule",
    )
    yield (
        args.lr_scheduler != "cosine",
        f"--lr-scheduler {args.lr_scheduler}",
        config.warmup_share is not None,
        "--warmup-share",
        "give --warmup in steps",
    )
    yield (
        not mixture or not own_step,
        "open_clip's own data or step",
        config.save_every_steps is not None,
        "--save-every-steps",
        "exact resume needs the mixture; name the sources: --train-data NAME=SHARDS",
    )
    yield (
        args.save_most_recent,
        "--save-most-recent",
        config.save_every_steps is not None,
        "--save-every-steps",
        "open_clip would resume from epoch_latest.pt and not from the newer step checkpoint; leave it out",
    )
    for flag in ("captions", "on_bad_sample", "max_bad_share", "loader_timeout"):
        yield (
            not mixture,
            "open_clip's own data pipeline",
            getattr(config, flag) != getattr(RecipeConfig, flag),
            f"--{flag.replace('_', '-')}",
            "name the sources: --train-data NAME=SHARDS",
        )
    yield args.trace, "--trace", config.active, "the recipe's flags", "a traced model cannot be trained"
    yield (
        config.sampling != "sequential",
        f"--sampling {config.sampling}",
        config.source_order is not None,
        "--source-order",
        "the order is that of --sampling sequential",
    )
    yield (
        config.sampling != "debiased",
        f"--sampling {config.sampling}",
        config.debiased_draw != "exact",
        "--debiased-draw iid",
        "it is a way of --debiased-sampling",
    )
    yield (
        args.dataset_type not in ("auto", "webdataset"),
        f"--dataset-type {args.dataset_type}",
        mixture,
        named,
        "sources are webdataset shards",
    )
    yield (
        not args.train_data,
        "no --train-data",
        mixture,
        "--sampling",
        "name the sources: --train-data NAME=SHARDS::...",
    )
    yield (
        args.lr_scheduler != "cosine",
        f"--lr-scheduler {args.lr_scheduler}",
        config.lr_min is not None,
        "--lr-min",
        "it is the floor of the cosine schedule",
    )


def check(config: RecipeConfig, args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other and values out of range.

    Raises:
        UserError: the first of them, both flags named.
    """
    for stock_on, stock, ours_on, ours, advice in _refusals(config, args):
        if stock_on and ours_on:
            raise UserError(f"{stock} does not work with {ours}: {advice}")
    for flag, value, good, wanted in (
        (
            "--lr-min",
            config.lr_min,
            config.lr_min is None or 0 <= config.lr_min <= (args.lr or 0),
            f"0 to --lr {args.lr}",
        ),
        ("--max-bad-share", config.max_bad_share, 0 <= config.max_bad_share <= 1, "a share from 0 to 1"),
        ("--loader-timeout", config.loader_timeout, config.loader_timeout >= 0, "seconds, or 0"),
        ("--mixup-alpha", config.mixup_alpha, config.mixup_alpha > 0, "a positive number"),
        *(
            (flag, value, value is None or 0 < value < 1, "a share between 0 and 1")
            for flag, value in (
                ("--text-augment", config.text_augment),
                ("--token-drop", config.token_drop),
                ("--warmup-share", config.warmup_share),
            )
        ),
        ("--retrieval-frequency", config.retrieval_frequency, config.retrieval_frequency >= 1, "at least 1 epoch"),
        ("--dga-steps", config.dga_steps, config.dga_steps >= 1, "at least 1"),
        (
            "--dga-retain",
            config.dga_retain,
            isinstance(config.dga_retain, str) or 0 <= config.dga_retain <= max(1, config.dga_steps),
            f"auto, or 0 to --dga-steps {config.dga_steps}",
        ),
        (
            "--save-every-steps",
            config.save_every_steps,
            config.save_every_steps is None or config.save_every_steps >= 1,
            "at least 1 step",
        ),
        ("--keep-checkpoints", config.keep_checkpoints, config.keep_checkpoints >= 1, "at least 1"),
        ("--loss-chunk", config.loss_chunk, config.loss_chunk is None or config.loss_chunk >= 1, "at least 1 row"),
        ("--batch-size", args.batch_size, args.batch_size >= 1, "at least 1"),
        ("--accum-freq", args.accum_freq, args.accum_freq >= 1, "at least 1"),
        ("--workers", args.workers, args.workers >= 0, "0 or more"),
        ("--epochs", args.epochs, args.epochs >= 1, "at least 1"),
    ):
        if not good:
            raise UserError(f"{flag} {value} is out of range; give {wanted}")
