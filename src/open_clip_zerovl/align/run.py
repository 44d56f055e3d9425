"""`zerovl align`: encoders to rows, rows to heads, heads to a folder; several encoders to a table."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from open_clip_zerovl.align.encoders import Tower, open_tower
from open_clip_zerovl.align.export import check_together, export_aligned
from open_clip_zerovl.align.heads import Heads, check_head, refuse_gated
from open_clip_zerovl.align.page import write_align_page
from open_clip_zerovl.align.rows import Features, Pairs, Sources, cut_captions, embed_tower, make_pairs, open_sources
from open_clip_zerovl.align.settings import AlignRequest
from open_clip_zerovl.align.train import (
    Outcome,
    Recipe,
    Task,
    chunk_rows,
    default_batch,
    default_epochs,
    train_heads,
)
from open_clip_zerovl.checkpoints.loading import choose_device
from open_clip_zerovl.core.durations import duration
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.core.flags import conflicts, out_of_range
from open_clip_zerovl.core.memory import available_bytes
from open_clip_zerovl.embeddings.store import Store
from open_clip_zerovl.evaluate.bias.resampling import Measure, interval, mean_over, resampled
from open_clip_zerovl.evaluate.retrieval.metrics import QueryRanks, hit_probabilities, recall_bounds
from open_clip_zerovl.report.bounds import RECALL_KS
from open_clip_zerovl.report.plot import require_matplotlib
from open_clip_zerovl.report.tables import text_table

DRAWS = 1000  # of an interval
DRAWN = 5  # pairings, on the page
Say = Callable[[str], None]


@dataclass
class Result:
    """One pairing of encoders, with the best of its seeds.

    Attributes:
        interval: of the held-out RSUM over queries.
        of_seeds: RSUM of each seed.
    """

    image: Tower
    text: Tower
    outcome: Outcome
    recipe: Recipe
    scales: tuple[float, float]
    of_seeds: list[float]
    seconds: float
    interval: tuple[float, float] = (0.0, 0.0)

    @property
    def name(self) -> str:
        return f"{self.image.name} + {self.text.name}"

    @property
    def rsum(self) -> float:
        return self.outcome.metrics["rsum"]


def run_align(request: AlignRequest, say: Say = lambda line: print(line, flush=True)) -> list[Result]:
    """Align every pairing of the encoders and write the best one as a folder.

        OUT/model/          the best pairing in open_clip's form (not of gated heads)
        OUT/heads.safetensors, OUT/align.json, OUT/align.html      its heads; every pairing's scores; a page
        OUT/rows/, OUT/trained/      stored features, and the states of trainings

    Returns:
        The pairings, the best one first; [] where only a part of the features was asked for.

    Raises:
        UserError: encoders, data or settings that do not fit, before anything is embedded; what embedding, training and
            writing refuse.
    """
    if wrong := [*out_of_range(request), *conflicts(request)]:
        raise UserError(wrong[0])
    device = choose_device(request.device)
    check_writable(request.out, folder=True)
    require_matplotlib()
    sources = open_sources(request.train_data, request.held_out)
    if request.sampling == "debiased" and sources.training < 2:
        raise UserError(f"--debiased-sampling needs several sources, and the data has one: {sources.names[0]}")
    images = [open_tower(name, "image") for name in request.images]
    texts = [
        open_tower(name, "text", text_pool=request.text_pool, context_length=request.context_length)
        for name in request.texts
    ]
    for image, text in itertools.product(images, texts):
        check_head(request.head, image)
        check_head(request.head, text)
        check_together(image, text)
    _announce(request, sources, images, texts, device, say)
    stores = {id(tower): _embedded(request, tower, sources, device, say) for tower in (*images, *texts)}
    if request.part != (0, 1):
        say(
            f"part {request.part[0]}/{request.part[1]} is encoded; when all parts are, call again without --part to train"
        )
        return []
    pairs, task_of = _pairs(request, sources, stores, images, texts, device, say)
    results = [
        _train(request, task_of(image, text), image, text, say) for image, text in itertools.product(images, texts)
    ]
    return _finish(request, sources, pairs, results, say)


def _announce(
    request: AlignRequest,
    sources: Sources,
    images: Sequence[Tower],
    texts: Sequence[Tower],
    device: torch.device,
    say: Say,
) -> None:
    for tower in (*images, *texts):
        say(f"{tower.side:6} {tower.words()}")
    for tower in texts:
        looked_at, cut = cut_captions(tower, sources)
        if cut:
            say(
                f"       {cut:,} of {looked_at:,} captions are longer than its {tower.tokenizer.context_length} tokens and are "
                "cut; --context-length gives an hf: encoder more"
            )
    count, captions = int(sources.begins[sources.training]), int(sources.starts[sources.begins[sources.training]])
    say(
        f"data   {count:,} samples with {captions:,} captions of {sources.training} sources: {', '.join(sources.names)}"
    )
    held = request.held_out or f"{request.held_out_share:.0%} of the pictures, at most 1,000"
    say(f"held   {held}")
    say(
        f"heads  {request.head}, to {request.embed_dim} numbers; loss {request.loss}, {request.sampling} batches, on {device}"
    )
    if (refused := refuse_gated(request.head)) is not None:
        say(f"       {refused}")


def _embedded(request: AlignRequest, tower: Tower, sources: Sources, device: torch.device, say: Say) -> Store:
    store = embed_tower(
        tower,
        sources,
        request.rows_folder,
        device=device,
        amp=request.amp,
        dtype=request.dtype,
        batch_size=request.encode_batch,
        workers=request.workers,
        part=request.part,
        say=lambda line: say(f"rows   {line}"),
    )
    tower.module.cpu()
    if request.part == (0, 1) and not store.done.all():
        raise UserError(
            f"{store.folder} lacks {int((~store.done).sum()):,} samples that could not be read; mend the data and call again"
        )
    return store


def _pairs(
    request: AlignRequest,
    sources: Sources,
    stores: dict[int, Store],
    images: Sequence[Tower],
    texts: Sequence[Tower],
    device: torch.device,
    say: Say,
) -> tuple[Pairs, Callable[[Tower, Tower], Task]]:
    """The pairs, and the task of two towers."""
    picture_ids = np.array(stores[id(images[0])].rows["1.images"].array)
    caption_ids = np.array(stores[id(texts[0])].rows["1.texts"].array)
    pairs = make_pairs(sources, picture_ids, caption_ids, seed=request.seed, share=request.held_out_share)
    held = pairs.held_out
    line = f"pairs  {len(pairs.images):,} samples; held out {len(held.images):,} pictures with {len(held.texts):,} captions"
    for count, why in ((pairs.lost, "without picture or caption"), (pairs.copies, "whose picture is held out")):
        line += f"; {count:,} {why} left out" if count else ""
    say(line)
    if len(pairs.sizes) < 2 and request.sampling == "debiased":
        raise UserError(
            f"--debiased-sampling needs several sources, and only {pairs.names[0]} has pairs that can be used"
        )
    room = available_bytes(device)
    each = None if room is None else room // (4 * (len(images) + len(texts)))
    held_rows: dict[int, Features] = {}

    def features(tower: Tower) -> Features:
        if id(tower) not in held_rows:
            name, wanted = ("0.images", pairs.images) if tower.side == "image" else ("0.texts", pairs.texts)
            held_rows[id(tower)] = Features(stores[id(tower)], name, wanted, device, each)
        return held_rows[id(tower)]

    def task(image: Tower, text: Tower) -> Task:
        digest = "-".join(
            (stores[id(image)].digest, stores[id(text)].digest, str(sources.training), str(request.held_out_share))
        )
        return Task(pairs, features(image), features(text), picture_ids, caption_ids, device, digest)

    return pairs, task


def _train(request: AlignRequest, task: Task, image: Tower, text: Tower, say: Say) -> Result:
    """The heads of one pairing, for each seed; the best seed's result."""
    widths = (task.images.width, task.texts.width)
    weights = Heads(request.head, widths, request.embed_dim).weights
    chosen = default_batch(task.device, weights, request.embed_dim, task.pairs.sizes, request.sampling)
    batch = request.batch_size or chosen
    epochs = request.epochs or default_epochs(len(task.pairs.images), batch)
    why = "" if request.batch_size else _why(task.device, batch, weights, request.embed_dim)
    chunk = chunk_rows(batch, task.device)
    say(
        f"train  {image.name} + {text.name}: {weights:,} weights, {batch:,} pairs a step{why}, the logits "
        f"{'in one piece' if chunk is None else f'{chunk:,} rows at a time'}, at most {epochs} epochs of "
        f"{len(task.pairs.images) // batch:,} steps"
    )
    given: dict[str, Any] = {
        name: getattr(request, name) for name in Recipe.__dataclass_fields__ if hasattr(request, name)
    }
    outcomes = []
    for seed in range(request.seed, request.seed + request.seeds):
        recipe = Recipe(**{**given, "batch_size": batch, "epochs": epochs, "seed": seed})
        slug = re.sub(r"[^A-Za-z0-9]+", "-", f"{image.name[-40:]}--{text.name[-40:]}").strip("-")
        folder = request.out / "trained" / f"{slug}-{task.digest[:8]}{task.digest.split('-')[1][:8]}-{seed}"
        outcome = train_heads(
            task,
            recipe,
            folder,
            checked=lambda epoch, score, loss: say(
                f"       epoch {epoch:>3}: loss {loss:.3f}, held-out RSUM {score:.1f}"
            ),
        )
        outcomes.append((outcome, recipe))
    best, recipe = max(outcomes, key=lambda one: one[0].metrics["rsum"])
    return Result(
        image,
        text,
        best,
        recipe,
        (task.images.scale, task.texts.scale),
        [one.metrics["rsum"] for one, _ in outcomes],
        sum(one.seconds for one, _ in outcomes),
    )


