"""Stored embeddings in training: each sample's view, and what the teachers made of it (`data.views.StoredTeachers`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.names import caption_fields, caption_sets
from open_clip_zerovl.data.reading import RawSample
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.views import view_picture
from open_clip_zerovl.distill.manifest import (
    describe_source,
    difference_of_sources,
    difference_of_steps,
    rows_of_cluster,
)
from open_clip_zerovl.distill.store import DTYPES, TeacherStore, not_finite

_EXPONENT_BITS = {"float16": np.int16(0x7C00), "bfloat16": np.int16(0x7F80)}  # all of them are set in what is no number


class TeacherRows:
    """The embeddings of a store for the sources of a run (`data.views.StoredTeachers`).

    Args:
        store: opened.
        sources: of the run, in its order; each has its embeddings by name, or is a cluster of a source that has. Others in the
            store are left alone.
        augmentation: of the run, see `augmentation_of`.
        captions: the run's `--captions`: that of the store, or the fields together of which the store's are drawn.

    Raises:
        UserError: a source without embeddings, embeddings of other data, or views of another augmentation.
    """

    def __init__(
        self, store: TeacherStore, sources: Sequence[Source], *, augmentation: Sequence[str], captions: str | None
    ) -> None:
        manifest = store.manifest
        if list(augmentation) != manifest.augmentation:
            raise UserError(
                f"the teachers of {store.folder} saw other pictures than this run shows: "
                f"{difference_of_steps(manifest.augmentation, augmentation)}. Give the run the augmentation and image size "
                "that the teachers had, or embed anew with those of the run"
            )
        drawn = tuple(
            name for name, _ in caption_fields(manifest.captions)
        )  # in this order their captions are numbered
        if captions != manifest.captions and (not drawn or drawn != caption_sets(captions)):
            raise UserError(
                f"the teachers of {store.folder} read captions with --captions {manifest.captions or 'left out'}, and this run "
                f"has {captions or 'left it out'}; give the same"
            )
        names = [about["name"] for about in manifest.sources]
        self.store, self._names = store, [source.name for source in sources]
        self._sizes = [source.num_samples for source in sources]
        self._stored: list[int] = []
        self._rows: list[np.ndarray | None] = []  # of a cluster, its samples' numbers in the stored source
        for source in sources:
            if source.name not in names:
                whole = next(
                    (
                        (index, rows)
                        for index, about in enumerate(manifest.sources)
                        if (rows := rows_of_cluster(source, about)) is not None
                    ),
                    None,
                )
                if whole is not None:
                    self._stored.append(whole[0])
                    self._rows.append(whole[1])
                    continue
                raise UserError(
                    f"the teachers of {store.folder} have not seen source {source.name!r}, only {', '.join(names)}; embed it "
                    "with `zerovl teacher`, or leave it out"
                )
            index = names.index(source.name)
            stored = {key: value for key, value in manifest.sources[index].items() if key != "captions"}
            if (found := difference_of_sources(stored, describe_source(source))) is not None:
                raise UserError(
                    f"the embeddings in {store.folder} do not fit source {source.name!r}: {found}; embed it anew with `zerovl "
                    "teacher`"
                )
            self._stored.append(index)
            self._rows.append(None)
        self.widths = tuple(teacher["width"] for teacher in manifest.teachers)
        self.digest = store.digest

    def __getstate__(self) -> dict[str, Any]:
        """Without the mapped files: another process maps them itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_files"}

    @cached_property
    def _files(self) -> list[tuple[np.ndarray | None, list[tuple[np.ndarray, np.ndarray]]]]:
        """Of each source of the run: where captions begin, and (images, texts) of each teacher."""
        return [
            (
                self.store.caption_starts(index),
                # plain arrays over the mapped files: np.memmap makes an object of its own of each row
                [
                    (np.asarray(self.store.rows(index, t, "images")), np.asarray(self.store.rows(index, t, "texts")))
                    for t in range(len(self.widths))
                ],
            )
            for index in self._stored
        ]

    def show(
        self, sample: RawSample, image: Any, transform: Callable[[Any], Tensor], draw: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `data.views.StoredTeachers`."""
        manifest = self.store.manifest
        view = draw % manifest.views
        row = sample.position % self._sizes[sample.source]
        if (rows := self._rows[sample.source]) is not None:
            row = int(rows[row])
        picture = view_picture(
            transform, image, seed=manifest.seed, source=self._stored[sample.source], sample=row, view=view
        )
        starts, teachers = self._files[sample.source]
        first = row if starts is None else int(starts[row])
        shown = [first + (0 if starts is None else number) for number, _ in sample.shown]
        vectors = [rows for images, texts in teachers for rows in (images[row, view], *(texts[text] for text in shown))]
        bits = np.concatenate(vectors).view(np.int16)
        exponent = _EXPONENT_BITS[manifest.dtype]
        if bool(((bits & exponent) == exponent).any()) or not all(vector.any() for vector in vectors):
            self._refuse(sample, vectors)
        widths = [width for width in self.widths for _ in range(1 + len(shown))]
        return picture, torch.from_numpy(bits).view(DTYPES[manifest.dtype]).split(widths)

    def _refuse(self, sample: RawSample, vectors: Sequence[np.ndarray]) -> NoReturn:
        """Say which of a sample's embeddings (image and texts of each teacher in turn) cannot be used."""
        of_each = 1 + len(sample.shown)
        for number, vector in enumerate(vectors):
            if not bool(torch.isfinite(self.store.tensor(vector)).all()):
                kind = "texts" if number % of_each else "images"
                raise UserError(not_finite(self.store.file(self._stored[sample.source], kind, number // of_each)))
        raise UserError(
            f"the teachers of {self.store.folder} could not be shown sample {sample.key!r} of source "
            f"{self._names[sample.source]!r}, and training can: the data was mended since. Embed it anew with `zerovl teacher`"
        )
