"""`zerovl teacher`: frozen teachers look once at V views of each picture and at each caption; what they see in them is kept.

    shard --> sample --> V views (the student's transform, uint8) --> each teacher's size and normalisation --> embeddings

The views are pictures of the student's size, as training shows them; a teacher of another size sees them resized. A caption is
read as it is, before any word augmentation.

`n` samples of a source, `V` views, `b` samples of a batch, `D` width of a teacher. The work is done unit by unit
(`store.units_of`). A unit's batches do not depend on where a call began, so that a call that goes on ends with the same bits.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable
from open_clip_zerovl.data.captions import caption_starts
from open_clip_zerovl.data.images import split_normalize
from open_clip_zerovl.data.names import PIXEL_PATH
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.data.transforms import with_auto_augment
from open_clip_zerovl.distill.manifest import Manifest, augmentation_of, describe_source, read_manifest, units_of
from open_clip_zerovl.distill.models import Teacher
from open_clip_zerovl.distill.reading import Batch, Units
from open_clip_zerovl.distill.store import DTYPES, TeacherStore

FLUSH_SECONDS = 30.0  # between two times that finished units are marked
_TIMED_PICTURES = 16  # whose embedding is timed on a CPU; a GPU takes a whole batch


@dataclass(frozen=True)
class TeacherSettings:
    """How pictures are augmented, as in the training to come, and how embeddings are kept.

    Attributes:
        views: V, augmentations of each picture.
        image_size: side in pixels of the student's pictures.
        interpolation, aug_cfg, auto_augment, pixel_path, captions, on_bad_sample: training's flags of these names.
        seed: of the augmentations.
        dtype: of the embeddings: float16 or bfloat16.
        amp: run the teachers in bf16.
        part: (i, n): do every n-th unit from number i on, so that n calls share the work.
    """

    views: int = 4
    image_size: int = 224
    interpolation: str = "bicubic"
    aug_cfg: dict[str, Any] = field(default_factory=dict)
    auto_augment: str | None = None
    pixel_path: str = PIXEL_PATH
    captions: str | None = None
    on_bad_sample: str = "replace"
    seed: int = 0
    dtype: str = "float16"
    amp: bool = False
    part: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"embeddings cannot be kept as {self.dtype!r}; give {' or '.join(DTYPES)}")
        if min(self.views, self.image_size) < 1:
            raise UserError(f"views and image size must be 1 or more, but are {self.views} and {self.image_size}")

    def transform(self) -> Callable[[Any], Tensor]:
        """Picture -> view (3, S, S) uint8: the student's training transform up to its normalisation."""
        cfg = PreprocessCfg(size=self.image_size, interpolation=self.interpolation)
        try:
            transform = image_transform_v2(cfg, is_train=True, aug_cfg=self.aug_cfg)
        except TypeError as error:  # a key that open_clip does not know
            raise UserError(f"--aug-cfg has a key that open_clip does not know ({error})") from error
        if self.auto_augment is not None:
            transform = with_auto_augment(transform, self.auto_augment)
        return split_normalize(transform)[0]


def embed_sources(
    data: str,
    encoders: Sequence[Encoder],
    out: str | Path,
    settings: TeacherSettings | None = None,
    *,
    progress: bool = True,
) -> TeacherStore:
    """Embed all views and captions of the sources by each teacher, or go on where an earlier call stopped.

    Args:
        data: sources in `--train-data` syntax.
        encoders: the teachers; batch size and loader workers are the first one's.
        out: a folder for the embeddings.

    Raises:
        UserError: sources or teachers that cannot be opened, a folder of other embeddings, too little room, a sample that
            cannot be shown where `on_bad_sample` is "fail", or a teacher that makes no numbers of one.
    """
    settings, out = settings or TeacherSettings(), Path(out).expanduser()
    sources = parse_sources(data, captions=settings.captions, on_bad_sample=settings.on_bad_sample)
    check_writable(out, folder=True)
    transform = settings.transform()
    teachers = [Teacher.load(encoder, amp=settings.amp) for encoder in encoders]
    manifest = Manifest(
        views=settings.views,
        seed=settings.seed,
        dtype=settings.dtype,
        augmentation=augmentation_of(transform, settings.pixel_path),
        captions=settings.captions,
        teachers=[teacher.description for teacher in teachers],
        sources=[{**describe_source(source), "captions": _count_captions(source)} for source in sources],
    )
    if read_manifest(out) is None:
        _require_room(out, manifest.bytes_of_embeddings)
    store = TeacherStore.create(out, manifest, sources)
    units = [(index, number) for index, source in enumerate(sources) for number in range(len(units_of(source)))]
    part, parts = settings.part
    done = [store.done(index, mode="r+") for index in range(len(sources))]
    todo = [unit for place, unit in enumerate(units) if place % parts == part and not done[unit[0]][unit[1]]]
    if progress:
        _announce(store, teachers, sources, todo, encoders[0].batch_size)
    reader = Units(
        sources,
        todo,
        transform,
        [teacher.eye for teacher in teachers],
        views=settings.views,
        seed=settings.seed,
        pixel_path=settings.pixel_path,
        strict=settings.on_bad_sample == "fail",
        batch_size=encoders[0].batch_size,
    )
    _work_off(store, teachers, reader, done, encoders[0], progress=progress)
    if progress and all(marks.all() for marks in done):
        print(f"All embeddings are in {out}. Train with --teacher {out}")
    return store


