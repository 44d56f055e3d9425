"""The teachers that `--teacher` names, for training and for `zerovl plan`: a folder of embeddings, or shards with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.views import StoredTeachers
from open_clip_zerovl.distill.rows import TeacherRows, open_teacher_folder
from open_clip_zerovl.distill.shards import PREFIX, InShards, parse_widths
from open_clip_zerovl.embeddings.sources import augmentation_of
from open_clip_zerovl.embeddings.store import Store


def open_teachers(teacher: str | None, captions: str | None) -> Store | InShards | None:
    """The teachers of a run.

    Args:
        teacher, captions: the flags of these names.

    Raises:
        UserError: embeddings that are not there or not finished, or captions of which none are stored.
    """
    if teacher is None:
        return None
    if not teacher.startswith(PREFIX):
        return open_teacher_folder(teacher)
    return InShards(parse_widths(teacher), captions)


@dataclass(frozen=True)
class Shown:
    """The settings of a mixture for a run's teachers.

    Attributes:
        teachers: `Preprocessing.teachers`.
        in_shards: `Preprocessing.shard_teachers`.
        pixel_path: the run's pixel path with these teachers.
    """

    teachers: StoredTeachers | None
    in_shards: InShards | None
    pixel_path: str


def shown_by(
    opened: Store | InShards | None,
    sources: Sequence[Source],
    transform: Callable[[Any], Tensor],
    *,
    pixel_path: str,
    captions: str | None,
) -> Shown:
    """The teachers for these sources, checked against the run's augmentation.

    Args:
        transform: of training, up to uint8 (`images.split_normalize`).

    Raises:
        UserError: sources or an augmentation that the teachers have not seen.
    """
    if isinstance(opened, Store):
        augmentation = augmentation_of(transform, pixel_path)
        return Shown(TeacherRows(opened, sources, augmentation=augmentation, captions=captions), None, pixel_path)
    if opened is not None:
        opened.check(transform)
        return Shown(opened, opened, "pil")  # PIL's operations are stored
    return Shown(None, None, pixel_path)
