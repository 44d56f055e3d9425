"""`zerovl data pack`: makes shards of inputs, or continues with a call that was interrupted.

Finished work is kept at three levels, so that a call may be killed at any moment: a picture in the spool (`.pack/`), a shard
with its record, and `pack.json`, which marks the end of the work. The same inputs and settings give the same bytes.

OUT/train/00000.tar, sizes.json, manifest.json ...   one source
OUT/dataset_type.txt, test/0.tar, test/nshards.txt
OUT/NAME/train, OUT/NAME/test ...                    several

A sample is `key.jpg` (png, webp), `key.txt` with its captions, one a line, and `key.json` with the name of its file. A picture
of a class has `key.cls`, too, the number of a line of `classnames.txt`: each split is a labelled set as CLIP_benchmark lays
them out, with its templates in `zeroshot_classification_templates.txt`. A shard is whole or not there; a split's manifest names
the samples it is made of, so that a later call writes the shards that are missing, and at the end each shard's hash.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice, starmap
from pathlib import Path
from threading import Timer
from typing import Any

from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import (
    ADVICE,
    CONTENT,
    check_writable,
    claim,
    digest_of,
    digest_of_all,
    file_digests,
    locked,
    read_claim,
    sha256_of,
    write_atomically,
)
from open_clip_zerovl.data.names import CLASS_NAMES, TEMPLATES
from open_clip_zerovl.data.splits import SPLITS
from open_clip_zerovl.prepare import report as reports
from open_clip_zerovl.prepare.collect import Collecting, sums_of_files
from open_clip_zerovl.prepare.inputs import fetched, named_input, open_input
from open_clip_zerovl.prepare.rows import Reader, SourceNames, source_name
from open_clip_zerovl.prepare.settings import Limits, PackSettings, Work
from open_clip_zerovl.prepare.store import (
    SPOOL,
    PairDatabase,
    Stored,
    exclude,
    hold_out,
    split_by_folders,
)
from open_clip_zerovl.shards.files import (
    MANIFEST_FILE,
    SHARD_COUNT,
    SIZES_FILE,
    mark_retrieval_set,
    write_shard,
)
from open_clip_zerovl.shards.tar import TEXT_EXTENSION, Sample

#: Raised by one when the same samples and settings give other shards than before.
_FORMAT = 2
SILENT_SECONDS = 2.0  # longer work shows a bar or a line


def write_split(
    store: PairDatabase,
    folder: Path,
    source: str,
    split: str,
    *,
    made_from: Mapping[str, Any],
    settings: Mapping[str, Any],
    shard_size: int,
    classes: Mapping[str, int],
    templates: Sequence[str],
    progress: bool = False,
) -> dict[str, Any]:
    """Write the shards of a source and split that are not yet written, which differ by at most one sample in size.

    Returns:
        Source, split, pictures, captions, shards, bytes.

    Args:
        store: with `samples` split.
        folder: the folder of the source. The split is a folder in it.
        made_from, settings: for the manifest.
        shard_size: samples a shard at most.
        classes: class -> its number. {} if no picture of the source has one.
        templates: for zero-shot classification.
        progress: show a bar.
    """
    here = folder / split
    count = store.count(source, split)
    shards = -(-count // shard_size)
    bounds = [number * count // shards for number in range(shards + 1)]
    claim = {"format": _FORMAT, "dataset": source, "split": split, "settings": settings}
    # all samples in their order: keys, captions, names of files, classes
    samples = digest_of_all(
        [stored.key, captions, stored.name, label]
        for stored, captions, label in store.pairs(source, split)
    )
    claim["made_from"] = {**made_from, "samples": samples}
    _begin_split(here, json.loads(json.dumps(claim)))
    pairs = store.pairs(source, split)

    def sample_of(stored: Stored, captions: list[str], label: str | None) -> Sample:
        bar.update()
        text = "\n".join(captions)
        about = json.dumps({"file": stored.name}) if stored.name else None
        files = {
            stored.extension: store.content(stored),
            TEXT_EXTENSION: text.encode(),
            **({"json": about.encode()} if about else {}),
        }
        if label is not None:
            files["cls"] = str(classes[label]).encode()
        return Sample(stored.key, files)

    bar = tqdm(
        desc=f"writing {source} {split}",
        total=count,
        unit=" pairs",
        disable=not progress,
        delay=SILENT_SECONDS,
    )
    written: dict[str, dict[str, Any]] = {}
    captions = 0
    for number in range(shards):
        file = here / (f"{number}.tar" if split != "train" else f"{number:05d}.tar")
        chunk = list(islice(pairs, bounds[number + 1] - bounds[number]))
        if file.is_file():  # whole, and of these samples
            bar.update(len(chunk))
        else:
            write_shard(file, starmap(sample_of, chunk))
        captions += sum(len(texts) for _, texts, _ in chunk)
        size = file.stat().st_size
        written[file.name] = {"pairs": len(chunk), "bytes": size, "sha256": sha256_of(file)}
    bar.close()
    sizes = {name: entry["pairs"] for name, entry in written.items()}
    counts = {"pictures": count, "captions": captions, "shards": shards}
    counts["bytes"] = sum(entry["bytes"] for entry in written.values())
    write_atomically(here / SIZES_FILE, json.dumps(sizes, indent=1) + "\n")
    _write_manifest(here, {**claim, **counts, "shards": written})
    if classes:
        write_atomically(folder / CLASS_NAMES, "".join(f"{name}\n" for name in classes))
        lines = "".join(f"{template.replace('{}', '{c}')}\n" for template in templates)
        write_atomically(folder / TEMPLATES, lines)
    if split != "train":
        mark_retrieval_set(folder, split, shards)
    return {"source": source, "split": split, "folder": str(here), **counts}


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Read the manifest of a folder, {} if there is none.

    Raises:
        UserError: a file of another form.
    """
    file = Path(folder) / MANIFEST_FILE
    manifest = read_claim(file) or {}
    shards = manifest.get("shards", {})
    if not isinstance(shards, dict) or not all(
        isinstance(entry, dict) and "sha256" in entry for entry in shards.values()
    ):
        raise UserError(
            f"{file} was not written by this program: remove it and call the command again."
        )
    return manifest


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    write_atomically(folder / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")


def _begin_split(folder: Path, claim: dict[str, Any]) -> None:
    """Claim the folder of a split, and remove shards of other samples, as before `--retry-failed`."""
    known = read_manifest(folder)
    if {name: known.get(name) for name in claim} != claim:
        for file in (*folder.glob("*.tar"), folder / SHARD_COUNT, folder / SIZES_FILE):
            file.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        _write_manifest(folder, claim)


PACK_FILE = "pack.json"
REPORT_FILE = "report.json"
#: Folder of the spool and the store; removed when all is done.
SCRATCH = ".pack"
_LOCK = ".writer"

#: Raised by one when the same inputs and settings give other shards than before.
FORMAT = 8
#: Settings on which the shards depend, but not the pictures that are read.
PICTURES = f"{CONTENT}pictures"  # of pack.json, once they are read
_LATE = ("test_share", "shard_size", "seed", "left_out")


def pack(
    inputs: Sequence[str],
    out: str | Path,
    settings: PackSettings | None = None,
    *,
    limits: Limits | None = None,
    work: Work | None = None,
    content: str | None = None,
) -> dict[str, Any]:
    """Pack inputs into shards, or go on with an interrupted call, and return the report.

    Args:
        inputs: files and folders. `NAME=INPUT` makes an input a source of its own.
        out: folder to write.
        settings: the settings of the shards.
        limits: the limits of downloads.
        work: threads, retries. `progress` also prints the report.
        content: a digest of the inputs, by which a later call is the same. None digests them here.

    Raises:
        UserError: an input of another form, a folder of other inputs, or nothing to pack.
    """
    out = Path(out)
    settings = settings or PackSettings()
    work = work or Work()
    check_writable(out, folder=True)
    say = print if work.progress else lambda _: None
    parquet = f"{os.path.abspath(out)}.parquet"  # the path "." has no name to add to
    named = [named_input(fetched(text, Path(parquet), say)) for text in inputs]
    readers = [
        open_input(path, settings.columns, settings.form, settings.templates) for _, path in named
    ]
    if settings.templates and not any(reader.classes for reader in readers):
        raise UserError("--template needs a folder of classes (CLASS/PICTURE), and no input is one")
    target = out.absolute()
    for reader in readers:  # a later call would pack its own output
        if reader.path.is_dir() and reader.path in (target, *target.parents):
            raise UserError(
                f"{out} lies in {reader.path}, which is read: give a folder elsewhere with --out"
            )
    made_from = [
        {
            "name": name,
            "input": reader.path.name,
            "form": reader.form,
            "files": len(reader.files) + len(reader.pictures),
            "hash": content or digest_of(content_of_input(reader)),
        }
        for (name, _), reader in zip(named, readers, strict=True)
    ]
    state = {
        "version": FORMAT,
        "inputs": [entry["input"] for entry in made_from],
        f"{CONTENT}inputs": made_from,
        **settings.described(),
    }
    scratch = out / SCRATCH
    retry = work.retry_failed and scratch.is_dir()
    known: dict[str, str] = {}
    sources = [
        SourceNames(source_name(name or out.absolute().name), settings.columns.source, known)
        for name, _ in named
    ]
    begun = read_claim(out / PACK_FILE) or {}
    if PICTURES in begun:
        state[PICTURES] = begun[PICTURES]
    if _begin(out, state) and not retry:
        if state[PICTURES] != digest_of_all(sums_of_files(readers, sources)):
            raise UserError(f"{out} was begun before the content of pictures changed; {ADVICE}")
        report = json.loads((out / REPORT_FILE).read_text(encoding="utf-8"))
        if work.progress:
            print(f"{out} is complete: nothing was done. Its contents:")
            print(*reports.lines(report, out), sep="\n")
        return report
    if retry:
        (out / REPORT_FILE).unlink(missing_ok=True)
    busy = f"Another process is writing {out}: wait for it."
    with locked(scratch, name=_LOCK, busy=busy):
        for scratch_file in out.rglob(".*.part"):  # which a process that was killed has left
            scratch_file.unlink(missing_ok=True)
        try:
            with closing(PairDatabase(scratch, seed=settings.seed)) as store:
                collecting = Collecting(
                    readers,
                    sources,
                    store,
                    out,
                    settings=settings,
                    limits=limits or Limits(),
                    work=work,
                )
                collecting.run()
                report = _finish(out, state, settings, store, readers, work.progress)
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"Writing into {out} failed ({error}): mend that and call the command again; finished work is kept."
            ) from error
    if not any(entry["transient"] for entry in report["refused"].values()):
        shutil.rmtree(scratch)
    if work.progress:
        print(*reports.lines(report, out), sep="\n")
    return report


