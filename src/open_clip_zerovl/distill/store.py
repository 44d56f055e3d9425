"""A folder of teachers' embeddings: of every view of each picture, and of every caption.

    DIR/teacher.json           what they are of: sources and their shards, views, augmentation, teachers
    DIR/a.done.npy             (units,) uint8; unit by unit of source a: 1 once its rows are on the disk
    DIR/a.captions.npy         (n + 1,) int64: where each sample's captions begin among the T; only where samples have several
    DIR/a.0.images.npy         (n, V, D) of teacher 0
    DIR/a.0.texts.npy          (T, D)

`n` samples of a source in the order of its shards, `T` captions of them, `V` views, `D` width of a teacher. Rows are of unit
length, in float16, or in bfloat16, which numpy does not know: those files hold its bits as int16. A row of zeros stands for a
picture or caption that could not be shown. Files are mapped, not loaded.

A folder without teacher.json is not believed: it is written last. A unit's mark is written after its rows have reached the
disk, so that a killed call goes on with the units that lack their marks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import locked, write_atomically
from open_clip_zerovl.data.captions import caption_starts
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.distill.manifest import MANIFEST_FILE, Manifest, difference, read_manifest, units_of

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_STORED_AS = {"float16": np.float16, "bfloat16": np.int16}
_LOOKED_AT = 256  # rows of each file that are checked when a folder is opened; every row is when it is read


class TeacherStore:
    """A folder of embeddings, opened. Use `create` to write one, `open` to read one."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @classmethod
    def create(cls, folder: Path, manifest: Manifest, sources: Sequence[Source]) -> TeacherStore:
        """The folder that is to hold these embeddings: made now, or begun by an earlier call.

        Raises:
            UserError: it holds other embeddings, or cannot be written.
        """
        store = cls(folder, manifest)
        try:
            with locked(folder):  # several calls may share the work
                if (stored := read_manifest(folder)) is not None:
                    found = difference(stored, manifest)
                    if found is not None:
                        raise UserError(f"{folder} holds embeddings with {found}; give a new folder with --out")
                    return store
                store._make_files(sources)
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error}); make room, or give another folder") from error
        return store

    def _make_files(self, sources: Sequence[Source]) -> None:
        for index, source in enumerate(sources):
            for teacher in range(len(self.manifest.teachers)):
                for kind in ("images", "texts"):
                    self._make_file(index, teacher, kind)
            starts = caption_starts(source)
            if starts is not None:
                _write_array(self.file(index, "captions"), starts)
            _write_array(self.file(index, "done"), np.zeros(len(units_of(source)), np.uint8))
        write_atomically(self.folder / MANIFEST_FILE, self.manifest.as_json())  # a folder without it is not believed

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> TeacherStore:
        """A folder whose embeddings are complete, checked but for the rows' values, of which some are looked at.

        Raises:
            UserError: no such folder, embeddings that are not finished, or files that are cut short or hold no numbers.
        """
        path = Path(folder).expanduser()
        manifest = read_manifest(path)
        if manifest is None:
            raise UserError(
                f"{path} holds no {MANIFEST_FILE}; make a folder of teachers' embeddings with `zerovl teacher`"
            )
        store = cls(path, manifest)
        for index, source in enumerate(manifest.sources):
            done = store.done(index)
            if not done.all():
                raise UserError(
                    f"the teachers' embeddings in {path} are not finished: {int((done == 0).sum())} of {len(done)} parts of "
                    f"source {source['name']!r} are missing; call `zerovl teacher` with the same words again"
                )
            store._check_captions(index)
            for teacher in range(len(manifest.teachers)):
                for kind in ("images", "texts"):
                    rows = store.rows(index, teacher, kind)
                    some = np.linspace(0, len(rows) - 1, min(len(rows), _LOOKED_AT)).astype(int)
                    if not bool(torch.isfinite(store.tensor(rows[some])).all()):
                        raise UserError(not_finite(store.file(index, kind, teacher)))
        return store

    # --- files -------------------------------------------------------------------------------------------------------

    def file(self, source: int, kind: str, teacher: int | None = None) -> Path:
        """The path of a source's array: `images` and `texts` of a teacher, `captions` and `done` without one."""
        name = self.manifest.sources[source]["name"]
        return self.folder / ".".join([name, *([] if teacher is None else [str(teacher)]), kind, "npy"])

    def _shape(self, source: int, teacher: int, kind: str) -> tuple[int, ...]:
        about, width = self.manifest.sources[source], self.manifest.teachers[teacher]["width"]
        return (about["samples"], self.manifest.views, width) if kind == "images" else (about["captions"], width)

    def _make_file(self, source: int, teacher: int, kind: str) -> None:
        path = self.file(source, kind, teacher)
        path.unlink(missing_ok=True)
        shape = self._shape(source, teacher, kind)
        mapped = np.lib.format.open_memmap(path, mode="w+", dtype=_STORED_AS[self.manifest.dtype], shape=shape)
        del mapped
        with open(path, "r+b") as file:  # all of it now: a disk that fills up later would end the process by a signal
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)

    def rows(self, source: int, teacher: int, kind: str, *, mode: str = "r") -> np.ndarray:
        """A file of embeddings, mapped.

        Raises:
            UserError: it is gone, cut short, or of another shape than teacher.json says.
        """
        shape = self._shape(source, teacher, kind)
        return _mapped(self.file(source, kind, teacher), shape, _STORED_AS[self.manifest.dtype], mode)

    def done(self, source: int, *, mode: str = "r") -> np.ndarray:
        """(units,) 1 for each unit whose rows are on the disk, mapped."""
        return _mapped(self.file(source, "done"), None, np.uint8, mode)

    def caption_starts(self, source: int) -> np.ndarray | None:
        """(n + 1,) where the captions of each sample begin; None where each has one."""
        about = self.manifest.sources[source]
        if about["captions"] == about["samples"] and not self.file(source, "captions").exists():
            return None
        return _mapped(self.file(source, "captions"), (about["samples"] + 1,), np.int64, "r")

    def _check_captions(self, source: int) -> None:
        starts = self.caption_starts(source)
        whole = starts is None or (
            starts[0] == 0
            and starts[-1] == self.manifest.sources[source]["captions"]
            and bool((np.diff(starts) >= 0).all())
        )
        if not whole:
            raise UserError(
                f"{self.file(source, 'captions')} does not say where the captions of each sample begin, it is damaged; make "
                "the teachers' embeddings again"
            )

    def tensor(self, rows: np.ndarray) -> Tensor:
        """Rows of a file as a tensor of the embeddings' dtype, copied."""
        return torch.from_numpy(np.array(rows)).view(DTYPES[self.manifest.dtype])

    def array(self, rows: Tensor) -> np.ndarray:
        """Embeddings as a file holds them."""
        stored = rows.to("cpu", DTYPES[self.manifest.dtype])
        return (stored.view(torch.int16) if self.manifest.dtype == "bfloat16" else stored).numpy()

    @property
    def digest(self) -> str:
        """Changes with anything that the embeddings are of."""
        return hashlib.blake2b(self.manifest.as_json().encode(), digest_size=8).hexdigest()


