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
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.data.captions import caption_starts
from open_clip_zerovl.data.images import ToBytes
from open_clip_zerovl.data.pixels import decode_pixels, pictures
from open_clip_zerovl.data.reading import RawSample
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.views import view_picture
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.files import locked, write_atomically
from open_clip_zerovl.tar.remote import local_path

MANIFEST_FILE = "teacher.json"
FORMAT = 1
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_STORED_AS = {"float16": np.float16, "bfloat16": np.int16}
_EXPONENT_BITS = {"float16": np.int16(0x7C00), "bfloat16": np.int16(0x7F80)}  # all of them are set in what is no number
UNIT_SAMPLES = 1024  # least samples of a unit, the work that a killed call may lose; it ends where a shard does
_LOOKED_AT = 256  # rows of each file that are checked when a folder is opened; every row is when it is read
_EDGE_BYTES = 1 << 16  # of a shard, at both ends, which its mark is made of

Unit = tuple[int, int]  # first shard, and the one after the last


# ---------------------------------------------------------------------------------------------------------------------
# What embeddings are of
# ---------------------------------------------------------------------------------------------------------------------


def units_of(source: Source) -> list[Unit]:
    """The source's shards in runs of at least UNIT_SAMPLES samples, as far as they reach."""
    units, begin, held = [], 0, 0
    for shard, size in enumerate(source.sizes):
        held += size
        if held >= UNIT_SAMPLES or shard + 1 == len(source.sizes):
            units.append((begin, shard + 1))
            begin, held = shard + 1, 0
    return units


def augmentation_of(transform: Any, pixel_path: str) -> list[str]:
    """What makes a view of a picture, in words: the pixel path, and the transform's steps before the pixels become numbers."""
    steps = [step for step in getattr(transform, "transforms", [transform]) if not isinstance(step, ToBytes)]
    used = (
        "arrays" if pictures(transform, pixel_path)[1] is decode_pixels else "pil"
    )  # where the fast path cannot be had
    return [f"pixel path {used}", *map(repr, steps)]


def describe_source(source: Source) -> dict[str, Any]:
    """What embeddings of a source are of: its name, how many samples, and marks by which other data is noticed."""
    picked = None if source.picked is None else hashlib.blake2b(source.picked.tobytes(), digest_size=16).hexdigest()
    marks = [_shard_mark(shard) for shard in dict.fromkeys(source.shards)]
    return {
        "name": source.name,
        "samples": source.num_samples,
        "sizes": list(source.sizes) if source.table is None else [source.num_samples],
        "picked": picked,
        "shards": marks,
    }


