"""What the sources of a run hold, seen from the outside: counts, first and last shard, one sample; and retrieval sets.

Nothing is raised for what is missing: everything that is gets a line, with the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from open_clip_zerovl.data.mixture import Failure, Mixture, Preprocessing, Sampling
from open_clip_zerovl.data.names import NAME
from open_clip_zerovl.data.schedule import Batching, source_schedule
from open_clip_zerovl.data.sources import Source, count_tar_samples, parse_sources
from open_clip_zerovl.datasets.emoji_sources import SOURCES as EMOJI_SOURCES
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.plan.holdings import TABLE_2
from open_clip_zerovl.plan.settings import PlanSettings
from open_clip_zerovl.retrieval.sets import open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.tar.remote import local_path
from open_clip_zerovl.tar.shards import read_sizes

MADE_BY_US = ("sbu", "vg", "cc3m", "cc12m", "coco", "f30k")  # zerovl data NAME


@dataclass(frozen=True)
class Missing:
    """Something the run needs that is not there, and the way out."""

    what: str
    advice: str


@dataclass
class SourceCheck:
    """One source, as found.

    Attributes:
        pairs: it holds; None where nothing tells.
        state: in a word or two: "ok", or what is the matter.
        steps: optimizer steps an epoch takes from it (None for mixed steps, or where it is unknown).
        left_over: pairs of it that do not fill an effective batch in an epoch.
    """

    name: str
    location: str
    layout: str = ""
    pairs: int | None = None
    state: str = "ok"
    steps: int | None = None
    left_over: int | None = None


@dataclass
class DataCheck:
    """All data of a run.

    Attributes:
        opened: the sources that training could read, in order.
        sizes, weights: pairs and passes of each source that is counted.
        retrieval: name -> what the set holds, or what is the matter.
        elsewhere: what this machine lacks, where the plan is for other hardware.
    """

    sources: list[SourceCheck]
    opened: tuple[Source, ...]
    weights: tuple[float, ...]
    retrieval: dict[str, str]
    missing: list[Missing]
    notes: list[str]
    elsewhere: list[Missing] = field(default_factory=list)
    steps: int = 0

    @property
    def pairs(self) -> int:
        return sum(source.pairs or 0 for source in self.sources)


def check_data(settings: PlanSettings) -> DataCheck:
    """Open all data of a run. With `--assume` data may be elsewhere: Table 2 of the paper tells the size of its sources.

    Raises:
        UserError: bad input: two sources of one name, weights that do not fit.
    """
    found = DataCheck([], (), (), {}, [], [])
    if settings.train_data is None:
        found.sources.append(SourceCheck("all", "elsewhere", "not here", settings.train_num_samples, "assumed"))
        found.weights = (1.0,)
    else:
        _check_sources(settings, settings.train_data, found)
    _check_retrieval(settings, found)
    return found


def schedule_steps(settings: PlanSettings, data: DataCheck, effective_batch: int) -> None:
    """Fill in the steps of an epoch, and what each source gives to them, for an effective batch N."""
    names = [source.name for source in data.sources]
    sizes = [source.pairs for source in data.sources if source.pairs]
    total = settings.train_num_samples
    if len(sizes) < len(names):  # all that is known is what is there, or how long an epoch is to be
        data.steps = (total or sum(sizes)) // effective_batch
        return
    order = settings.source_order.split("::") if settings.source_order is not None else names
    if sorted(order) != sorted(names):
        raise UserError(f"--source-order {settings.source_order} must name each source once: {', '.join(names)}")
    try:
        schedule = source_schedule(
            sizes,
            effective_batch,
            strategy=settings.strategy,
            seed=settings.seed,
            epoch=0,
            weights=data.weights,
            epoch_samples=total,
            draw=settings.debiased_draw,
            source_order=[names.index(name) for name in order],
            names=names,
        )
    except UserError as error:  # a source, or all of them, that does not fill one effective batch
        what, _, advice = str(error).partition("; ")
        data.missing.append(Missing(what, advice))
        data.steps = sum(sizes) // effective_batch
        return
    data.steps = schedule.steps
    mixed = settings.strategy == "random"
    for source, weight, taken in zip(data.sources, data.weights, schedule.taken.tolist(), strict=True):
        source.steps = None if mixed else taken // effective_batch
        if total is None:
            source.left_over = max(0, int((source.pairs or 0) * weight) - taken)


def _check_sources(settings: PlanSettings, train_data: str, found: DataCheck) -> None:
    components = train_data.split("::")

    def opened(text: str, weights: str | None = None) -> tuple[Source, ...]:
        return parse_sources(
            text,
            weights,
            captions=settings.captions,
            on_bad_sample=settings.on_bad_sample,
            timeout_seconds=settings.loader_timeout,
        )

    try:
        sources = opened(train_data, settings.train_data_upsampling_factors)
    except UserError as error:
        for component in components:
            try:
                sources = opened(component)
            except UserError as own:
                _add_absent(settings, component, str(own), found)
            else:
                for source in sources:
                    _add_source(settings, source, component, found)
        if all(source.pairs and source.state != "assumed" for source in found.sources):
            raise error  # nothing is missing: names or weights are wrong
        found.weights = (1.0,) * len(found.sources)
        if settings.train_data_upsampling_factors is not None:
            found.notes.append("--train-data-upsampling-factors are not counted until all sources are there.")
        return
    found.weights = tuple(source.weight for source in sources)
    if len(sources) > len(components):  # a clustering is a source each cluster
        components = [component for component in components for _ in opened(component)]
    for source, component in zip(sources, components, strict=True):
        _add_source(settings, source, component, found)


def _location(component: str) -> tuple[str, str]:
    match = NAME.fullmatch(component)
    where = match["shards"] if match else component
    return (match["name"] if match else Path(where).name or where), where


def _add_source(settings: PlanSettings, source: Source, component: str, found: DataCheck) -> None:
    row = SourceCheck(source.name, _location(component)[1], source.layout, source.num_samples)
    found.sources.append(row)
    troubles: list[Missing] = []
    if source.table is None and source.picked is None:  # a clustering knows its shards' sizes, and has compared them
        unlisted = _unlisted(source.shards)
        if unlisted:
            row.state = "counted, no sizes.json"
            folders = sorted({str(Path(local_path(shard) or shard).parent) for shard in unlisted})
            found.notes.append(
                f"{source.name}: no sizes.json lists {len(unlisted)} of its shards, so that each start counts them; "
                f"run zerovl data index {folders[0]}"
            )
        troubles = _shard_troubles(settings, source)
    if not troubles:
        reason = _first_sample(source)
        if reason is not None:
            advice = "look with zerovl data check at the folder, and write the shard again"
            troubles.append(Missing(f"{source.name}: its first sample cannot be used ({reason})", advice))
    if troubles:
        row.state = "broken"
        found.missing += troubles
    else:
        found.opened += (source,)


def _unlisted(shards: Sequence[str]) -> list[str]:
    """Local shards that no sizes.json in their folder lists."""
    tables: dict[Path, set[str]] = {}
    unlisted = []
    for shard in shards:
        path = local_path(shard)
        if path is None:
            continue
        folder = Path(path).parent
        if folder not in tables:
            tables[folder] = set(read_sizes(folder) or ())
        if Path(path).name not in tables[folder]:
            unlisted.append(shard)
    return unlisted


def _shard_troubles(settings: PlanSettings, source: Source) -> list[Missing]:
    """Shards that are gone, and the first and the last one opened and counted."""
    local = {shard: local_path(shard) for shard in source.shards}
    gone = [shard for shard, path in local.items() if path is not None and not Path(path).is_file()]
    troubles = []
    if gone:
        troubles.append(
            Missing(
                f"{source.name}: {len(gone)} of {len(source.shards)} shards are not there, first {gone[0]}",
                f"fetch them again, or count what is there: zerovl data index {Path(local_path(gone[0]) or gone[0]).parent}",
            )
        )
    for index in sorted({0, len(source.shards) - 1}):
        path = local[source.shards[index]]
        if path is None or source.shards[index] in gone:
            continue
        try:
            count = count_tar_samples(path)
        except UserError as error:
            troubles.append(Missing(f"{source.name}: {str(error).rpartition('; ')[0]}", "fetch or write it again"))
            continue
        if settings.captions != "all" and count != source.sizes[index]:
            troubles.append(
                Missing(
                    f"{source.name}: {path} holds {count} samples, its sizes.json says {source.sizes[index]}",
                    f"zerovl data index {Path(path).parent}",
                )
            )
    return troubles


def _first_sample(source: Source) -> str | None:
    """Read and decode one sample as training does; what is wrong, or None."""
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
    return first.message if isinstance(first, Failure) else None


def _add_absent(settings: PlanSettings, component: str, reason: str, found: DataCheck) -> None:
    name, where = _location(component)
    row = SourceCheck(name, where, "-", None, "not here")
    found.sources.append(row)
    folder = _folder(where)
    if folder.exists():
        what, _, advice = reason.rpartition("; ")
        missing = Missing(f"{name}: {what}", advice)
        row.state = "broken"
    else:
        missing = Missing(f"{name}: there is no {folder}", _made_by(name, folder))
    if settings.assume is not None and row.state == "not here":
        if name in TABLE_2:
            row.pairs, row.state = TABLE_2[name].images, "assumed"
        elif settings.train_num_samples is not None:
            row.state = "assumed"
        if row.state == "assumed":
            found.elsewhere.append(missing)
            return
    found.missing.append(missing)


def _folder(where: str) -> Path:
    """The folder that a component of --train-data lies in: itself, or that of its shards or table."""
    before, brace, _ = (local_path(where) or where).partition("{")
    named_file = bool(brace and not before.endswith("/")) or Path(before).suffix in (".tar", ".csv", ".tsv")
    return Path(before).parent if named_file else Path(before)


def _made_by(name: str, folder: Path) -> str:
    if name in MADE_BY_US:
        return f"zerovl data {name} --out {folder}"
    if name in EMOJI_SOURCES:
        return f"zerovl data emoji --out {folder.parent}"
    return "correct the path, or write shards as docs/data.md tells"


def _check_retrieval(settings: PlanSettings, found: DataCheck) -> None:
    if settings.retrieval_data is None:
        return
    for name, path in parse_retrieval_data(settings.retrieval_data).items():
        try:
            opened = open_retrieval_set(path)
        except UserError as error:
            found.retrieval[name] = "not here"
            absent = not Path(path).exists()
            what = f"{name}: there is no {path}" if absent else f"{name}: {error}"
            missing = Missing(what, _made_by(name, Path(path)))
            (found.elsewhere if absent and settings.assume is not None else found.missing).append(missing)
        else:
            found.retrieval[name] = f"{len(opened):,} images, {opened.num_captions():,} captions"
