"""`zerovl align`: encoders to rows, rows to heads, heads to a folder; each pairing of several encoders to a row of a table."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from open_clip_zerovl.align.encoders import Tower, open_tower
from open_clip_zerovl.align.export import TRANSFORMERS_ALONE, check_together, export_aligned
from open_clip_zerovl.align.request import AlignRequest, Recipe
from open_clip_zerovl.align.rows import (
    Features,
    embed_tower,
    make_pairs,
    open_sources,
    shared_ids,
    unit_scale,
)
from open_clip_zerovl.align.train import (
    Heads,
    Outcome,
    Task,
    caption_accuracy,
    default_batch,
    default_epochs,
    held_out_embeddings,
    held_out_scores,
    train_heads,
)
from open_clip_zerovl.checkpoints.export import loading_notes
from open_clip_zerovl.checkpoints.loading import choose_device, load_model
from open_clip_zerovl.checkpoints.transformers_folder import is_transformers_folder
from open_clip_zerovl.core.errors import Say, UserError
from open_clip_zerovl.core.files import check_writable, digest_of, write_atomically
from open_clip_zerovl.core.memory import available_bytes
from open_clip_zerovl.data.splits import (
    Identities,
    as_keys,
    seen_sentence,
    trained_on,
    write_trained_on,
)
from open_clip_zerovl.evaluate.metrics import (
    DIRECTIONS,
    interval,
    recall_bounds,
    resampled,
    rsum_over_pictures,
)
from open_clip_zerovl.evaluate.retrieval import GallerySet, gallery_of
from open_clip_zerovl.features.embed import FeatureStore
from open_clip_zerovl.features.sources import SourceSamples, cut_captions
from open_clip_zerovl.prepare.door import as_shards, sets_as_shards
from open_clip_zerovl.report.pages import (
    FAINT,
    MODEL_COLOURS,
    Line,
    draw_levels,
    line_chart,
    write_page,
)
from open_clip_zerovl.report.tables import duration, text_table

DRAWS = 1000  # of an interval
WAYS = dict(zip(DIRECTIONS, ("I2T", "T2I"), strict=True))
OF_SEEDS = "RSUM of seeds"  # a column where there are several
DRAWN = 5  # pairings, on the page


@dataclass
class Pairing:
    """One pairing of encoders, with the best of its seeds.

    Attributes:
        of_seeds: held-out RSUM of each seed.
        seconds: duration of the trainings of all seeds.
        of_sources: metrics of each source's held-out pictures among themselves; {} for one source.
        top1: share of the held-out pictures whose best caption of all is one of their own, if captions are of classes.
        interval: interval of the RSUM that holds 95 % of the draws of held-out pictures.
    """

    image: Tower
    text: Tower
    task: Task
    recipe: Recipe
    outcome: Outcome
    of_seeds: list[float]
    seconds: float
    of_sources: dict[str, dict[str, float]]
    top1: float | None = None
    interval: tuple[float, float] = (0.0, 0.0)

    @property
    def name(self) -> str:
        """Join the names of both encoders."""
        return f"{self.image.name} + {self.text.name}"

    @property
    def rsum(self) -> float:
        """Return the held-out RSUM of the best seed."""
        return self.outcome.metrics["rsum"]

    def row(self) -> dict[str, str]:
        """Return the cells of a table by their columns."""
        metrics, (low, high) = self.outcome.metrics, self.interval
        of_seeds = " ".join(f"{score:.0f}" for score in self.of_seeds)
        return {
            "image": self.image.name,
            "text": self.text.name,
            "widths": f"{self.image.width}, {self.text.width}",
            **{f"{short} R@1": f"{100 * metrics[f'{way}_R@1']:.1f}" for way, short in WAYS.items()},
            "RSUM": f"{self.rsum:.1f}",
            "95 % interval": f"{low:.1f} to {high:.1f}",
            **({OF_SEEDS: of_seeds} if len(self.of_seeds) > 1 else {}),
            "epoch": str(self.outcome.best_epoch),
            "train": duration(self.seconds),
            **({} if self.top1 is None else {"top-1": f"{100 * self.top1:.1f}"}),
        }

    def record(self) -> dict[str, Any]:
        """Describe the pairing as JSON."""
        return {
            "image": self.image.name,
            "text": self.text.name,
            "widths": [self.image.width, self.text.width],
            "metrics": self.outcome.metrics,
            "interval": self.interval,
            "rsum of seeds": self.of_seeds,
            "sources": self.of_sources,
            "top1": self.top1,
            "best epoch": self.outcome.best_epoch,
            "checks": self.outcome.scores,
            "seconds": self.seconds,
            "settings": vars(self.recipe),
        }


def run_align(
    request: AlignRequest, say: Say = lambda line: print(line, flush=True)
) -> list[Pairing]:
    """Align every pairing of the encoders and write the best one as a folder.

        OUT/model/                     the best pairing in open_clip's form
        OUT/heads.safetensors          its heads
        OUT/align.json, align.html     every pairing's scores and settings
        OUT/rows/, OUT/trained/        stored features, and the states of trainings

    Returns:
        The pairings, the best one first; [] if only a part of the features was asked for.

    Raises:
        UserError: encoders, data or settings that do not fit; what embedding, training and writing refuse.
    """
    return Alignment(request, say).run()


class Alignment:
    """A call of `zerovl align` (see `run_align`).

    Attributes:
        stores: tower number -> its stored features.
    """

    def __init__(self, request: AlignRequest, say: Say) -> None:
        if (ranks := int(os.environ.get("WORLD_SIZE", 1))) > 1:  # of torchrun
            request = replace(request, part=(int(os.environ["RANK"]), ranks))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        check_writable(request.out, folder=True)
        request = replace(
            request,
            train_data=as_shards(request.train_data, say=say),
            held_out=request.held_out and sets_as_shards(request.held_out, karpathy=True, say=say),
        )
        self.request, self.say = request, say
        self.device = choose_device(request.device, local_rank=local_rank)
        self.sources = open_sources(request.train_data, request.held_out)
        self.classes = any(source.classes for source in self.sources.opened)
        load = cache(load_model)
        self.images = [open_tower(name, "image", load=load) for name in request.images]
        self.texts = [
            open_tower(name, "text", load=load, context_length=request.context_length)
            for name in request.texts
        ]
        self.pairings = list(itertools.product(self.images, self.texts))
        for image, text in self.pairings:
            check_together(image, text)
        model = request.out / "model"
        for_transformers = {image.kind == "vision" for image in self.images}
        if model.exists() and is_transformers_folder(model) not in for_transformers:
            raise UserError(f"{model} is for another library; give another --out")
        self.stores: dict[int, FeatureStore] = {}
        self.seen: Identities | None = None  # pictures on which the encoders were trained

    def run(self) -> list[Pairing]:
        """Run the alignment (see `run_align`)."""
        request = self.request
        self._announce()
        rows = request.rows or request.out / "rows"
        for tower in (*self.images, *self.texts):
            self.stores[id(tower)] = embed_tower(
                tower,
                self.sources,
                rows,
                request,
                device=self.device,
                say=lambda line: self.say(f"rows   {line}"),
            )
            tower.module.cpu()
        if request.part != (0, 1):
            number, count = request.part
            self.say(
                f"part {number}/{count} is encoded; when all parts are, call again without torchrun to train"
            )
            return []
        task_of = self._tasks()
        results = [self._train(image, text, task_of(image, text)) for image, text in self.pairings]
        measures = {  # over held-out pictures, with which their captions are drawn
            pairing.name: rsum_over_pictures(
                pairing.outcome.ranks, torch.from_numpy(pairing.task.pairs.held_out.text_to_image)
            )
            for pairing in results
        }
        draws = resampled(measures, DRAWS, request.seed)
        for pairing in results:
            pairing.interval = interval(draws[pairing.name])
        ranked = sorted(results, key=lambda pairing: -pairing.rsum)
        task = ranked[0].task
        held = task.pairs.held_out
        bounds = recall_bounds(task.caption_ids[held.texts].tolist(), held.text_to_image.tolist())
        facts = [task.pairs.words(), f"held-out RSUM of chance: {bounds['rsum_chance']:.1f} of 600"]
        if self.classes:
            pictures_of = np.unique(task.caption_ids[held.texts], return_counts=True)[1]
            commonest = 100 * pictures_of.max() / len(held.images)
            facts.append(
                f"top-1: the best of all captions is one of the picture's own; the commonest caption belongs to "
                f"{commonest:.1f} % of the pictures. Pictures of a class share theirs: "
                f"RSUM can reach {bounds['rsum_best']:.0f} of 600"
            )
        facts += [
            f"{name} alone: RSUM {scores['rsum']:.1f}, {scores['images']:.0f} pictures held out"
            for name, scores in ranked[0].of_sources.items()
        ]
        if len(ranked) > 1:
            best, second = ranked[:2]
            low, high = interval(draws[best.name] - draws[second.name])
            counts = (
                "the difference counts"
                if low > 0
                else "another held-out set may turn the order round"
            )
            by = f"{best.rsum - second.rsum:.1f} RSUM ({low:.1f} to {high:.1f} over pictures)"
            facts.append(f"Best: {best.name}, {by} before {second.name}: {counts}")
        self._write(ranked, facts, bounds["rsum_chance"])
        return ranked

    def _announce(self) -> None:
        request, sources = self.request, self.sources
        for tower in (*self.images, *self.texts):
            self.say(f"{tower.side:6} {tower.words()}")
        for tower in self.texts:
            length = tower.tokenizer.context_length
            looked_at, cut, _ = cut_captions(
                tower.tokenizer, length, sources.opened[: sources.training]
            )
            if cut:
                self.say(
                    f"       {cut:,} of {looked_at:,} captions are longer than its {length} tokens and are cut (an hf: encoder"
                )
                self.say("       takes more by --context-length)")
        count = sources.begins[sources.training]
        names = ", ".join(sources.names)
        self.say(
            f"data   {count:,} samples with {sources.starts[count]:,} captions of {sources.training} sources: {names}"
        )
        self.say(
            f"held   {request.held_out or f'{request.held_out_share:.0%} of the pictures, at most 1,000'}"
        )
        if self.classes and request.positives is None:
            self.say("       pictures of a class share its captions: --positives caption")
        self.say(f"heads  linear, to {request.embed_dim} numbers, on {self.device}")
        if any(tower.kind == "vision" for tower in self.images):
            self.say(f"       of a vision model of transformers: {TRANSFORMERS_ALONE}")

    def _tasks(self) -> Callable[[Tower, Tower], Task]:
        """Make the pairs, and from them a task of any two towers."""
        request, stores = self.request, self.stores
        picture_ids = shared_ids([stores[id(tower)] for tower in self.images])
        caption_ids = shared_ids([stores[id(tower)] for tower in self.texts])
        encoders = [tower.name for tower in (*self.images, *self.texts)]
        self.seen = trained_on(encoders)
        pairs = make_pairs(
            self.sources,
            picture_ids,
            caption_ids,
            seed=request.seed,
            share=request.held_out_share,
            trained_on=self.seen,
        )
        self.say(f"pairs  {pairs.words()}")
        held_out = picture_ids[pairs.held_out.images]
        if sentence := seen_sentence(held_out, self.seen, " or ".join(encoders)):
            self.say(f"       {sentence}")
        room = available_bytes(self.device)
        each = None if room is None else room // (4 * len(stores))

        @cache
        def features(store: FeatureStore, scale: float) -> Features:
            on_device = Features(store, scale, self.device, each)
            if on_device.mapped:
                self.say(
                    f"       {store.folder} does not fit in memory: each step reads its rows from the disk"
                )
            return on_device

        def task(image: Tower, text: Tower) -> Task:
            pictures, texts = stores[id(image)], stores[id(text)]
            of = [
                *(pictures.digest, texts.digest, self.sources.training, digest_of(held_out)),
                *(len(pairs.images), len(pairs.texts)),  # a tower of the same call may lack samples
            ]
            return Task(
                pairs,
                features(pictures, unit_scale(pictures, pairs.images)),
                features(texts, unit_scale(texts, pairs.texts)),
                picture_ids,
                caption_ids,
                self.device,
                "-".join(map(str, of)),
            )

        return task

    def _train(self, image: Tower, text: Tower, task: Task) -> Pairing:
        """Train the heads of one pairing for each seed, and take the best seed's result."""
        request = self.request
        weights = Heads((image.width, text.width), request.embed_dim).weights
        batch = request.batch_size or default_batch(
            self.device, weights, request.embed_dim, len(task.pairs.images)
        )
        steps = len(task.pairs.images) // batch
        epochs = request.epochs or default_epochs(len(task.pairs.images), batch)
        self.say(
            f"train  {image.name} + {text.name}: {weights:,} weights, {batch:,} pairs a step, at most {epochs} epochs of "
            f"{steps:,} steps"
        )
        given = {each.name: getattr(request, each.name) for each in fields(Recipe)}
        given["positives"] = request.positives or ("caption" if self.classes else "pair")
        slug = re.sub(r"[^A-Za-z0-9]+", "-", f"{image.name[-40:]}--{text.name[-40:]}").strip("-")

        def say_check(epoch: int, score: float, loss: float) -> None:
            self.say(f"       epoch {epoch:>3}: loss {loss:.3f}, held-out RSUM {score:.1f}")

        results: list[tuple[Outcome, Recipe]] = []
        for seed in range(request.seed, request.seed + request.seeds):
            recipe = Recipe(**{**given, "batch_size": batch, "epochs": epochs, "seed": seed})
            folder = (
                request.out
                / "trained"
                / f"{slug}-{task.digest[:8]}{task.digest.split('-')[1][:8]}-{seed}"
            )
            results.append((train_heads(task, recipe, folder, checked=say_check), recipe))
        best, recipe = max(results, key=lambda result: result[0].metrics["rsum"])
        scores = [outcome.metrics["rsum"] for outcome, _ in results]
        seconds = sum(outcome.seconds for outcome, _ in results)
        of_sources = self._of_sources(best.heads, task)
        top1 = caption_accuracy(best.heads, task) if self.classes else None
        return Pairing(image, text, task, recipe, best, scores, seconds, of_sources, top1)

    def _of_sources(self, heads: Heads, task: Task) -> dict[str, dict[str, float]]:
        """Compute the metrics of the held-out pictures of each source, or held-out set, alone.

        Returns:
            {} for one.
        """
        held = task.pairs.held_out
        source_of = np.searchsorted(self.sources.begins, held.images, side="right") - 1
        numbers = np.unique(source_of).tolist()
        parts = {
            self.sources.opened[number].name: held.part(source_of == number)
            for number in (numbers if len(numbers) > 1 else [])
        }
        return {
            name: {"images": len(part.images), **held_out_scores(heads, task, part)[1]}
            for name, part in parts.items()
        }

    def _write(self, ranked: Sequence[Pairing], facts: Sequence[str], chance: float) -> None:
        """Print and write the results."""
        out, best = self.request.out, ranked[0]
        header = tuple(best.row())
        rows = [[*pairing.row().values()] for pairing in ranked]
        self.say(text_table(header, rows, left=2))
        for fact in facts[1:]:
            self.say(fact)
        heads, scales = best.outcome.heads, (best.task.images.scale, best.task.texts.scale)
        tensors = {name: value.cpu().contiguous() for name, value in heads.state_dict().items()}
        file = out / "heads.safetensors"
        write_atomically(file, save(tensors, metadata={"scales": json.dumps(scales)}))
        metrics = {**best.outcome.metrics, "rsum_chance": chance}
        params = {**vars(best.recipe), "train_data": self.request.train_data}
        towers = (best.image, best.text)
        folder = export_aligned(
            out / "model", *towers, heads, scales, metrics=metrics, params=params
        )
        write_trained_on(folder, best.task.picture_ids[best.task.pairs.images], self.seen)
        command = None
        if best.image.kind == "vision":
            self.say(f"The model is in {folder}: {TRANSFORMERS_ALONE}")
        else:
            command = f"zerovl search {shlex.quote(os.path.relpath(folder))} PICTURES WORDS"
            self.say(f"The model is in {folder}: open_clip opens it as local-dir:{folder};")
            self.say("zerovl retrieval, search, export and train --init-from take it")
            for note in loading_notes(folder):
                self.say(note)
            self.say(f"Search pictures with it: {command}")
        record = {
            "chance": chance,
            "pairings": [pairing.record() for pairing in ranked],
            "held_out": as_keys(best.task.picture_ids[best.task.pairs.held_out.images]),
        }
        write_atomically(out / "align.json", json.dumps(record, indent=1) + "\n")
        gallery = self._gallery(best)
        if gallery is None:
            facts = [*facts, "The held-out pictures lie on a server and are not shown."]

        def lines(column: int) -> list[Line]:  # of the checks, beside their epoch
            drawn = []
            for number, (pairing, colour) in enumerate(
                zip(ranked[:DRAWN], MODEL_COLOURS, strict=False), start=1
            ):
                name = f"{number}: {pairing.image.name[-18:]} + {pairing.text.name[-18:]}"
                checks = list(zip(*pairing.outcome.scores, strict=True))
                drawn.append(Line(name, checks[0], checks[column], colour, {"marker": "o"}))
            return drawn

        write_page(
            out / "align.html",
            "align.html",
            title="An alignment",
            facts=facts,
            command=command,
            header=header,
            rows=rows,
            training=line_chart(
                lines(1),
                x="epoch",
                y="RSUM, held out",
                finish=lambda axes: draw_levels(axes, {"chance": (chance, FAINT)}),
            ),
            losses=line_chart(lines(2), x="epoch", y="loss"),
            gallery=gallery,
            settings=[
                (name.replace("_", " "), str(value)) for name, value in vars(best.recipe).items()
            ],
        )

    def _gallery(self, best: Pairing) -> dict[str, Any] | None:
        """Find hits and misses among the held-out pairs by the stored features, for the page.

        Only their captions, and the pictures that are shown, are read again.

        Returns:
            None for shards on a server.
        """
        sources, held = self.sources, best.task.pairs.held_out
        if any(source.folder is None for source in sources.opened):
            return None
        words, pictures = (
            SourceSamples(sources.opened, "text"),
            SourceSamples(sources.opened, "image"),
        )
        texts = cache(lambda sample: dict(words.sample(sample)))
        captions_of: list[list[str]] = [[] for _ in held.images]
        owners = np.searchsorted(sources.starts, held.texts, side="right") - 1
        for owner, row, image in zip(
            owners.tolist(), held.texts.tolist(), held.text_to_image.tolist(), strict=True
        ):
            captions_of[image].append(texts(owner)[row])
        shown = GallerySet.scored(
            f"{best.name}, held out",
            captions_of,
            lambda image: pictures.sample(int(held.images[image]))[0][1],
            held_out_embeddings(best.outcome.heads, best.task),
        )
        # The page's facts have the sentence on the best possible RSUM.
        metrics = {name: value for name, value in shown.metrics.items() if name != "rsum_best"}
        return gallery_of([replace(shown, metrics=metrics)])