def _count_captions(source: Source) -> int:
    starts = caption_starts(source)
    return source.num_samples if starts is None else int(starts[-1])


# ---------------------------------------------------------------------------------------------------------------------
# Views to embeddings
# ---------------------------------------------------------------------------------------------------------------------


def _work_off(
    store: TeacherStore,
    teachers: Sequence[Teacher],
    reader: Units,
    done: Sequence[Any],
    encoder: Encoder,
    *,
    progress: bool,
) -> None:
    files = [
        [(store.rows(s, t, "images", mode="r+"), store.rows(s, t, "texts", mode="r+")) for t in range(len(teachers))]
        for s in range(len(reader.sources))
    ]
    finished: list[tuple[int, int]] = []
    lost: dict[str, dict[str, int]] = {}
    flushed = time.monotonic()

    def flush() -> None:
        for source in {source for source, _ in finished}:
            for pair in files[source]:
                for rows in pair:
                    rows.flush()  # type: ignore[attr-defined]
        for source, unit in finished:  # rows first, then the marks that vouch for them
            done[source][unit] = 1
        for source in {source for source, _ in finished}:
            done[source].flush()
        finished.clear()

    loader = DataLoader(reader, batch_size=None, num_workers=encoder.workers, collate_fn=_as_it_is)
    total = sum(reader.sources[s].num_samples for s in {s for s, _ in reader.todo})
    bar = tqdm(total=total, desc="embeddings", unit="sample", disable=not progress)
    for batch in loader:
        if isinstance(batch, UserError):
            flush()
            raise batch
        for note in batch.notes:
            tqdm.write(f"{note}. Its samples get no embeddings.")
        for reason, count in batch.lost.items():
            of_source = lost.setdefault(reader.sources[batch.source].name, {})
            of_source[reason] = of_source.get(reason, 0) + count
        _embed(store, teachers, batch, files[batch.source], encoder.batch_size)
        bar.update(len(batch.rows))
        if batch.last:
            finished.append((batch.source, batch.unit))
            if time.monotonic() - flushed > FLUSH_SECONDS:
                flush()
                flushed = time.monotonic()
    bar.close()
    flush()
    for name, reasons in lost.items():
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        print(
            f"Source {name}: {sum(reasons.values())} samples cannot be shown ({listed}); training replaces them by others."
        )


def _as_it_is(item: Any) -> Any:
    return item


def _embed(store: TeacherStore, teachers: Sequence[Teacher], batch: Batch, files: Sequence[Any], size: int) -> None:
    if not batch.rows:
        return
    v = store.manifest.views
    for number, teacher in enumerate(teachers):
        images, texts = files[number]
        of_views = torch.cat([teacher.images(part).cpu() for part in batch.views[number].split(size)])  # (b * V, D)
        of_texts = [teacher.texts(batch.captions[at : at + size]).cpu() for at in range(0, len(batch.captions), size)]
        for found in (of_views, *of_texts):
            if not bool(torch.isfinite(found).all()):
                raise UserError(
                    f"the teacher {teacher.description['model']} makes no numbers (NaN or infinite) of a sample of source "
                    f"{store.manifest.sources[batch.source]['name']!r} between numbers {batch.rows[0]} and {batch.rows[-1]}; "
                    "look at its weights, or leave --amp out"
                )
        images[batch.rows] = store.array(of_views).reshape(len(batch.rows), v, -1)
        texts[batch.caption_rows] = store.array(torch.cat(of_texts))


# ---------------------------------------------------------------------------------------------------------------------
# What is said before
# ---------------------------------------------------------------------------------------------------------------------


def _require_room(out: Path, needed: int) -> None:
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"the embeddings take {_size(needed)}, and {folder} has {_size(free)} free; take fewer --views, or a larger disk"
        )


def _announce(
    store: TeacherStore,
    teachers: Sequence[Teacher],
    sources: Sequence[Source],
    todo: Sequence[tuple[int, int]],
    batch: int,
) -> None:
    manifest = store.manifest
    samples = sum(
        int(source.starts[end] - source.starts[begin])
        for index, source in enumerate(sources)
        for number, (begin, end) in enumerate(units_of(source))
        if (index, number) in set(todo)
    )
    captions = (
        samples * sum(one["captions"] for one in manifest.sources) / sum(one["samples"] for one in manifest.sources)
    )
    seconds = 0.0
    for teacher in teachers:
        timed = batch if teacher.device.type != "cpu" else min(batch, _TIMED_PICTURES)
        a_view, a_text = (spent / timed for spent in teacher.seconds_of(timed))
        seconds += samples * manifest.views * a_view + captions * a_text
        print(
            f"{teacher.description['model']}: {1 / a_view:,.0f} views/s, {1 / a_text:,.0f} captions/s on {teacher.device}"
        )
    print(
        f"{samples:,} samples, {manifest.views} views each, of {len(sources)} sources are left to embed by {len(teachers)} "
        f"teachers: about {_duration(seconds)} of the teachers' time (reading comes beside it), "
        f"{_size(manifest.bytes_of_embeddings)} in {store.folder}"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min"
        if minutes
        else "less than a minute"
    )
