"""A folder of embeddings: mapped arrays whose rows are checked when they are read.

    DIR/embeddings.json   models, settings and data of the rows (`Manifest`)
    DIR/NAME.npy          an array: a row, or several, for each sample; bfloat16 as its bits in int16
    DIR/NAME.sums.npy     a checksum of each row, by which a damaged row is found when it is read
    DIR/done.npy          (n,) bool: whether a sample's rows are on the disk

`n` samples: those of all sources of the collection, in order. A row of zeros stands for a picture or caption that could not be
shown. Files are mapped, not loaded, and take their whole space when they are made.

A folder without embeddings.json counts as empty: this file is written last. A sample is marked as done after its rows have
reached the disk, so that a killed call continues with the samples that lack their marks.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.core import claim
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import UNREADABLE, locked, write_atomically
from open_clip_zerovl.core.identity import digest_of
from open_clip_zerovl.features.fingerprint import difference_of_sources
from open_clip_zerovl.shards.marks import Mark

log = logging.getLogger(__name__)

MANIFEST_FILE = "embeddings.json"
WEIGHTS = (
    f"{claim.CONTENT}models"  # a key of facts: digests of weights, preprocessing and precision
)
FORMAT = 2
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}
_STORED_AS = {name: np.dtype("int16" if name == "bfloat16" else name) for name in DTYPES}
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
        facts: model and settings by the words of messages. "use" is the program that reads the rows, WEIGHTS are digests
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
            _STORED_AS[dtype].itemsize * int(np.prod(shape)) + 4 * int(np.prod(_sums_shape(shape)))
            for dtype, shape in self.arrays.values()
        )

    def as_json(self) -> str:
        content = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return json.dumps({**content, "digest": digest_of(content)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None without one.

    Raises:
        UserError: it cannot be read, or is of another release.
    """
    file = folder / MANIFEST_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        digest = content.pop("digest", None)
        if content["format"] != FORMAT or digest != digest_of(content):
            raise ValueError("it is damaged, or of another release")
        arrays = {name: (dtype, tuple(shape)) for name, (dtype, shape) in content["arrays"].items()}
        return Manifest(content["facts"], content["sources"], arrays)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise UserError(
            f"{file} cannot be read ({error}); make the embeddings anew in another folder"
        ) from error


def difference(stored: Manifest, wanted: Manifest) -> str | None:
    """`claim.difference` of the stored and the requested embeddings. A copy of the data is the same data."""
    asked, shapes = [], []
    for manifest in (stored, wanted):
        facts = {name: manifest.facts.get(name) for name in wanted.facts}
        asked.append({**facts, "sources": [source["name"] for source in manifest.sources]})
        shapes.append(
            {name: f"{dtype} {shape}" for name, (dtype, shape) in manifest.arrays.items()}
        )
    of_facts = claim.difference(*asked)
    if of_facts is not None:
        return of_facts
    for stored_source, wanted_source in zip(stored.sources, wanted.sources, strict=True):
        of_data = difference_of_sources(stored_source, wanted_source)
        if of_data is not None:
            return f"was begun with other data: {of_data}"
    return claim.difference(*shapes)


def checksums(rows: np.ndarray) -> np.ndarray:
    """The CRC-32 of each row (along the last axis) xor that of zeros, so that rows that were never written have 0."""
    rows = np.ascontiguousarray(rows)
    *shape, width = rows.shape
    sums = (zlib.crc32(row.data) for row in rows.reshape(-1, width))
    crcs = np.fromiter(sums, np.uint32, math.prod(shape))
    return crcs.reshape(shape) ^ np.uint32(zlib.crc32(bytes(width * rows.itemsize)))


def _sums_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:-1] if len(shape) > 1 else shape


