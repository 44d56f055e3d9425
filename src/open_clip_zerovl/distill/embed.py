"""`zerovl teacher`: frozen teachers embed V views of each picture and each caption once; the embeddings are stored.

    shard --> sample --> V views (the student's transform, uint8) --> each teacher's size and normalisation --> embeddings

The views are pictures of the student's size, as training shows them; a teacher of another size sees them resized. A caption is
read as it is, before any word augmentation.

A folder of teachers (`embeddings.store`) holds for teacher N

    N.images    (n, V, D) rows of unit length in float16 or bfloat16
    N.texts     (T, D)
    starts      (n + 1,) where each sample's captions begin among the T

`n` samples and `T` captions of all sources, `V` views, `D` width of a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_clip.transform import PreprocessCfg, image_transform_v2
from torch import Tensor

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.files import check_writable
from open_clip_zerovl.data.images import split_normalize
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.data.transforms import with_auto_augment
from open_clip_zerovl.distill.teacher_flags import TeacherViewFlags
from open_clip_zerovl.embeddings.embed import embed, missing_units, require_room, size_words
from open_clip_zerovl.embeddings.encoder import FrozenModel
from open_clip_zerovl.embeddings.fingerprint import describe_source
from open_clip_zerovl.embeddings.sources import SourceSamples, Views, augmentation_of
from open_clip_zerovl.embeddings.store import WEIGHTS, Manifest, Store, read_manifest


@dataclass(frozen=True)
class TeacherSettings(TeacherViewFlags):
    """Settings of the augmentation, which later trainings repeat, and of the stored embeddings."""

    def transform(self) -> Callable[[Any], Tensor]:
        """Picture -> view (3, S, S) uint8: the student's training transform up to its normalisation."""
        return view_transform(self.image_size, self.interpolation, self.aug_cfg, self.auto_augment)


def view_transform(
    size: int | tuple[int, int],
    interpolation: str,
    aug_cfg: dict[str, Any],
    auto_augment: str | None = None,
) -> Callable[[Any], Tensor]:
    """open_clip's training transform up to its normalisation: picture -> view (3, H, W) uint8."""
    cfg = PreprocessCfg(size=size, interpolation=interpolation)
    transform = image_transform_v2(cfg, is_train=True, aug_cfg=aug_cfg)
    if auto_augment is not None:
        transform = with_auto_augment(transform, auto_augment)
    return split_normalize(transform)[0]


def embed_sources(
    data: str,
    encoders: Sequence[Encoder],
    out: str | Path,
    settings: TeacherSettings | None = None,
) -> Store:
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
    views = Views(transform, settings.views, settings.seed, settings.pixel_path)
    samples = SourceSamples(sources, views=views, strict=settings.on_bad_sample == "fail")
    starts = samples.caption_starts
    teachers = [FrozenModel.load(encoder, amp=settings.amp) for encoder in encoders]
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {"starts": ("int64", (len(starts),))}
    for number, teacher in enumerate(teachers):
        width = teacher.texts(["a"]).shape[1]
        arrays[f"{number}.images"] = (settings.dtype, (len(starts) - 1, settings.views, width))
        arrays[f"{number}.texts"] = (settings.dtype, (int(starts[-1]), width))
    facts = {
        "use": "teachers",
        "views": settings.views,
        "seed": settings.seed,
        "dtype": settings.dtype,
        "captions": settings.captions,
        "augmentation": augmentation_of(transform, settings.pixel_path),
        "model": [teacher.name for teacher in teachers],
        WEIGHTS: [digest for teacher in teachers for digest in teacher.fingerprints.values()],
    }
    earlier = read_manifest(out)
    known = earlier.marks if earlier else []
    manifest = Manifest(facts, [describe_source(source, known) for source in sources], arrays)
    if earlier is None:
        require_room(out, manifest)
    store = Store.create(out, manifest, given={"starts": starts})
    left = sum(
        samples.sizes[file]
        for unit in missing_units(store, samples.sizes, settings.part)
        for file in unit
    )
    print(
        f"{left:,} samples are left to embed, {settings.views} views each, {size_words(manifest.bytes)} in {out}"
    )
    lost = embed(
        store,
        teachers,
        samples,
        batch_size=encoders[0].batch_size,
        workers=encoders[0].workers,
        part=settings.part,
    )
    for name, reasons in lost.items():
        listed = ", ".join(
            f"{count} {reason}" for reason, count in sorted(reasons.items()) if count
        )
        if listed:
            print(
                f"Source {name}: {sum(reasons.values())} samples cannot be shown ({listed}); training replaces them."
            )
    if store.done.all():
        print(f"All embeddings are in {out}. Train with --teacher {out}")
    return store