def _why(device: torch.device, batch: int, weights: int, embed_dim: int) -> str:
    if device.type == "cuda":
        return ""
    return f" (a pair costs {6 * batch * embed_dim / 1e6:.2g} M operations in the loss, {6 * weights / 1e6:.2g} M in the heads)"


# ---------------------------------------------------------------------------------------------------------------------
# What came out
# ---------------------------------------------------------------------------------------------------------------------


def _finish(request: AlignRequest, sources: Sources, pairs: Pairs, results: list[Result], say: Say) -> list[Result]:
    draws = resampled({str(i): _measure(one, pairs) for i, one in enumerate(results)}, DRAWS, request.seed)
    for i, one in enumerate(results):
        one.interval = interval(draws[str(i)])
    order = sorted(range(len(results)), key=lambda i: -results[i].rsum)
    ranked = [results[i] for i in order]
    chance = recall_bounds([str(i) for i in range(len(pairs.held_out.texts))], pairs.held_out.text_to_image)[
        "rsum_chance"
    ]
    header, rows = table(ranked)
    say(text_table(header, rows, left=2))
    facts = [f"held-out RSUM of chance: {chance:.1f}"]
    if len(ranked) > 1:
        facts.append(_verdict(ranked, draws[str(order[0])] - draws[str(order[1])]))
    for fact in facts:
        say(fact)
    best = ranked[0]
    metrics = best.outcome.metrics
    save_file(
        {name: value.cpu().contiguous() for name, value in best.outcome.heads.state_dict().items()},
        request.out / "heads.safetensors",
        metadata={"head": best.recipe.head, "scales": json.dumps(best.scales)},
    )
    if (refused := refuse_gated(request.head)) is None:
        origin = f"Heads ({request.head}) trained on the frozen encoders {best.image.name} and {best.text.name}."
        folder = export_aligned(
            request.out / "model",
            best.image,
            best.text,
            best.outcome.heads,
            request.head,
            best.scales,
            metrics=metrics,
            origin=origin,
        )
        say(
            f"The model is in {folder}: open_clip opens it as local-dir:{folder}, and zerovl retrieval, search and train "
            "--init-from take it"
        )
    else:
        say(f"The heads are in {request.out / 'heads.safetensors'}: {refused}")
    short = [f"{one.image.name[-18:]} + {one.text.name[-18:]}" for one in ranked]
    curves = {f"{i + 1}: {short[i]}": one.outcome.scores for i, one in enumerate(ranked[:DRAWN])}
    write_align_page(request.out / "align.html", facts, header, rows, curves, chance, vars(best.recipe))
    write_atomically(request.out / "align.json", json.dumps(_record(ranked, chance), indent=1) + "\n")
    return ranked