class Rows:
    """A stored array, mapped. `rows[index]` is a tensor of the array's dtype, copied.

    Attributes:
        array: the rows (..., D), or numbers (n,), as they lie in the file; reading them here checks nothing.
        sums: a checksum of each row or number.

    Raises:
        UserError: on reading, rows that were changed since they were written.
    """

    def __init__(self, path: Path, spec: ArraySpec, *, mode: str = "r") -> None:
        self.path, self.dtype = path, DTYPES[spec[0]]
        self.files = [
            _mapped(path, _STORED_AS[spec[0]], spec[1], mode),
            _mapped(_sums_of(path), np.dtype(np.uint32), _sums_shape(spec[1]), mode),
        ]
        # np.memmap makes an object of its own of each row.
        self.array, self.sums = map(np.asarray, self.files)
        self.verified = False  # `damaged` has read all rows in this process

    def __len__(self) -> int:
        return len(self.array)

    def _checksums(self, rows: np.ndarray) -> np.ndarray:
        return checksums(rows if self.array.ndim > 1 else rows[..., None])

    def read(self, index: Any) -> np.ndarray:
        """Rows as they are stored, copied, by an index of all axes but the last. UserError as `rows[index]`."""
        rows = np.array(self.array[index])
        if not self.verified and not np.array_equal(self._checksums(rows), self.sums[index]):
            raise UserError(
                f"{self.path} holds rows that were damaged after they were written; remove {self.path.parent} and make the "
                "embeddings again"
            )
        return rows

    def __getitem__(self, index: Any) -> Tensor:
        return torch.from_numpy(self.read(index)).view(self.dtype)

    def __setitem__(self, index: Any, rows: Tensor) -> None:
        stored = rows.to("cpu", self.dtype)
        content = (stored.view(torch.int16) if self.dtype == torch.bfloat16 else stored).numpy()
        self.array[index] = content
        self.sums[index] = self._checksums(content)

    def damaged(self) -> np.ndarray:
        """The numbers of the rows (along the first axis) whose checksum is another."""
        damaged = []
        for begin in range(0, len(self), _BLOCK_ROWS):
            part = slice(begin, begin + _BLOCK_ROWS)
            wrong = self._checksums(self.array[part]) != self.sums[part]
            damaged.append(begin + np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1)))
        self.verified = True
        return np.concatenate([np.empty(0, dtype=np.int64), *damaged])

    def blocks(self) -> Iterator[Tensor]:
        """All rows in order, some thousand at a time."""
        for begin in range(0, len(self), _BLOCK_ROWS):
            yield self[begin : begin + _BLOCK_ROWS]

    def check(self) -> None:
        """UserError if some rows, spread over the array, are damaged."""
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
        verify: bool = True,
    ) -> Store:
        """The folder of these embeddings: made now, or begun by an earlier call.

        Args:
            given: arrays whose content is known already.
            cache: a folder of other embeddings for the same use is made anew. Where only the data is another, rows of unchanged
                files are kept.
            by_sample: False if row n of an array may be of another sample than n although there are as many rows as samples.
                With other data all rows are then made anew, unless each source has `captions`, the rows of each of its files.
            verify: read a cache whole; files with damaged rows are made anew. Without it they are refused when they are read.

        Raises:
            UserError: it holds other embeddings (without `cache`).
        """
        with locked(folder):  # several calls may share the work
            if cache:
                old = cls._opened_or_none(folder)
                if old is not None and verify:
                    old._forget_damaged(by_sample)
                if old is not None and old.manifest == manifest:
                    return old
                if old is not None and old.manifest.facts.get("use") != manifest.facts.get("use"):
                    raise UserError(
                        f"{folder} holds embeddings for {old.manifest.facts.get('use')}, which are not replaced; give "
                        "another folder, or remove it"
                    )
                return cls._made(folder, manifest, given or {}, old, by_sample)
            stored = read_manifest(folder)
            if stored is None:
                return cls._made(folder, manifest, given or {}, None)
            changed = difference(stored, manifest)
            if changed is not None:
                raise UserError(f"{folder} {changed}; {claim.ADVICE}")
            return cls(folder, stored, mode="r+")

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
            path = folder / f"{name}.npy"
            _make_file(path, _STORED_AS[spec[0]], spec[1])
            _make_file(_sums_of(path), np.dtype(np.uint32), _sums_shape(spec[1]))
        _make_file(folder / "done.npy", np.dtype(bool), (sum(manifest.sizes),))
        store = cls(folder, manifest, mode="r+")
        for name, values in given.items():
            store.rows[name][:] = torch.from_numpy(values)
        if old is not None:
            store._take_over(old, by_sample)
        store.flush()
        write_atomically(folder / MANIFEST_FILE, manifest.as_json())
        return store

    def _forget_damaged(self, by_sample: bool) -> None:
        """Mark the samples with damaged rows as missing; all, where a row's sample is not known."""
        for rows in self.rows.values():
            damaged = rows.damaged()
            if not len(damaged):
                continue
            log.warning("%d rows of %s are damaged; they are made anew.", len(damaged), rows.path)
            # As before they were written: a sample that could not be shown is not written again.
            rows.array[damaged] = 0
            rows.sums[damaged] = 0
            if by_sample and len(rows) == len(self.done):
                self.done[damaged] = False
            else:
                self.done[:] = False
        self.done.flush()  # type: ignore[attr-defined]

    def _take_over(self, old: Store, by_sample: bool) -> None:
        """Take the rows of files that have not changed from the embeddings that were here."""
        reused = 0
        counted = "sizes" if by_sample else "captions"
        known = all(counted in source for of in (self, old) for source in of.manifest.sources)
        for store in (self, old) if known else ():
            rows_of_files = sum(sum(source[counted]) for source in store.manifest.sources)
            known = known and all(
                shape[0] == rows_of_files for _, shape in store.manifest.arrays.values()
            )
        widths = [
            {name: (dtype, shape[1:]) for name, (dtype, shape) in of.manifest.arrays.items()}
            for of in (self, old)
        ]
        if known and self.manifest.facts == old.manifest.facts and widths[0] == widths[1]:
            places = dict(_places(old.manifest, counted))
            for file, (samples, wanted) in _places(self.manifest, counted):
                if file not in places:
                    continue
                old_samples, stored = places[file]
                for name, rows in self.rows.items():
                    rows.array[wanted] = old.rows[name].array[stored]
                    rows.sums[wanted] = old.rows[name].sums[stored]
                self.done[samples] = old.done[old_samples]
                reused += int(self.done[samples].sum())
        reason = difference(old.manifest, self.manifest) or "has changed files"
        log.log(
            logging.INFO if reused else logging.WARNING,
            "%s %s: its embeddings are %s.",
            self.folder, reason, f"kept of {reused} samples" if reused else "made anew",
        )  # fmt: skip

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, remedy: str) -> Store:
        """A folder of finished embeddings, checked; of the rows' values only some are checked.

        Args:
            remedy: the command that makes such embeddings, for messages.

        Raises:
            UserError: no such folder, embeddings that are not finished, files that are cut short or damaged.
        """
        path = Path(folder).expanduser()
        manifest = read_manifest(path)
        if manifest is None:
            raise UserError(
                f"{path} holds no {MANIFEST_FILE}; make a folder of embeddings with `{remedy}`"
            )
        store = cls(path, manifest)
        for source, begin in zip(manifest.sources, manifest.begins, strict=True):
            done = store.done[begin : begin + sum(source["sizes"])]
            if not done.all():
                raise UserError(
                    f"the embeddings in {path} are not finished: {int((~done).sum())} of {len(done)} samples of source "
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
        return digest_of(self.manifest.as_json())[:16]

    def finish(self, samples: Any) -> None:
        """Note samples (an index) whose rows are written; now and then they are marked as done."""
        self._finished.append(samples)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the rows to the disk, then the marks of the finished samples, which vouch for them."""
        for rows in self.rows.values():
            for file in rows.files:
                file.flush()  # type: ignore[attr-defined]
        for samples in self._finished:
            self.done[samples] = True
        self.done.flush()  # type: ignore[attr-defined]
        self._finished.clear()
        self._flushed = time.monotonic()


def _places(manifest: Manifest, counted: str) -> Iterator[tuple[Any, tuple[slice, slice]]]:
    """(a key of each file, (its samples, its rows)); `counted` names the rows of each file in a source's description."""
    sample = row = 0
    for source in manifest.sources:
        blocks: dict[str, int] = {}  # a table's file stands once for each block of rows
        for mark, size, rows in zip(source["marks"], source["sizes"], source[counted], strict=True):
            text = json.dumps([source["name"], source["picked"], mark])
            blocks[text] = blocks.get(text, 0) + 1
            yield (
                (text, blocks[text], size, rows),
                (slice(sample, sample + size), slice(row, row + rows)),
            )
            sample, row = sample + size, row + rows


def _sums_of(path: Path) -> Path:
    return path.with_suffix(".sums.npy")


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
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"{array.dtype} of shape {array.shape} in place of {dtype} of {shape}")
    except UNREADABLE as error:  # a file shorter than its header says cannot be mapped
        raise UserError(
            f"{path} is gone, cut short or damaged ({error}); copy it again, or make the embeddings again"
        ) from error
    # Not at once: numpy makes a file that is cut short longer where it may write to it.
    return array if mode == "r" else np.load(path, mmap_mode="r+", allow_pickle=False)
