"""The harness of the benchmarks: models and micro-batches, ways to take a step, and measurements of a step.

Shapes: `B` micro-batch per rank, `K` micro-batches, `W` ranks, `N = B*K*W` effective batch, `R` graphs retained. A way computes
the gradient of K micro-batches into `.grad`, without an optimizer step.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
import torch.distributed as dist
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.factory import get_model_config
from open_clip.loss import ClipLoss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import LiveBytes
from open_clip_zerovl.data.images import normalize
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.models.build import with_text_model
from open_clip_zerovl.recipe.gpu import without_gpu_syncs
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.optimizer import parameter_groups
from open_clip_zerovl.recipe.step import RecipeStep, sort_texts, text_padding

ALIASES = {"ViT-B-16+BERT-base": "zerovl-ViT-B-16-BERT-base"}
BERT_SIZES = {
    "small": {
        "vocab_size": 1000,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "tiny": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "base": {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
}
VISION_SIZES = {
    "small": {"layers": 4, "width": 192, "head_width": 64, "patch_size": 16, "image_size": 96},
    "tiny": {"layers": 1, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 32},
}
CONTEXT_LENGTH = 25
SORTED = "texts sorted"  # in the names of rows
# Tokens of a caption before it is cut to the context, mean and deviation: 10.3 +- 4.5 words as in CC3M (Changpinyo et al.,
# 2021), 1.15 word pieces a word, [CLS] and [SEP]. Then 45 % of 25 tokens are padding.
CAPTION_TOKENS = (13.8, 5.2)
PAD, FIRST, LAST = 0, 2, 3  # [PAD], [CLS] and [SEP] in the vocabulary of `write_bert`

MicroBatch = tuple[
    Tensor, Tensor
]  # uint8 images (B, 3, height, width), texts (B, context), padded at the end


# ---------------------------------------------------------------------------------------------------------------------
# Models and inputs
# ---------------------------------------------------------------------------------------------------------------------


def write_bert(folder: Path, size: str, dropout: float, words: Sequence[str] | None = None) -> Path:
    """Write a folder for a BERT with random weights: a BertConfig of `size`, a vocabulary of `words` or of made-up ones."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = BERT_SIZES[size]
    BertConfig(
        **sizes,
        intermediate_size=4 * sizes["hidden_size"],
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    ).save_pretrained(folder)
    known = words or [f"w{i}" for i in range(sizes["vocab_size"] - 5)]
    vocabulary = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *known])
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    return folder


