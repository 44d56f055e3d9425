"""The data of a planned run: counts, the first and last shard, one sample of each source; the counts of retrieval sets.

Missing data raises nothing: each missing thing becomes a sentence with its remedy after the last semicolon.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.mixture import Mixture, Preprocessing, schedule_of
from open_clip_zerovl.data.names import NAME
from open_clip_zerovl.data.retrieval import open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.data.sources import Source, count_tar_samples, parse_sources
from open_clip_zerovl.plan.batching import PlanSettings
from open_clip_zerovl.sampling.schedule import Batching, Sampling, few_steps
from open_clip_zerovl.shards.urls import PARQUET, is_parquet, local_path
from open_clip_zerovl.shards.writing import read_sizes

MADE_BY_US = ("sbu", "vg", "cc3m", "cc12m", "coco", "f30k")  # by `zerovl data NAME`


@dataclass
class SourceCheck:
    """One source, as found.

    Attributes:
        pairs: in the source; None if not known.
        state: "ok", or the problem in a word or two.
        steps: optimizer steps of an epoch with its samples (None for mixed steps, or if not known).
        left_over: pairs of it that do not fill an effective batch in an epoch.
    """

    name: str
    layout: str = "-"
    pairs: int | None = None
    state: str = "ok"
    steps: int | None = None
    left_over: int | None = None


@dataclass
class DataCheck:
    """All data of a run.

    Attributes:
        opened: the sources that training could read, in order.
        counted: the sources whose number of pairs is known, in order.
        retrieval: name -> counts of the set, or its problem.
        missing: "fault; advice" of each thing that the run needs and lacks.
        steps: optimizer steps of an epoch.
    """

    sources: list[SourceCheck] = field(default_factory=list)
    opened: tuple[Source, ...] = ()
    counted: tuple[Source, ...] = ()
    retrieval: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: int = 0


def check_data(settings: PlanSettings) -> DataCheck:
    """Open all data of a run; with `--assume` and `--train-num-samples` none of it, which may be on another machine.

    Raises:
        UserError: bad input: two sources of one name, weights that do not fit.
    """
    data = DataCheck()
    if settings.assume is not None and settings.train_num_samples is not None:
        data.sources.append(SourceCheck("all", "not opened", settings.train_num_samples, "assumed"))
        data.counted = (Source("all", ("not opened",), (settings.train_num_samples,)),)
        return data
    _check_sources(settings, settings.train_data or "", data)
    for name, path in (
        parse_retrieval_data(settings.retrieval_data).items() if settings.retrieval_data else ()
    ):
        try:
            opened = open_retrieval_set(path)
            data.retrieval[name] = f"{len(opened):,} images, {opened.num_captions():,} captions"
        except UserError as error:
            data.retrieval[name] = "not here"
            what = f"{name}: {error}" if Path(path).exists() else f"{name}: there is no {path}"
            data.missing.append(f"{what}; {_made_by(name, Path(path))}")
    return data


def schedule_steps(settings: PlanSettings, data: DataCheck, effective_batch: int) -> None:
    """Fill in the steps of an epoch, in all and of each source, for an effective batch N.

    Raises:
        UserError: --source-order does not name the sources.
    """
    total = settings.train_num_samples
    data.steps = (total or sum(source.num_samples for source in data.counted)) // effective_batch
    if len(data.counted) < len(data.sources):  # some sizes are not known
        return
    order = None if settings.source_order is None else tuple(settings.source_order.split("::"))
    sampling = Sampling(
        settings.strategy,
        order,
        total,
    )
    try:
        schedule = schedule_of(data.counted, effective_batch, sampling, seed=settings.seed, epoch=0)
    except UserError as error:  # a source, or all together, does not fill one effective batch
        if "; " not in str(error):
            raise
        data.missing.append(str(error))
        return
    data.steps = schedule.steps
    few = (
        few_steps(schedule, [source.name for source in data.counted])
        if settings.strategy == "debiased"
        else None
    )
    data.notes += [f"{few}."] if few is not None else []
    mixed = settings.strategy == "random"
    for row, source, taken in zip(data.sources, data.counted, schedule.taken.tolist(), strict=True):
        row.steps = None if mixed else taken // effective_batch
        if total is None:
            row.left_over = max(0, int(source.num_samples * source.weight) - taken)


def _check_sources(settings: PlanSettings, train_data: str, data: DataCheck) -> None:
    opened = partial(
        parse_sources,
        captions=settings.captions,
        on_bad_sample=settings.on_bad_sample,
    )
    absent: dict[str, str] = {}
    try:
        sources = opened(train_data, settings.train_data_upsampling_factors)
    except UserError as error:
        sources = ()
        for component in train_data.split("::"):
            try:
                sources += opened(component)
            except UserError as component_error:
                absent[component] = str(component_error)
        if not absent:
            raise error  # no data is missing, so names or weights are wrong
        if settings.train_data_upsampling_factors is not None:
            data.notes.append(
                "--train-data-upsampling-factors are not counted until all sources are there."
            )
    data.counted = sources
    for source in sources:
        _add_source(settings, source, data)
    for component, reason in absent.items():
        _add_absent(component, reason, data)


def _add_source(settings: PlanSettings, source: Source, data: DataCheck) -> None:
    row = SourceCheck(source.name, source.layout, source.num_samples)
    data.sources.append(row)
    troubles: list[str] = []
    # a clustering has stored its shards' sizes and compared them
    if source.table is None and source.picked is None:
        local = {
            shard: Path(path) for shard in source.shards if (path := local_path(shard)) is not None
        }
        listed = {
            folder: read_sizes(folder) or {} for folder in {path.parent for path in local.values()}
        }
        unlisted = [
            path
            for path in local.values()
            if path.name not in listed[path.parent] and not is_parquet(path.name)
        ]
        if unlisted:
            row.state = "counted, no sizes.json"
            data.notes.append(
                f"{source.name}: no sizes.json lists {len(unlisted)} of its shards, so that each start counts them; "
                f"run zerovl data index {min(path.parent for path in unlisted)}"
            )
        troubles = _shard_troubles(settings, source, local)
    if not troubles and (reason := _first_sample(source)) is not None:
        advice = "find the fault with zerovl data check, and write the shard again"
        troubles.append(f"{source.name}: its first sample cannot be used ({reason}); {advice}")
    if troubles:
        row.state = "broken"
        data.missing += troubles
    else:
        data.opened += (source,)


def _shard_troubles(settings: PlanSettings, source: Source, local: dict[str, Path]) -> list[str]:
    """Shards that are gone, and faults of the first and the last, which are opened and counted."""
    gone = [shard for shard, path in local.items() if not path.is_file()]
    troubles = []
    if gone:
        troubles.append(
            f"{source.name}: {len(gone)} of {len(source.shards)} shards are missing, first {gone[0]}; fetch them again, or "
            f"count the remaining ones: zerovl data index {local[gone[0]].parent}"
        )
    for index in sorted({0, len(source.shards) - 1}):
        path = local.get(source.shards[index])
        # whose rows were counted
        if path is None or source.shards[index] in gone or is_parquet(path.name):
            continue
        try:
            count = count_tar_samples(path)
        except UserError as error:
            troubles.append(f"{source.name}: {error}")
            continue
        if settings.captions != "all" and count != source.sizes[index]:
            what = f"{source.name}: {path} holds {count} samples, its sizes.json says {source.sizes[index]}"
            troubles.append(f"{what}; zerovl data index {path.parent}")
    return troubles


def _first_sample(source: Source) -> str | None:
    """Read and decode one sample as training does; the fault of it, or None."""
    mixture = Mixture(
        [source],
        Batching(1),
        Preprocessing(
            transform=lambda image: torch.zeros(1, 1, 1),
            tokenizer=lambda captions: torch.tensor([len(caption) for caption in captions]),
        ),
        sampling=Sampling(epoch_samples=1),
        on_bad_sample="fail",
    )
    try:
        first = next(iter(mixture))
    except UserError as error:
        return str(error)
    return str(first) if isinstance(first, UserError) else None


def _add_absent(component: str, reason: str, data: DataCheck) -> None:
    match = NAME.fullmatch(component)
    where = match["shards"] if match else component
    name, folder = (match["name"] if match else Path(where).name or where), _folder(where)
    data.sources.append(SourceCheck(name, state="broken" if folder.exists() else "not here"))
    absent = f"there is no {folder}; {_made_by(name, folder)}"
    data.missing.append(f"{name}: {reason if folder.exists() else absent}")


def _folder(where: str) -> Path:
    """The folder of a component of --train-data: the component itself, or the folder of its shards or table."""
    before, brace, _ = (local_path(where) or where).partition("{")
    named_file = bool(brace and not before.endswith("/")) or Path(before).suffix in (
        ".tar",
        ".csv",
        ".tsv",
        *PARQUET,
    )
    return Path(before).parent if named_file else Path(before)


def _made_by(name: str, folder: Path) -> str:
    if name in MADE_BY_US:
        return f"zerovl data {name} --out {folder}"
    return "correct the path, or write shards as docs/data.md says"