def _measure(result: Result, pairs: Pairs) -> Measure:
    """The held-out RSUM as a measure over pictures, whose captions are drawn with them."""
    links = torch.from_numpy(pairs.held_out.text_to_image)
    ranks = result.outcome.ranks
    units = {"image_to_text": torch.arange(len(pairs.held_out.images)), "text_to_image": links}
    terms = [(units[way], _hits(ranks[way])) for way in units]
    return mean_over(terms, len(pairs.held_out.images), 100.0)


def _hits(ranks: QueryRanks) -> torch.Tensor:
    return hit_probabilities(ranks, RECALL_KS).sum(dim=0)


def _verdict(ranked: Sequence[Result], differences: NDArray) -> str:
    low, high = interval(differences)
    by = ranked[0].rsum - ranked[1].rsum
    counts = "the difference counts" if low > 0 else "another held-out set may turn the order round"
    return f"Best: {ranked[0].name}, {by:.1f} RSUM ({low:.1f} to {high:.1f} over pictures) before {ranked[1].name}: {counts}"


def table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the pairings with their held-out recall; RSUM with an interval of 95 % over pictures."""
    header = ["image", "text", "widths", "I2T R@1", "T2I R@1", "RSUM", "95 %", "seeds", "epoch", "train"]
    rows = []
    for one in results:
        metrics = one.outcome.metrics
        rows.append(
            [
                one.image.name,
                one.text.name,
                f"{one.image.width}, {one.text.width}",
                *(f"{100 * metrics[f'{way}_R@1']:.1f}" for way in ("image_to_text", "text_to_image")),
                f"{one.rsum:.1f}",
                "{:.1f} to {:.1f}".format(*one.interval),
                " ".join(f"{score:.0f}" for score in one.of_seeds),
                str(one.outcome.best_epoch),
                duration(one.seconds),
            ]
        )
    return header, rows


def _record(ranked: Sequence[Result], chance: float) -> dict[str, Any]:
    return {
        "chance": chance,
        "pairings": [
            {
                "image": one.image.name,
                "text": one.text.name,
                "widths": [one.image.width, one.text.width],
                "metrics": one.outcome.metrics,
                "interval": one.interval,
                "rsum of seeds": one.of_seeds,
                "best epoch": one.outcome.best_epoch,
                "checks": one.outcome.scores,
                "seconds": one.seconds,
                "settings": vars(one.recipe),
            }
            for one in ranked
        ],
    }