def _finish(
    out: Path,
    state: dict[str, Any],
    settings: PackSettings,
    store: PairDatabase,
    readers: Sequence[Reader],
    progress: bool,
) -> dict[str, Any]:
    """Split, exclude, write the shards and the report."""
    with announced("sorting the pairs", progress):
        split_by_folders(store, len(readers))
        store.make_samples()
    names = store.sources()
    if not names:
        if not any(entry["transient"] for entry in reports.refused(store).values()):
            # The next call, with other columns perhaps, may take the same folder.
            shutil.rmtree(out / SCRATCH, ignore_errors=True)
            (out / PACK_FILE).unlink(missing_ok=True)
        raise UserError(_nothing(store, readers))
    hold_out(store, settings.test_share)
    if settings.exclusion is not None:
        exclude(store, settings.exclusion)
    several = (
        len(names) > 1
        or any(entry["name"] for entry in state[f"{CONTENT}inputs"])
        or bool(settings.columns.source)
    )
    about: dict[str, Any] = {
        "made_from": {"inputs": state[f"{CONTENT}inputs"]},
        "settings": settings.described(),
        "shard_size": settings.shard_size,
        "templates": next((reader.classes for reader in readers if reader.classes), ()),
        "progress": progress,
    }
    classes = {label: number for number, label in enumerate(store.classes())}
    written = []
    for name in names:
        folder = out / name if several else out
        classes_of_source = classes if store.classes(name) else {}
        for split in SPLITS:
            if store.count(name, split):
                written.append(
                    write_split(store, folder, name, split, classes=classes_of_source, **about)
                )
    with announced("counting captions and sizes, and writing the report", progress):
        report = reports.summarize(store, readers, written, out)
        report["settings"] = settings.described()
        reports.write_refused(store, out / "refused.csv")
        reports.write_origins(store, out / "origins.csv.gz")
        reports.write_report_page(out, report, store)
    state[PICTURES] = digest_of_all(store.sums())
    write_atomically(out / PACK_FILE, json.dumps(state, indent=1) + "\n")
    write_atomically(out / REPORT_FILE, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


@contextmanager
def announced(words: str, progress: bool) -> Iterator[None]:
    """Print a line where the block takes longer than two seconds."""
    timer = Timer(SILENT_SECONDS, lambda: print(f"{words} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    if progress:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def content_of_input(reader: Reader, pictures: Iterable[str] = ()) -> list[str | None]:
    """Name the files of an input and the words of its classes, and digest the files that rows are read from and some pictures.

    A copy has the same content.
    """
    files = [*map(str, reader.files), *pictures]
    digests = file_digests(files)
    names = map(reader.inside, (*reader.files, *reader.pictures))
    return [*names, *(digests[file] for file in files), *reader.given_words]


def _begin(out: Path, state: dict[str, Any]) -> bool:
    """Claim the folder for these inputs and settings.

    Returns:
        True if all is done.

    Raises:
        UserError: a folder with other contents.
    """
    complete = (out / REPORT_FILE).is_file()

    def restart(stored: dict[str, Any]) -> bool:
        """Return whether no shard is written yet, and no picture was read with other settings."""
        before, now = (
            {name: value for name, value in each.items() if name not in _LATE}
            for each in (stored, json.loads(json.dumps(state)))
        )
        spool = out / SCRATCH / SPOOL
        useful = before == now or not (spool.is_file() and spool.stat().st_size)
        return not complete and useful and not any(out.rglob(MANIFEST_FILE))

    return claim(out / PACK_FILE, state, restart=restart) is not None and complete


def _nothing(store: PairDatabase, readers: Sequence[Reader]) -> str:
    """Write the sentence for inputs without a usable row."""
    refused = reports.refused(store)
    if not refused:
        return f"{', '.join(str(reader.path) for reader in readers)} has no rows: check the input"
    why = "; ".join(
        f"{reason} in {entry['rows']:,} (first {entry['examples'][0]['at']})"
        for reason, entry in list(refused.items())[:4]
    )
    passing = any(entry["transient"] for entry in refused.values())
    advice = next((reports.ADVICE[reason] for reason in refused if reason in reports.ADVICE), None)
    if passing:
        advice = "the same command with --retry-failed tries again the failures that may pass"
    elif advice is None:
        advice = f"check the input, and which columns are read ({readers[0].columns})"
    return f"none of the {store.row_count:,} rows can be used: {why}; {advice}"
