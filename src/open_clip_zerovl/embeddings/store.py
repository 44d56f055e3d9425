"""A folder of embeddings: mapped arrays whose rows are checked when they are read.

    DIR/embeddings.json   models, settings and data of the rows (`Manifest`)
    DIR/NAME.npy          an array: a row, or several, for each sample; bfloat16 as its bits in int16
    DIR/done.npy          (n,) bool: whether a sample's rows are on the disk

`n` samples: those of all sources of the collection, in order. A row of zeros stands for a picture or caption that could not be
shown. Files are mapped, not loaded, and take their whole space when they are made.

A folder without embeddings.json counts as empty: this file is written last. A sample is marked as done after its rows have
reached the disk, so that a killed call continues with the samples that lack their marks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import UNREADABLE, locked, write_atomically
from open_clip_zerovl.embeddings.fingerprint import difference_of_sources
from open_clip_zerovl.shards.marks import Mark

log = logging.getLogger(__name__)

MANIFEST_FILE = "embeddings.json"
FORMAT = 1
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}
_STORED_AS = {name: np.dtype("int16" if name == "bfloat16" else name) for name in DTYPES}
_BFLOAT16_EXPONENT = np.int16(0x7F80)  # all of these bits are set in NaN and infinity
_SAMPLED_ROWS = (
    256  # of each array, checked when a folder is opened; every row is checked when it is read
)
_BLOCK_ROWS = 8192
_FLUSH_SECONDS = 30.0  # between two times that finished samples are marked

ArraySpec = tuple[str, tuple[int, ...]]  # dtype, shape


@dataclass(frozen=True)
class Manifest:
    """The content of embeddings.json.

    Attributes:
        facts: model and settings by the words of messages. "use" is the program that reads the rows, "fingerprints" are digests
            of models.
        sources: `fingerprint.describe_source` of each source of the collection.
        arrays: dtype (of DTYPES) and shape by name.
    """

    facts: dict[str, Any]
    sources: list[dict[str, Any]]
    arrays: dict[str, ArraySpec]

    @property
    def sizes(self) -> list[int]:
        """Samples of each file of all sources."""
        return [size for source in self.sources for size in source["sizes"]]

    @property
    def begins(self) -> list[int]:
        """The number of each source's first sample."""
        return np.cumsum([0, *(sum(source["sizes"]) for source in self.sources)]).tolist()[:-1]

    @property
    def marks(self) -> list[Mark]:
        """The marks of the files of all sources."""
        return [mark for source in self.sources for mark in source["marks"]]

    @property
    def bytes(self) -> int:
        """The size of the arrays on the disk."""
        return sum(
            _STORED_AS[dtype].itemsize * int(np.prod(shape))
            for dtype, shape in self.arrays.values()
        )

    def check(self) -> None:
        """ValueError where an entry is missing or of another type."""
        facts, entries = isinstance(self.facts, dict), {"name": str, "marks": list, "sizes": list}
        sources = all(
            isinstance(one.get(key), kind) for one in self.sources for key, kind in entries.items()
        )
        sources = sources and all(
            len(one["marks"]) == len(one["sizes"]) and "picked" in one for one in self.sources
        )
        plain = sources and all(isinstance(mark, list | str) and mark for mark in self.marks)
        sizes = [size for size in self.sizes if not isinstance(size, int) or size < 0]
        numbers = [
            n
            for dtype, shape in self.arrays.values()
            for n in shape
            if dtype not in DTYPES or not isinstance(n, int)
        ]
        if not (facts and plain) or sizes or numbers:
            raise ValueError("an entry is missing or of another type")

    def as_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None without one.

    Raises:
        UserError: it cannot be read, or is of another release.
    """
    file = folder / MANIFEST_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise UserError(
                f"{file} is of another release of this program; make the embeddings anew in another folder"
            )
        arrays = {
            name: (dtype, tuple(shape)) for name, (dtype, shape) in content.pop("arrays").items()
        }
        manifest = Manifest(arrays=arrays, **content)
        manifest.check()
        return manifest
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{file} cannot be read ({error}); make the embeddings anew in another folder"
        ) from error


def difference(stored: Manifest, wanted: Manifest) -> str | None:
    """The first difference between the stored and the requested embeddings, or None. A copy of the data is the same data."""
    for name, value in wanted.facts.items():
        held = stored.facts.get(name)
        if held == value:
            continue
        if name == "fingerprints":
            return "other weights, preprocessing or precision of the same model"
        if isinstance(value, list):
            return f"another {name}: " + first_difference(held or [], value)
        return f"{name} {held} and not {value}"
    names = [[source["name"] for source in of.sources] for of in (stored, wanted)]
    if names[0] != names[1]:
        return f"the sources {', '.join(names[0])} and not {', '.join(names[1])}"
    for one, other in zip(stored.sources, wanted.sources, strict=True):
        if (found := difference_of_sources(one, other)) is not None:
            return f"other data: {found}"
    return None if stored.arrays == wanted.arrays else "rows of another width or number"


def first_difference(stored: Sequence[Any], wanted: Sequence[Any]) -> str:
    """The first pair of entries that differ, in words."""
    pairs = zip_longest(stored, wanted, fillvalue="nothing")
    return next((f"{one} and not {other}" for one, other in pairs if one != other), "the same")


def is_finite(stored: np.ndarray, dtype: torch.dtype) -> bool:
    """True if a stored array holds neither NaN nor infinite numbers of a dtype."""
    if dtype == torch.bfloat16:
        return not bool(((stored.view(np.int16) & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any())
    return bool(np.isfinite(stored).all())


class Rows:
    """A stored array, mapped. `rows[index]` is a tensor of the array's dtype, copied.

    Raises:
        UserError: on reading, rows with NaN or infinite numbers.
    """

    def __init__(self, path: Path, spec: ArraySpec, *, mode: str = "r") -> None:
        self.path, self.dtype = path, DTYPES[spec[0]]
        self.mapped = _mapped(path, _STORED_AS[spec[0]], spec[1], mode)
        self.array = np.asarray(self.mapped)  # np.memmap makes an object of its own of each row

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Tensor:
        rows = np.array(self.array[index])
        if not is_finite(rows, self.dtype):
            raise UserError(
                f"{self.path} holds rows with NaN or infinite numbers; remove {self.path.parent} and make the "
                "embeddings again"
            )
        return torch.from_numpy(rows).view(self.dtype)

    def __setitem__(self, index: Any, rows: Tensor) -> None:
        stored = rows.to("cpu", self.dtype)
        self.array[index] = (
            stored.view(torch.int16) if self.dtype == torch.bfloat16 else stored
        ).numpy()

    def blocks(self) -> Iterator[Tensor]:
        """All rows in order, some thousand at a time."""
        for begin in range(0, len(self), _BLOCK_ROWS):
            yield self[begin : begin + _BLOCK_ROWS]

    def check(self) -> None:
        """UserError if some rows, spread over the array, are not finite."""
        self[np.linspace(0, len(self) - 1, min(len(self), _SAMPLED_ROWS)).astype(int)]


class Store:
    """A folder of embeddings. Use `create` to write one, `open` to read a finished one.

    Attributes:
        rows: the arrays by name.
        done: (n,) bool, mapped.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, mode: str = "r") -> None:
        self.folder, self.manifest = folder, manifest
        self.rows = {
            name: Rows(self._file(name), spec, mode=mode) for name, spec in manifest.arrays.items()
        }
        self.done = _mapped(self._file("done"), np.dtype(bool), (sum(manifest.sizes),), mode)
        self._finished: list[Any] = []
        self._flushed = time.monotonic()

    @classmethod
    def create(
        cls,
        folder: Path,
        manifest: Manifest,
        *,
        given: Mapping[str, np.ndarray] | None = None,
        cache: bool = False,
        by_sample: bool = True,
    ) -> Store:
        """The folder of these embeddings: made now, or begun by an earlier call.

        Args:
            given: arrays whose content is known already.
            cache: a folder of other embeddings for the same use is made anew. Where only the data is another, rows of unchanged
                files are kept.
            by_sample: False if row n of an array may be of another sample than n although there are as many rows as samples;
                with other data all rows are then made anew, as with another number of rows.

        Raises:
            UserError: it holds other embeddings (without `cache`), or cannot be written.
        """
        try:
            with locked(folder):  # several calls may share the work
                if cache:
                    old = cls._opened_or_none(folder)
                    if old is not None and old.manifest == manifest:
                        return old
                    if old is not None and old.manifest.facts.get("use") != manifest.facts.get(
                        "use"
                    ):
                        raise UserError(
                            f"{folder} holds embeddings for {old.manifest.facts.get('use')}, which are not replaced; give "
                            "another folder, or remove it"
                        )
                    return cls._made(folder, manifest, given or {}, old, by_sample)
                stored = read_manifest(folder)
                if stored is None:
                    return cls._made(folder, manifest, given or {}, None)
                if (found := difference(stored, manifest)) is not None:
                    raise UserError(f"{folder} holds embeddings with {found}; give a new folder")
                return cls(folder, stored, mode="r+")
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error}); make room, or give another folder"
            ) from error

    @classmethod
    def _opened_or_none(cls, folder: Path) -> Store | None:
        try:
            manifest = read_manifest(folder)
            return None if manifest is None else cls(folder, manifest, mode="r+")
        except UserError as error:
            log.warning("%s: they are made anew.", error)
            return None

    @classmethod
    def _made(
        cls,
        folder: Path,
        manifest: Manifest,
        given: Mapping[str, np.ndarray],
        old: Store | None,
        by_sample: bool = True,
    ) -> Store:
        (folder / MANIFEST_FILE).unlink(missing_ok=True)  # a folder without it counts as empty
        for name, spec in manifest.arrays.items():
            _make_file(folder / f"{name}.npy", _STORED_AS[spec[0]], spec[1])
        _make_file(folder / "done.npy", np.dtype(bool), (sum(manifest.sizes),))
        store = cls(folder, manifest, mode="r+")
        for name, values in given.items():
            store.rows[name].array[:] = values
        if old is not None:
            store._take_over(old, by_sample)
        store.flush()
        write_atomically(folder / MANIFEST_FILE, manifest.as_json())
        return store

    def _take_over(self, old: Store, by_sample: bool) -> None:
        """Take the rows of files that have not changed from the embeddings that were here."""
        kept = 0
        for store in (self, old):
            samples = sum(store.manifest.sizes)
            by_sample = by_sample and all(
                shape[0] == samples for _, shape in store.manifest.arrays.values()
            )
        widths = [
            {name: (dtype, shape[1:]) for name, (dtype, shape) in of.manifest.arrays.items()}
            for of in (self, old)
        ]
        if by_sample and self.manifest.facts == old.manifest.facts and widths[0] == widths[1]:
            places = dict(_places(old.manifest))
            for key, begin in _places(self.manifest):
                if (at := places.get(key)) is None:
                    continue
                to, of = slice(begin, begin + key[1]), slice(at, at + key[1])
                for name, rows in self.rows.items():
                    rows.array[to] = old.rows[name].array[of]
                self.done[to] = old.done[of]
                kept += int(self.done[to].sum())
        found = difference(old.manifest, self.manifest) or "changed files"
        log.log(
            logging.INFO if kept else logging.WARNING,
            "The embeddings in %s are of %s: %s.",
            self.folder, found, f"{kept} are kept" if kept else "made anew",
        )  # fmt: skip

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, remedy: str) -> Store:
        """A folder of finished embeddings, checked; of the rows' values only some are checked.

        Args:
            remedy: the command that makes such embeddings, for messages.

        Raises:
            UserError: no such folder, embeddings that are not finished, files that are cut short or hold NaN.
        """
        path = Path(folder).expanduser()
        manifest = read_manifest(path)
        if manifest is None:
            raise UserError(
                f"{path} holds no {MANIFEST_FILE}; make a folder of embeddings with `{remedy}`"
            )
        store = cls(path, manifest)
        for source, begin in zip(manifest.sources, manifest.begins, strict=True):
            own = store.done[begin : begin + sum(source["sizes"])]
            if not own.all():
                raise UserError(
                    f"the embeddings in {path} are not finished: {int((~own).sum())} of {len(own)} samples of source "
                    f"{source['name']!r} are missing; repeat the call of `{remedy}`"
                )
        for rows in store.rows.values():
            rows.check()
        return store

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.npy"

    @cached_property
    def digest(self) -> str:
        """A hash of models, settings and data: the content of the manifest."""
        return hashlib.blake2b(self.manifest.as_json().encode(), digest_size=8).hexdigest()

    def finish(self, samples: Any) -> None:
        """Note samples (an index) whose rows are written; now and then they are marked as done."""
        self._finished.append(samples)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the rows to the disk, then the marks of the finished samples, which vouch for them."""
        for rows in self.rows.values():
            rows.mapped.flush()  # type: ignore[attr-defined]
        for samples in self._finished:
            self.done[samples] = True
        self.done.flush()  # type: ignore[attr-defined]
        self._finished.clear()
        self._flushed = time.monotonic()


def _places(manifest: Manifest) -> Iterator[tuple[tuple[Any, int], int]]:
    """((a key of each file, its samples), number of its first sample)."""
    begin = 0
    for source in manifest.sources:
        blocks: dict[str, int] = {}  # a table's file stands once for each block of rows
        for mark, size in zip(source["marks"], source["sizes"], strict=True):
            text = json.dumps([source["name"], source["picked"], mark])
            blocks[text] = blocks.get(text, 0) + 1
            yield ((text, blocks[text]), size), begin
            begin += size


def _make_file(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    path.unlink(missing_ok=True)  # a process that still maps the old file keeps it
    np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    with open(
        path, "r+b"
    ) as file:  # all of it now: a disk that fills up later would end the process by a signal
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...], mode: str) -> np.ndarray:
    """A file, mapped. UserError if it is gone, cut short, or of another shape than the manifest's."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(f"{path} is gone; make the embeddings again") from error
    except UNREADABLE as error:  # a file shorter than its header says cannot be mapped
        raise UserError(
            f"{path} cannot be read, it is cut short or damaged ({error}); copy it again, or make the embeddings again"
        ) from error
    if found.dtype != dtype or found.shape != shape:
        raise UserError(
            f"{path} holds {found.dtype} of shape {found.shape}, and {MANIFEST_FILE} says {dtype} of {shape}; make the "
            "embeddings again"
        )
    # Not at once: numpy makes a file that is cut short longer where it may write to it.
    return found if mode == "r" else np.load(path, mmap_mode="r+", allow_pickle=False)