def _write_array(path: Path, array: np.ndarray) -> None:
    path.unlink(missing_ok=True)
    np.save(path, array, allow_pickle=False)


def _mapped(path: Path, shape: tuple[int, ...] | None, dtype: Any, mode: str) -> np.ndarray:
    try:
        found = np.load(path, mmap_mode=mode, allow_pickle=False)  # type: ignore[arg-type]
    except FileNotFoundError as error:
        raise UserError(f"{path} is gone; make the teachers' embeddings again with `zerovl teacher`") from error
    except (OSError, ValueError, EOFError) as error:  # a file shorter than its header says cannot be mapped
        raise UserError(
            f"{path} cannot be read, it is cut short or damaged ({error}); copy it again, or make the "
            "teachers' embeddings again"
        ) from error
    if found.dtype != dtype or (shape is not None and found.shape != shape):
        raise UserError(
            f"{path} holds {found.dtype} of shape {found.shape}, and {MANIFEST_FILE} says {np.dtype(dtype)} of {shape}; make "
            "the teachers' embeddings again"
        )
    return found


def not_finite(path: Path) -> str:
    """The sentence for a file with rows that are no numbers."""
    return f"{path} holds rows that are no numbers (NaN or infinite); make the teachers' embeddings again with `zerovl teacher`"
