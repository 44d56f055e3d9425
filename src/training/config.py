"""The recipe's flags as one validated dataclass, and whether a run takes our optimizer step."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

ABLATIONS = ("detached-gather", "no-replay")


@dataclass(frozen=True)
class RecipeConfig:
    """Our flags, checked. Defaults mean: open_clip as it is.

    Attributes:
        sampling: how sources make batches, None = the stock data pipeline.
        debiased_draw: exact proportions an epoch, or a draw a step ("iid").
        source_order: `name::name`, the order of sequential sampling.
        captions: what becomes of several captions of an image.
        on_bad_sample: replace bad samples by neighbours and count them, or fail.
        max_bad_share: of a source's samples that may be replaced.
        loader_timeout: seconds without a batch after which the run ends; 0 waits forever.
        dga_steps: K micro-batches make one optimizer step (section 4.1).
        dga_retain: graphs kept from the first pass, a number or "auto".
        dga_check: when replayed features are compared with the first pass: first, always, never.
        loss_chunk: rows of the logit matrix alive at once.
        ablate: of ABLATIONS, what to do wrong on purpose (Tables 4 and 6).
        coin_flip_mixup, mixup_alpha: mix images or texts of an effective batch, lambda ~ Beta(alpha, alpha) (section 3.2).
        text_augment: share of words masked, replaced or deleted (section 2.2).
        auto_augment: policy applied to images after the crop (A.9).
        token_drop: share of ViT patch tokens dropped in training (section 4.2).
        init_from, init_image, init_text: checkpoint of a dual encoder; raw timm and HF weights (section 4.3).
        freeze: towers that are not trained: image, text.
        cache_frozen: folder that keeps a frozen tower's features of each sample.
        temperature_constant: keep the temperature at its initial value.
        no_embedding_decay: exempt class tokens and embeddings from weight decay.
        warmup_share: share of all steps that warm up.
        lr_min: floor of the cosine schedule.
        save_every_steps: optimizer steps between two step checkpoints.
        keep_checkpoints: step checkpoints kept.
        retrieval_data: `name=folder::name=folder`, evaluated while training.
        retrieval_frequency: epochs between two retrieval evaluations (the last epoch always has one).
        text_model: folder or hub name of the HF text tower, in place of the model config's own.
    """

    sampling: str | None = None
    debiased_draw: str = "exact"
    source_order: str | None = None
    captions: str | None = None
    on_bad_sample: str = "replace"
    max_bad_share: float = 0.10
    loader_timeout: float = 600.0
    dga_steps: int = 1
    dga_retain: int | str = 1
    dga_check: str = "first"
    loss_chunk: int | None = None
    ablate: tuple[str, ...] = ()
    coin_flip_mixup: bool = False
    mixup_alpha: float = 0.1
    text_augment: float | None = None
    auto_augment: str | None = None
    token_drop: float | None = None
    init_from: str | None = None
    init_image: str | None = None
    init_text: str | None = None
    freeze: tuple[str, ...] = ()
    cache_frozen: str | None = None
    temperature_constant: bool = False
    no_embedding_decay: bool = False
    warmup_share: float | None = None
    lr_min: float | None = None
    save_every_steps: int | None = None
    keep_checkpoints: int = 2
    retrieval_data: str | None = None
    retrieval_frequency: int = 1
    text_model: str | None = None

    @property
    def active(self) -> bool:
        """Whether any of our flags was given; if not, the run is open_clip's own."""
        return self != RecipeConfig()

    @property
    def step_flags(self) -> bool:
        """Whether a flag asks for our optimizer step (DGA and ContrastiveLoss) by itself."""
        stock = RecipeConfig()
        names = ("dga_steps", "dga_retain", "dga_check", "loss_chunk", "ablate", "coin_flip_mixup")
        return any(getattr(self, name) != getattr(stock, name) for name in names)


def uses_own_step(config: RecipeConfig, args: argparse.Namespace) -> bool:
    """Whether the run takes our optimizer step: with a step flag, or with our sampling where the model allows it.

    A mixture alone also takes it, because over several ranks open_clip's default gather gives 1/W of the gradient; CoCa and
    distillation, whose losses the step does not know, then keep open_clip's.
    """
    return config.step_flags or (config.sampling is not None and not _foreign_loss(args))


def _foreign_loss(args: argparse.Namespace) -> bool:
    return "coca" in args.model.lower() or args.distill_model is not None
