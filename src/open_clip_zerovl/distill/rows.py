"""Stored embeddings in training: each sample's view, and the teachers' embeddings of it (`data.views.StoredTeachers`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.core.claim import difference
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.names import caption_fields, caption_sets
from open_clip_zerovl.data.reading import RawSample
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.views import view_picture
from open_clip_zerovl.embeddings.fingerprint import describe_source, difference_of_sources
from open_clip_zerovl.embeddings.store import (
    DTYPES,
    Manifest,
    Rows,
    Store,
)
from open_clip_zerovl.shards.marks import content_of, digests_of, file_marks

COMMAND = "zerovl teacher"


def open_teacher_folder(folder: str | Path) -> Store:
    """A folder of finished embeddings by teachers. UserError for any other folder, or a damaged one."""
    store = Store.open(folder, remedy=COMMAND)
    if "starts" not in store.rows:
        raise UserError(
            f"{folder} holds embeddings of another kind; make teachers' embeddings with `{COMMAND}`"
        )
    return store


def widths_of(manifest: Manifest) -> tuple[int, ...]:
    """D of each teacher."""
    return tuple(
        shape[-1] for name, (_, shape) in manifest.arrays.items() if name.endswith(".images")
    )


class TeacherRows:
    """The embeddings of a store for the sources of a run (`data.views.StoredTeachers`).

    Args:
        store: of `open_teacher_folder`.
        sources: the run's sources; each has its embeddings under its name, or is a cluster of such a source. The store may
            hold more.
        augmentation: the run's, see `augmentation_of`.
        captions: the run's `--captions`: that of the store, or the fields together of which the store's are drawn.

    Raises:
        UserError: a source without embeddings, embeddings of other data, or views of another augmentation.
    """

    def __init__(
        self,
        store: Store,
        sources: Sequence[Source],
        *,
        augmentation: Sequence[str],
        captions: str | None,
    ) -> None:
        self.folder = store.folder
        self.manifest = store.manifest
        self.digest = store.digest
        facts = self.manifest.facts
        views = {"augmentation": facts["augmentation"]}
        changed = difference(views, {"augmentation": list(augmentation)})
        if changed is not None:
            raise UserError(
                f"the teacher {self.folder} {changed}; give the run the augmentation and image size that the teachers had, or "
                "embed anew with those of the run"
            )
        held = facts["captions"]
        # in this order their captions are numbered
        drawn = tuple(name for name, _ in caption_fields(held))
        if captions != held and (not drawn or drawn != caption_sets(captions)):
            raise UserError(
                f"the teachers of {self.folder} read captions with --captions {held or 'left out'}, and this run has "
                f"{captions or 'left it out'}; give the same"
            )
        self._names = [source.name for source in sources]
        self._sizes = [source.num_samples for source in sources]
        places = [self._place_of(source) for source in sources]
        self._stored = [index for index, _ in places]
        # of a cluster, its samples' numbers in the stored source
        self._cluster_rows = [rows for _, rows in places]
        self._begins = self.manifest.begins
        self.widths = widths_of(self.manifest)

    def _place_of(self, source: Source) -> tuple[int, np.ndarray | None]:
        """The number of the stored source, and the rows in it of a cluster's samples."""
        names = [stored["name"] for stored in self.manifest.sources]
        if source.name in names:
            index = names.index(source.name)
            stored = self.manifest.sources[index]
            changed = difference_of_sources(stored, describe_source(source, stored["marks"]))
            if changed is None:
                return index, None
            raise UserError(
                f"the embeddings in {self.folder} do not fit source {source.name!r}: {changed}; embed it anew with `{COMMAND}`"
            )
        for index, stored in enumerate(self.manifest.sources):
            rows = rows_of_cluster(source, stored)
            if rows is not None:
                return index, rows
        raise UserError(
            f"the teachers of {self.folder} have not seen source {source.name!r}, only {', '.join(names)}; embed it with "
            f"`{COMMAND}`, or leave it out"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without the mapped files: another process maps them itself."""
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_rows", "_starts")
        }

    @cached_property
    def _rows(self) -> list[tuple[Rows, Rows]]:
        """(images, texts) of each teacher."""
        kinds = [
            [self._array(f"{teacher}.{kind}") for kind in ("images", "texts")]
            for teacher in range(len(self.widths))
        ]
        return [(images, texts) for images, texts in kinds]

    @cached_property
    def _starts(self) -> np.ndarray:
        return self._array("starts").read(slice(None))

    def _array(self, name: str) -> Rows:
        return Rows(self.folder / f"{name}.npy", self.manifest.arrays[name])

    def show(
        self, sample: RawSample, image: Any, transform: Callable[[Any], Tensor], draw: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `data.views.StoredTeachers`."""
        facts, stored = self.manifest.facts, self._stored[sample.source]
        view = draw % facts["views"]
        row = sample.position % self._sizes[sample.source]
        rows = self._cluster_rows[sample.source]
        if rows is not None:
            row = int(rows[row])
        picture = view_picture(
            transform, image, seed=facts["seed"], source=stored, sample=row, view=view
        )
        row += self._begins[stored]
        first = int(self._starts[row])
        # captions of a sample; with None or all each sample has one, whatever its number
        several = facts["captions"] not in (None, "all")
        shown = [first + several * number for number, _ in sample.shown]
        vectors = []
        for images, texts in self._rows:
            vectors += [images.read((row, view)), *(texts.read(text) for text in shown)]
        stored, dtype = np.concatenate(vectors), DTYPES[facts["dtype"]]
        if not all(vector.any() for vector in vectors):
            raise UserError(
                f"{self.folder} has no embedding of sample {sample.key!r} of source {self._names[sample.source]!r}, which "
                f"could not be read then, and can be read now; embed it again with `{COMMAND}`"
            )
        widths = [width for width in self.widths for _ in range(1 + len(shown))]
        return picture, torch.from_numpy(stored).view(dtype).split(widths)


def rows_of_cluster(source: Source, stored: dict[str, Any]) -> np.ndarray | None:
    """(n,) the samples of a cluster in a stored source of all the shards that it picks from; None for another source."""
    if source.picked is None or stored["picked"] is not None:
        return None
    begins = np.concatenate([[0], np.cumsum(stored["sizes"], dtype=np.int64)])
    place = {
        content_of(mark): int(begin) for mark, begin in zip(stored["marks"], begins, strict=False)
    }
    rows = source.picked.astype(np.int64)
    marks_by_shard = file_marks(
        source.shards, digests_of(stored["marks"]), f"checking {source.name}"
    )
    for number, shard in enumerate(source.shards):
        begin = place.get(content_of(marks_by_shard[shard]))
        if begin is None:
            return None
        rows[source.starts[number] : source.starts[number + 1]] += begin
    return rows