def _shard_mark(shard: str) -> list[Any]:
    """The last part of a shard's path; of a local one also its size and a digest of its first and last 64 KiB.

    Modification times are left out: a copy of the data elsewhere is the same data.
    """
    path, name = local_path(shard), os.path.basename(shard)
    try:
        if path is None:
            return [name]
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.blake2b(file.read(_EDGE_BYTES), digest_size=8)
            file.seek(max(0, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
        return [name, size, digest.hexdigest()]
    except OSError:  # a lost shard has been reported when the sources were opened
        return [name]


def difference_of_sources(stored: dict[str, Any], found: dict[str, Any]) -> str | None:
    """In words, why embeddings of one source are not of another; None where they are."""
    if stored == found:
        return None
    if stored["samples"] != found["samples"]:
        return f"they are of {stored['samples']} samples of {found['name']!r}, and it holds {found['samples']}"
    if stored["picked"] != found["picked"]:
        return f"they are of another clustering's {found['name']!r}"
    before = {tuple(mark) for mark in stored["shards"]}
    # A shard that is gone now has no size to compare.
    changed = next((mark[0] for mark in found["shards"] if tuple(mark) not in before and len(mark) > 1), None)
    if changed is not None:
        return f"they are of other data: shard {changed} of {found['name']!r} differs, or was not there"
    if [mark[0] for mark in stored["shards"]] != [mark[0] for mark in found["shards"]] or stored["sizes"] != found[
        "sizes"
    ]:
        return f"they are of {found['name']!r} with its shards in another order or of other sizes"
    return None


def rows_of_cluster(source: Source, stored: dict[str, Any]) -> np.ndarray | None:
    """(n,) where the samples of a cluster stand in a stored source of all the shards it picks from; None for another source."""
    if source.picked is None or stored["picked"] is not None or len(stored["sizes"]) != len(stored["shards"]):
        return None
    begins = np.concatenate([[0], np.cumsum(stored["sizes"], dtype=np.int64)])
    place = {tuple(mark): int(begin) for mark, begin in zip(stored["shards"], begins, strict=False)}
    rows = source.picked.astype(np.int64)
    for number, shard in enumerate(source.shards):
        begin = place.get(tuple(_shard_mark(shard)))
        if begin is None:
            return None
        rows[source.starts[number] : source.starts[number + 1]] += begin
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The folder
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """What teacher.json says.

    Attributes:
        views: V.
        seed: of the views' augmentations.
        dtype: of DTYPES.
        augmentation: see `augmentation_of`.
        captions: `--captions`, as for training.
        teachers: of each its "model", "width" and "fingerprint".
        sources: see `describe_source`; and "captions", how many the source has (T).
    """

    views: int
    seed: int
    dtype: str
    augmentation: list[str]
    captions: str | None
    teachers: list[dict[str, Any]]
    sources: list[dict[str, Any]]

    def as_json(self) -> str:
        return json.dumps({"format": FORMAT, **self.__dict__}, indent=1) + "\n"

    @property
    def bytes_of_embeddings(self) -> int:
        """What the embeddings take on the disk."""
        width = sum(teacher["width"] for teacher in self.teachers)
        return 2 * width * sum(source["samples"] * self.views + source["captions"] for source in self.sources)


def difference(stored: Manifest, wanted: Manifest) -> str | None:
    """In words, in what a stored folder differs from what is wanted; None where it does not."""
    for name, words in (
        ("views", "views"),
        ("seed", "a seed of"),
        ("dtype", "numbers of type"),
        ("captions", "--captions"),
    ):
        if getattr(stored, name) != getattr(wanted, name):
            return f"{words} {getattr(stored, name)} and not {getattr(wanted, name)}"
    if stored.augmentation != wanted.augmentation:
        return "another augmentation: " + difference_of_steps(stored.augmentation, wanted.augmentation)
    for index in range(max(len(stored.teachers), len(wanted.teachers))):
        one, other = (of.teachers[index] if index < len(of.teachers) else None for of in (stored, wanted))
        if one is None or other is None or one["model"] != other["model"]:
            names = [", ".join(teacher["model"] for teacher in of.teachers) for of in (stored, wanted)]
            return f"other teachers: {names[0]} and not {names[1]}"
        if one != other:
            return f"other weights, preprocessing or precision of the teacher {one['model']}"
    held, asked = ([source["name"] for source in of.sources] for of in (stored, wanted))
    if held != asked:
        return f"the sources {', '.join(held)} and not {', '.join(asked)}"
    for one, other in zip(stored.sources, wanted.sources, strict=True):
        without = [{key: value for key, value in of.items() if key != "captions"} for of in (one, other)]
        if (found := difference_of_sources(*without)) is not None:
            return f"other data: {found}"
    return None


def difference_of_steps(stored: Sequence[str], wanted: Sequence[str]) -> str:
    """The first step of two augmentations that is not the same, in words."""
    for index in range(max(len(stored), len(wanted))):
        one, other = (steps[index] if index < len(steps) else "nothing" for steps in (stored, wanted))
        if one != other:
            return f"{one} and not {other}"
    return "the same"


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
                _write_array(self._file(index, "captions"), starts)
            _write_array(self._file(index, "done"), np.zeros(len(units_of(source)), np.uint8))
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
            for teacher in range(len(manifest.teachers)):
                for kind in ("images", "texts"):
                    rows = store.rows(index, teacher, kind)
                    some = np.linspace(0, len(rows) - 1, min(len(rows), _LOOKED_AT)).astype(int)
                    if not bool(torch.isfinite(store.tensor(rows[some])).all()):
                        raise UserError(_not_finite(store._file(index, kind, teacher)))
        return store

    # --- files -------------------------------------------------------------------------------------------------------

    def _file(self, source: int, kind: str, teacher: int | None = None) -> Path:
        name = self.manifest.sources[source]["name"]
        return self.folder / ".".join([name, *([] if teacher is None else [str(teacher)]), kind, "npy"])

    def _shape(self, source: int, teacher: int, kind: str) -> tuple[int, ...]:
        about, width = self.manifest.sources[source], self.manifest.teachers[teacher]["width"]
        return (about["samples"], self.manifest.views, width) if kind == "images" else (about["captions"], width)

    def _make_file(self, source: int, teacher: int, kind: str) -> None:
        path = self._file(source, kind, teacher)
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
        return _mapped(self._file(source, kind, teacher), shape, _STORED_AS[self.manifest.dtype], mode)

    def done(self, source: int, *, mode: str = "r") -> np.ndarray:
        """(units,) 1 for each unit whose rows are on the disk, mapped."""
        return _mapped(self._file(source, "done"), None, np.uint8, mode)

    def caption_starts(self, source: int) -> np.ndarray | None:
        """(n + 1,) where the captions of each sample begin; None where each has one."""
        about = self.manifest.sources[source]
        if about["captions"] == about["samples"] and not self._file(source, "captions").exists():
            return None
        return _mapped(self._file(source, "captions"), (about["samples"] + 1,), np.int64, "r")

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


def read_manifest(folder: Path) -> Manifest | None:
    """What teacher.json says; None where there is none.

    Raises:
        UserError: it cannot be read, or is of a later release.
    """
    file = folder / MANIFEST_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise UserError(f"{file} is of another release of this program; make the embeddings anew in another folder")
        return Manifest(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} cannot be read ({error}); make the embeddings anew in another folder") from error


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


def _not_finite(path: Path) -> str:
    return f"{path} holds rows that are no numbers (NaN or infinite); make the teachers' embeddings again with `zerovl teacher`"


# ---------------------------------------------------------------------------------------------------------------------
# In training
# ---------------------------------------------------------------------------------------------------------------------


class TeacherRows:
    """The embeddings of a store for the sources of a run (`data.views.StoredTeachers`).

    Args:
        store: opened.
        sources: of the run, in its order; each has its embeddings by name, or is a cluster of a source that has. Others in the
            store are left alone.
        augmentation: of the run, see `augmentation_of`.
        captions: the run's `--captions`.

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
        if captions != manifest.captions:
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
        text = row if starts is None else int(starts[row]) + sample.caption_number
        vectors = [rows for images, texts in teachers for rows in (images[row, view], texts[text])]
        bits = np.concatenate(vectors).view(np.int16)
        exponent = _EXPONENT_BITS[manifest.dtype]
        if bool(((bits & exponent) == exponent).any()) or not all(vector.any() for vector in vectors):
            self._refuse(sample, vectors)
        widths = [width for width in self.widths for _ in range(2)]
        return picture, torch.from_numpy(bits).view(DTYPES[manifest.dtype]).split(widths)

    def _refuse(self, sample: RawSample, vectors: Sequence[np.ndarray]) -> NoReturn:
        """Say which of a sample's embeddings (images and texts of each teacher in turn) cannot be used."""
        for number, vector in enumerate(vectors):
            if not bool(torch.isfinite(self.store.tensor(vector)).all()):
                kind = ("images", "texts")[number % 2]
                raise UserError(_not_finite(self.store._file(self._stored[sample.source], kind, number // 2)))
        raise UserError(
            f"the teachers of {self.store.folder} could not be shown sample {sample.key!r} of source "
            f"{self._names[sample.source]!r}, and training can: the data was mended since. Embed it anew with `zerovl teacher`"
        )