def register(model: str, dropout: float, scratch: Path) -> str:
    """Return the name under which open_clip builds a model with random weights and without a hub.

    `small` and `tiny` are an open_clip ViT with a BERT of that size; the HF text tower of another model is a random BERT-base.
    """
    if model in VISION_SIZES:
        text_folder = write_bert(scratch / "bert", model, dropout)
        config = {
            "embed_dim": BERT_SIZES[model]["hidden_size"],
            "init_logit_scale": 3.912023,  # temperature 0.02
            "vision_cfg": VISION_SIZES[model],
            "text_cfg": {
                "hf_model_name": str(text_folder),
                "hf_tokenizer_name": str(text_folder),
                "hf_pooler_type": "cls_last_hidden_state_pooler",
                "hf_proj_type": "linear",
                "context_length": CONTEXT_LENGTH,
            },
        }
        name = f"bench-{model}"
        (scratch / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
        open_clip.add_model_config(scratch / f"{name}.json")
        return with_text_model(name, text_folder)
    name = ALIASES.get(model, model)
    known = get_model_config(name)
    if known is not None and known["text_cfg"].get("hf_model_name"):
        return with_text_model(name, write_bert(scratch / "bert", "base", dropout))
    return name


def build(name: str, token_drop: float, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build the registered model for training, without waits, with random weights that depend on its name only."""
    torch.manual_seed(0)
    model = open_clip.create_model(
        name,
        pretrained_image=False,
        pretrained_text=False,
        force_patch_dropout=token_drop if token_drop > 0 else None,
        output_dict=True,
    )
    without_gpu_syncs(model)
    return model.to(device=device, dtype=dtype).train()


def make_batches(name: str, model: Any, sizes: Sequence[int], seed: int) -> list[MicroBatch]:
    """Make micro-batches as a loader gives them: uint8 images (channels last) and captions with realistic lengths.

    They are in host memory, pinned if the model is on a GPU.
    """
    config = get_model_config(name)
    size_px = model.visual.image_size
    height, width = (size_px, size_px) if isinstance(size_px, int) else size_px
    context = config["text_cfg"].get("context_length", 77)
    transformer = getattr(getattr(model, "text", None), "transformer", None)
    vocabulary = (
        getattr(getattr(transformer, "config", None), "vocab_size", None) or model.vocab_size
    )
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for number, size in enumerate(sizes):
        images = torch.randint(
            0, 256, (size, 3, height, width), dtype=torch.uint8, generator=generator
        )
        images = images.contiguous(memory_format=torch.channels_last)
        texts = torch.randint(LAST + 1, vocabulary, (size, context), generator=generator)
        mean, deviation = CAPTION_TOKENS
        rng = np.random.default_rng(seed + 1000 * number)
        drawn = rng.gamma((mean / deviation) ** 2, deviation**2 / mean, size)
        ends = torch.from_numpy(np.clip(np.rint(drawn), 3, context).astype(np.int64))[:, None]
        place = torch.arange(context)
        texts = texts.where(place < ends - 1, torch.tensor(LAST)).where(
            place < ends, torch.tensor(PAD)
        )
        texts[:, 0] = FIRST
        if next(model.parameters()).is_cuda:
            images, texts = images.pin_memory(), texts.pin_memory()
        batches.append((images, texts))
    return batches


# ---------------------------------------------------------------------------------------------------------------------
# Ways to take a step
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Setup:
    """A model on a device, perhaps over ranks, as every way uses it."""

    inner: nn.Module
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        self.model: Any = self.inner
        if self.world_size > 1:
            ids = [self.device] if self.device.type == "cuda" else None
            self.model = DistributedDataParallel(self.inner, device_ids=ids)
        # Over ranks these flags give open_clip's exact gradient.
        over = self.world_size > 1
        self.clip_loss = ClipLoss(
            local_loss=over,
            gather_with_grad=over,
            cache_labels=True,
            rank=self.rank,
            world_size=self.world_size,
        )

    def prepare(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise a micro-batch in the model's precision."""
        dtype = next(self.inner.parameters()).dtype
        return normalize(images, OPENAI_DATASET_MEAN, OPENAI_DATASET_STD, dtype), texts

    def on_device(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Copy a micro-batch to the device and prepare it."""
        images, texts = (part.to(self.device, non_blocking=True) for part in micro_batch)
        return self.prepare(images, texts)

    def forward(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        return self.model(*self.on_device(micro_batch))

    def zero_grad(self) -> None:
        """Remove gradients, and write to the parameters, as retain="auto" waits for, out of a step's time."""
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_add_(list(self.model.parameters()), 0)


Way = Callable[..., Any]  # of micro-batches


def plain(setup: Setup, micro_batches: Sequence[MicroBatch]) -> None:
    """Take K steps of plain training, each with its own small contrastive batch: the baseline of all ratios."""
    for micro_batch in micro_batches:
        setup.zero_grad()
        one_graph(setup, [micro_batch])


def forwards_only(setup: Setup, micro_batches: Sequence[MicroBatch]) -> None:
    """Forward without graph, which is the additional cost of a replayed micro-batch."""
    for micro_batch in micro_batches:
        with torch.no_grad(), setup.autocast():
            setup.forward(micro_batch)


def one_graph(setup: Setup, micro_batches: Sequence[MicroBatch]) -> None:
    """Take the whole batch at once: one forward pass of all samples, one loss, one backward pass."""
    with setup.autocast():
        images, texts = (
            torch.cat(parts) if len(parts) > 1 else parts[0]
            for parts in zip(*micro_batches, strict=True)
        )
        setup.clip_loss(**setup.forward((images, texts))).backward()


def open_clip_accumulation(setup: Setup, micro_batches: Sequence[MicroBatch]) -> None:
    """Take the step of open_clip 3.3 with --accum-freq K: a pass for features, then K times forward, whole loss, backward."""
    with torch.no_grad(), setup.autocast():
        cached = [setup.forward(micro_batch) for micro_batch in micro_batches]
    for k, micro_batch in enumerate(micro_batches):
        with setup.autocast():
            fresh = setup.forward(micro_batch)
            parts = [*cached[:k], fresh, *cached[k + 1 :]]
            image_features, text_features = (
                torch.cat([part[side] for part in parts])
                for side in ("image_features", "text_features")
            )
            loss = setup.clip_loss(image_features, text_features, fresh["logit_scale"])
        loss.backward()


def decoupled(setup: Setup, retain: int | str, loss_chunk: int | None) -> Way:
    """Make the step of this package."""
    loss = ContrastiveLoss(chunk_size=loss_chunk, rank=setup.rank, world_size=setup.world_size)
    dga = DecoupledGradientAccumulation(setup.model, loss, autocast=setup.autocast, retain=retain)
    return partial(dga.backward, prepare=setup.prepare)


def sorted_texts(
    micro_batches: Sequence[MicroBatch], padding: int
) -> tuple[list[MicroBatch], Tensor]:
    """Return the micro-batches with texts in the order of `--sort-text`, and that order."""
    images, texts = zip(*micro_batches, strict=True)
    short, order = sort_texts(texts, padding)
    return list(zip(images, short, strict=True)), order


def decoupled_and_sorted(setup: Setup, retain: int | str, loss_chunk: int | None) -> Way:
    """Make the step with --sort-text, whose sorting is part of it."""
    way, padding = decoupled(setup, retain, loss_chunk), text_padding(setup.inner)

    def step(micro_batches: Sequence[MicroBatch]) -> Any:
        short, order = sorted_texts(micro_batches, padding)
        return way(short, text_order=order)

    return step


def two_pass(setup: Setup) -> Way:
    """Make the cached-gradient step of GradCache: all forwards without graph, ClipLoss by autograd, all forwards again."""
    dga = DecoupledGradientAccumulation(
        setup.model, setup.clip_loss, autocast=setup.autocast, retain=0
    )
    return partial(dga.backward, prepare=setup.prepare)


def recipe_step(model: nn.Module, loss_chunk: int | None, *, sort_text: bool = False) -> RecipeStep:
    """Make a whole step of the 14M recipe in bf16: images normalised on the device, mixup, one graph kept, AdamW."""
    mixup = CoinFlipMixup(0.1, seed=0)
    mixup.attach(model)
    return RecipeStep(
        model,
        ContrastiveLoss(chunk_size=loss_chunk),
        torch.optim.AdamW(parameter_groups(model, 1e-3), lr=1e-4),
        precision="amp_bf16",
        normalize=partial(normalize, mean=OPENAI_DATASET_MEAN, std=OPENAI_DATASET_STD),
        mixup=mixup,
        sort_text=sort_text,
    )


def ways(setup: Setup, steps: int, loss_chunk: int | None, with_one_graph: bool) -> dict[str, Way]:
    """List every way to take a step of K = `steps` micro-batches, by the name of its row."""
    found: dict[str, Way] = {
        "plain micro-batches": partial(plain, setup),
        "their forward passes alone": partial(forwards_only, setup),
    }
    if with_one_graph:
        found["one graph"] = partial(one_graph, setup)
    if steps == 1:
        return found | {"ours, retain 1": decoupled(setup, 1, loss_chunk)}
    found["open_clip --accum-freq"] = partial(open_clip_accumulation, setup)
    found["two-pass (GradCache)"] = two_pass(setup)
    most = steps if setup.world_size == 1 else steps - 1
    for retain in sorted({1, min(2, most), steps // 2}):
        found[f"ours, retain {retain}"] = decoupled(setup, retain, loss_chunk)
    found["ours, retain auto"] = decoupled(setup, "auto", loss_chunk)
    with suppress(UserError):  # a tower that takes no shorter texts
        found[f"ours, retain 1, {SORTED}"] = decoupled_and_sorted(setup, 1, loss_chunk)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Measures
# ---------------------------------------------------------------------------------------------------------------------


def seconds(setup: Setup, way: Way, micro_batches: Sequence[MicroBatch]) -> float:
    """Time one step, which all ranks start together."""
    setup.zero_grad()
    if setup.world_size > 1:
        dist.barrier()
    if setup.device.type == "cuda":
        torch.cuda.synchronize(setup.device)
    start = time.perf_counter()
    way(micro_batches)
    if setup.device.type == "cuda":
        torch.cuda.synchronize(setup.device)
    return time.perf_counter() - start


class PeakBytes(LiveBytes):
    """The peak of `LiveBytes`, in `peak`. Scratch memory inside an operation is not seen."""

    peak = 0
    _bound = 0  # upper bound of the live bytes; they are counted only where it exceeds the peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._bound += sum(
            t.untyped_storage().nbytes() for t in tree_leaves(result) if isinstance(t, Tensor)
        )
        if self._bound > self.peak:
            self._bound = self.bytes()
            self.peak = max(self.peak, self._bound)
        return result


def peak_bytes(setup: Setup, way: Way, micro_batches: Sequence[MicroBatch]) -> int:
    """Measure the peak device memory of a step, with parameters and gradients (CPU: live tensor bytes)."""
    setup.zero_grad()
    if setup.device.type == "cuda":
        gc.collect()  # frees reference cycles of an earlier way
        torch.cuda.reset_peak_memory_stats(setup.device)
        way(micro_batches)
        torch.cuda.synchronize(setup.device)
        return torch.cuda.max_memory_allocated(setup.device)
    with PeakBytes() as live:
        way(micro_batches)
    return live.peak + sum(p.nbytes for p in setup.inner.parameters())


def counts(setup: Setup, way: Way, micro_batches: Sequence[MicroBatch]) -> tuple[float, float, int]:
    """Count a step's forward and backward passes through the towers a sample, and its FLOPs on this rank.

    FLOPs are those of the matrix products of towers and loss; a multiply-add counts twice.
    """
    rows = {"forward": 0, "backward": 0}

    def count(_module: nn.Module, _inputs: Any, outputs: dict[str, Tensor]) -> None:
        features = outputs["image_features"]
        rows["forward"] += len(features)
        if features.requires_grad:
            features.register_hook(
                lambda gradient: rows.update(backward=rows["backward"] + len(gradient))
            )

    setup.zero_grad()
    hook = setup.inner.register_forward_hook(count)
    try:
        with FlopCounterMode(display=False) as counter:
            way(micro_batches)
    finally:
        hook.remove()
    samples = sum(len(images) for images, _ in micro_batches)
    return rows["forward"] / samples, rows["backward"] / samples, counter.get_total_flops()


def tower_flops(setup: Setup, micro_batch: MicroBatch) -> tuple[int, int]:
    """Count the FLOPs of one micro-batch's forward pass, and of its forward and backward pass, without a loss."""
    images, texts = setup.on_device(micro_batch)
    with FlopCounterMode(display=False) as forward, torch.no_grad(), setup.autocast():
        setup.inner(images, texts)
    setup.zero_grad()
    with FlopCounterMode(display=False) as both:
        with setup.autocast():
            outputs = setup.inner(images, texts)
        sum(outputs[side].float().sum() for side in ("image_features", "text_features")).backward()
    setup.zero_grad()
    return forward.get_total_flops(), both.get_total_flops()


def reference_gradient(
    setup: Setup, micro_batches: Sequence[MicroBatch], seed: int, *, sort: bool = False
) -> dict[str, Tensor]:
    """Take the effective batch's gradient from one graph, with masks drawn micro-batch by micro-batch as in accumulation.

    Args:
        sort: forward the texts sorted and cut, for other texts draw other masks.
    """
    setup.zero_grad()
    order = None
    if sort:
        micro_batches, order = sorted_texts(micro_batches, text_padding(setup.inner))
    torch.manual_seed(seed)
    outputs = []
    for micro_batch in micro_batches:
        with setup.autocast():
            outputs.append(setup.inner(*setup.on_device(micro_batch)))
    sides = [
        torch.cat([output[side] for output in outputs])
        for side in ("image_features", "text_features")
    ]
    if order is not None:
        sides[1] = sides[1][order.argsort().to(setup.device)]
    widened = [side.to(torch.promote_types(side.dtype, torch.float32)) for side in sides]
    setup.clip_loss(*widened, outputs[-1]["logit_scale"]).backward()
    found = gradients(setup)
    if setup.world_size > 1:  # the towers were called without DDP, which would average
        for gradient in found.values():
            dist.all_reduce(gradient)
            gradient /= setup.world_size
    return found


def gradient_errors(
    setup: Setup,
    way: Way,
    micro_batches: Sequence[MicroBatch],
    seed: int,
    reference: dict[str, Tensor],
) -> dict[str, float]:
    """Compute |g - g_ref| / |g_ref| (L2) of all towers together and of logit_scale, with masks drawn from `seed`."""
    setup.zero_grad()
    torch.manual_seed(seed)
    way(micro_batches)
    found = gradients(setup)
    towers = [name for name in reference if name != "logit_scale"]
    parts = {"towers": towers, "logit_scale": ["logit_scale"]}
    errors = {}
    for part, names in parts.items():
        pairs = [(found[name].double(), reference[name].double()) for name in names]
        difference = sum((ours - theirs).square().sum().item() for ours, theirs in pairs)
        total = sum(theirs.square().sum().item() for _, theirs in pairs)
        errors[part] = (difference / total) ** 0.5
    return errors


def gradients(setup: Setup) -> dict[str, Tensor]:
    """Copy the gradients of the parameters that have one."""
    named = setup.inner.named_parameters()
    return {name: p.grad.detach().clone() for name, p in named if p.grad is not None}


def write(results: Any, markdown: str, out: Path | None) -> None:
    """Print a benchmark's table, and write all numbers to `out` (FILE.json) and the table to FILE.md if it is given."""
    print(markdown)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(markdown, encoding="utf-8")
