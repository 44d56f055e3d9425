"""The `evaluate` hook: open_clip's own evaluation, then `--retrieval-data` and `--zero-shot-data`, logged in the same way."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from open_clip import get_input_dtype
from open_clip_train.distributed import is_master
from open_clip_train.precision import get_autocast

from open_clip_zerovl.data.images import paper_transform_of
from open_clip_zerovl.data.sets import IndexedSet, retrieval_batches
from open_clip_zerovl.evaluate.metrics import in_percent, recall_bounds, recalls, retrieval_ranks
from open_clip_zerovl.evaluate.retrieval import encode_retrieval, evaluating
from open_clip_zerovl.evaluate.zero_shot import score_labelled
from open_clip_zerovl.features.encoder import FrozenModel
from open_clip_zerovl.recipe.flags import RecipeConfig
from training.data import TrainingInputs
from training.log import RunLog, report


def evaluate(
    config: RecipeConfig,
    args: argparse.Namespace,
    log: RunLog,
    inputs: TrainingInputs,
    transform: Callable[..., Any],
    stock: Callable[[dict], dict[str, Any]],
    model: Any,
    data: dict,
    epoch: int,
    tb_writer=None,
    tokenizer=None,
) -> dict[str, Any]:
    """Compute open_clip's metrics of this epoch and those of our sets.

    `NAME_image_to_text_R@1` ... `NAME_rsum` of each retrieval set, `NAME_top1`, `NAME_top5` (of more than five classes) and
    `NAME_mean_per_class` of each labelled set.

    Only the first rank evaluates, as in open_clip; the other ranks wait at main's barrier.

    Args:
        log: gets the metrics.
        inputs: hold our sets.
        transform: of their pictures.
        stock: open_clip's own evaluation of its data.
        model: without DistributedDataParallel.
    """
    metrics = stock({key: value for key, value in data.items() if value is not None})
    due = epoch % config.retrieval_frequency == 0 or epoch == args.epochs
    if not (inputs.retrieval or inputs.labelled) or not due or not is_master(args):
        return metrics
    device = torch.device(args.device)
    towers = {
        "device": device,
        "autocast": get_autocast(args.precision, device_type=device.type),
        "input_dtype": get_input_dtype(args.precision),
    }
    ours: dict[str, Any] = {"epoch": epoch}
    if inputs.retrieval:
        ours |= _retrieval(
            config, inputs.retrieval, transform, args, log, model, tokenizer, epoch, towers
        )
    if inputs.labelled:
        ours |= _zero_shot(inputs.labelled, transform, args, log, model, tokenizer, epoch, towers)
    if args.save_logs:
        with open(Path(args.checkpoint_path, "results.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(ours) + "\n")
    steps = data["train"].dataloader.num_batches // args.accum_freq if "train" in data else None
    reported = {f"val/{name}": value for name, value in ours.items()}
    step = None if steps is None else steps * epoch
    report(args, tb_writer, reported, epoch, step, {"epoch": epoch})
    return {**metrics, **ours}


def _retrieval(
    config: RecipeConfig,
    sets: Mapping[str, IndexedSet],
    transform: Callable[..., Any],
    args: argparse.Namespace,
    log: RunLog,
    model: Any,
    tokenizer: Any,
    epoch: int,
    towers: dict[str, Any],
) -> dict[str, float]:
    """Compute metrics of each retrieval set, recorded."""
    scores: dict[str, float] = {}
    recorded: dict[str, dict[str, float]] = {}
    first = None if config.retrieval_captions == "all" else int(config.retrieval_captions)
    if config.retrieval_transform == "paper":
        transform = paper_transform_of(model.visual)
    for name, dataset in sets.items():
        logging.info(f"Evaluating on the {len(dataset):,} pictures of {name}")
        batches = retrieval_batches(
            dataset,
            transform,
            captions_per_image=first,
            batch_size=args.batch_size,
            num_workers=args.workers,
        )
        features = encode_retrieval(model, batches, tokenizer, **towers)
        metrics = recalls(retrieval_ranks(*features))
        captions = dataset.captions(first)
        texts = [text for image_captions in captions for text in image_captions]
        recorded[name] = {**metrics, **recall_bounds(texts, features[2])}
        scores |= {f"{name}_{key}": value for key, value in metrics.items()}
        words = "\t".join(f"{key}: {value:.4f}" for key, value in metrics.items())
        logging.info(f"Eval Epoch: {epoch} {name} {words}")
    log.add("retrieval", epoch, metrics=recorded)
    return scores


def _zero_shot(
    sets: Mapping[str, Any],
    transform: Callable[..., Any],
    args: argparse.Namespace,
    log: RunLog,
    model: Any,
    tokenizer: Any,
    epoch: int,
    towers: dict[str, Any],
) -> dict[str, float]:
    """Compute accuracies of each labelled set, recorded."""
    frozen = FrozenModel.of(
        "training", (model, transform, tokenizer, towers["device"]), context=towers["autocast"],
        input_dtype=towers["input_dtype"],
    )  # fmt: skip
    scores: dict[str, float] = {}
    recorded: dict[str, dict[str, float]] = {}
    with evaluating(model):
        for name, dataset in sets.items():
            logging.info(f"Zero-shot classification of {len(dataset.images):,} pictures of {name}")
            accuracies = score_labelled(
                frozen,
                dataset,
                None,
                batch_size=args.batch_size,
                workers=args.workers,
                name=name,
                progress=False,
            )
            logging.info(
                f"Eval Epoch: {epoch} {name} zero-shot top-1: {in_percent(accuracies)} % of {accuracies['images']:,} pictures, "
                f"chance {100 * accuracies['chance']:.1f} %, the commonest class {100 * accuracies['commonest']:.1f} %"
            )
            recorded[name] = {"top1": accuracies["top1"], "top1_chance": accuracies["chance"]}
            shown = ("top1", "top5", "mean_per_class")
            scores |= {f"{name}_{key}": accuracies[key] for key in shown if key in accuracies}
    log.add("zero-shot", epoch, metrics=recorded)
    return scores
