"""What came of a call: numbers for `report.json`, 15 lines for a terminal, and what was refused as a table."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import printable
from open_clip_zerovl.core.files import atomic_file
from open_clip_zerovl.prepare.pack.rows import Reader
from open_clip_zerovl.prepare.pack.store import Store
from open_clip_zerovl.prepare.pack.write import Written

_EXAMPLES = 5
_SHOWN_EXAMPLES = 3
TOKENIZED = 2_000  # captions of which tokens are counted
_ADVICE = {"caption not UTF-8": "; save the table as UTF-8 (iconv -f CP1252 -t UTF-8 OLD.csv > NEW.csv)"}
CONTEXT = 77  # tokens that open_clip's models read, begin and end included


def summarize(store: Store, readers: Sequence[Reader], written: Sequence[Written], out: Path) -> dict[str, Any]:
    """All numbers of the report.

    Args:
        store: with its samples split.
        readers: the inputs.
        written: what was written.
        out: the folder, to which paths are relative.
    """
    return {
        "inputs": [
            {
                "input": str(reader.path),
                "form": reader.form,
                "columns": reader.columns,
                "rows": store.value("SELECT COUNT(*) FROM rows WHERE input = ?", number),
                "notes": list(reader.notes),
            }
            for number, reader in enumerate(readers)
        ],
        "rows": store.row_count,
        "pictures": store.count(),
        "captions": sum(one.captions for one in written),
        "written": [
            {
                "source": one.source,
                "split": one.split,
                "folder": str(one.folder.relative_to(out)),
                "pictures": one.pictures,
                "captions": one.captions,
                "shards": one.shards,
                "bytes": one.size_bytes,
            }
            for one in written
        ],
        "refused": refused(store),
        "dropped": dict(
            store.db.execute(
                "SELECT dropped, COUNT(*) FROM samples WHERE dropped IS NOT NULL GROUP BY dropped"
            ).fetchall()
        ),
        "words": _spread(_lengths(store)),
        "tokens": _tokens(store),
        "captions_per_picture": _most_captions(store),
        "repeated_captions": _repeated_captions(store),
        "repeated_pictures": _repeated_pictures(store),
        "sizes": _sizes(store),
    }


def refused(store: Store) -> dict[str, Any]:
    """Reason -> {rows, pictures, transient, examples} of rows that are refused, the most frequent first."""
    found: dict[str, Any] = {}
    for reason, count, places, transient in store.db.execute(
        "SELECT COALESCE(rows.reason, pictures.reason) AS why, COUNT(*), COUNT(DISTINCT picture), MAX(COALESCE(transient, 0)) "
        "FROM rows LEFT JOIN pictures ON pictures.number = rows.picture WHERE why IS NOT NULL GROUP BY why "
        "ORDER BY COUNT(*) DESC, why"
    ):
        found[reason] = {"rows": count, "pictures": places, "transient": bool(transient), "examples": []}
    for reason, entry in found.items():
        entry["examples"] = [
            {"at": where(file, line), "picture": place or ""}
            for file, line, place in store.db.execute(
                "SELECT file, line, place FROM rows LEFT JOIN pictures ON pictures.number = rows.picture "
                "WHERE COALESCE(rows.reason, pictures.reason) = ? ORDER BY rows.id LIMIT ?",
                (reason, _EXAMPLES),
            )
        ]
    return found


def where(file: str, line: int) -> str:
    """`pets.csv line 17`, or the file alone."""
    return f"{file} line {line}" if line else file


def write_refused(store: Store, path: Path) -> None:
    """Every row that is not in the shards as CSV: file, line, reason, the picture's place."""
    rows = store.db.execute(
        "SELECT file, line, COALESCE(rows.reason, pictures.reason, dropped) AS why, place FROM rows LEFT JOIN pictures ON "
        "pictures.number = rows.picture LEFT JOIN samples ON samples.key = pictures.key AND samples.source = rows.source "
        "WHERE why IS NOT NULL ORDER BY rows.id"
    )
    with atomic_file(path) as file:
        _write_csv(file, ("file", "line", "reason", "picture"), rows)


def write_origins(store: Store, path: Path) -> None:
    """Every row that is in a sample, as gzipped CSV: the sample's key, source and split, file and line, the picture's place."""
    rows = store.db.execute(
        "SELECT samples.key, samples.source, split, file, line, place FROM rows JOIN pictures ON pictures.number = "
        "rows.picture JOIN samples ON samples.key = pictures.key AND samples.source = rows.source "
        "WHERE rows.reason IS NULL AND dropped IS NULL ORDER BY rows.id"
    )
    with atomic_file(path) as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        _write_csv(packed, ("key", "source", "split", "file", "line", "picture"), rows)


def _write_csv(file: Any, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.TextIOWrapper(file, "utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    text.detach()  # which writes what is left, and leaves the file open


# ------------------------------------------------------------------------------------------------------------ lines


def lines(report: dict[str, Any], out: Path) -> list[str]:
    """The report for a terminal, without the commands."""
    said = [f"{one['input']}: {one['form']}, {one['columns']}; {one['rows']:,} rows" for one in report["inputs"][:3]]
    said += [f"  {note}" for one in report["inputs"][:3] for note in one["notes"]]
    if len(report["inputs"]) > 3:
        said.append(f"and {len(report['inputs']) - 3} more inputs; {report['rows']:,} rows in all")
    said.append(
        f"{report['pictures']:,} pictures with {report['captions']:,} captions of {report['rows']:,} rows are in {out}"
    )
    for one in report["written"][:6]:
        name = f"{one['source']} {one['split']}"
        said.append(
            f"  {name:18s} {one['pictures']:>9,} pictures {one['captions']:>9,} captions {one['shards']:>5} "
            f"{'shard ' if one['shards'] == 1 else 'shards'} "
            f"{one['bytes'] / 1e6:>9,.1f} MB  {one['folder']}"
        )
    if len(report["written"]) > 6:
        said.append(f"  and {len(report['written']) - 6} more folders")
    said += _refused_lines(report)
    said += [
        f"left out   {count:,} pictures {reason}, in refused.csv too" for reason, count in report["dropped"].items()
    ]
    said.append(_length_line(report))
    said.append(_repeated_line(report))
    sizes = report["sizes"]
    said.append(
        f"pictures   longer side {sizes['longer_side']['min']} to {sizes['longer_side']['max']} px, half of them to "
        f"{sizes['longer_side']['median']}; {sizes['mean_bytes'] / 1e3:,.1f} KB each"
        + (f"; {sizes['shrunk']:,} made smaller" if sizes["shrunk"] else "")
        + (f"; {sizes['turned']:,} turned upright (EXIF)" if sizes["turned"] else "")
    )
    return [printable(line) for line in said]


def _refused_lines(report: dict[str, Any]) -> list[str]:
    total = sum(entry["rows"] for entry in report["refused"].values())
    if not total:
        return ["refused    nothing"]
    rows = "1 row, which is" if total == 1 else f"{total:,} rows, all of them"
    said = [f"refused    {rows} in refused.csv:"]
    shown_reasons = 5 if len(report["refused"]) == 5 else 4
    for reason, entry in list(report["refused"].items())[:shown_reasons]:
        shown = ", ".join(example["at"] for example in entry["examples"][:_SHOWN_EXAMPLES])
        more = " ..." if entry["rows"] > _SHOWN_EXAMPLES else ""
        said.append(f"  {entry['rows']:>7,} {reason}: {shown}{more}{_ADVICE.get(reason, '')}")
    rest = list(report["refused"].values())[shown_reasons:]
    if rest:
        said.append(f"  {sum(entry['rows'] for entry in rest):>7,} for {len(rest)} other reasons")
    return said


def _length_line(report: dict[str, Any]) -> str:
    words, tokens = report["words"], report["tokens"]
    line = f"captions   median {words['median']} words (95 % up to {words['p95']}, longest {words['max']})"
    if tokens:
        line += (
            f"; {tokens['median']} tokens of CLIP (95 % up to {tokens['p95']}; {_share(tokens['cut'], tokens['captions'])} "
            f"longer than the {CONTEXT} that are read)"
        )
    most = report["captions_per_picture"]
    return line + (f"; up to {most} a picture" if most > 1 else "")


def _repeated_line(report: dict[str, Any]) -> str:
    captions, pictures = report["repeated_captions"], report["repeated_pictures"]
    if not captions["captions"] and not pictures["rows"]:
        return "repeated   no caption, no picture"
    shown = ""
    if captions["most"]:
        text = captions["most"][0]["caption"]
        shown = f" ({text if len(text) <= 40 else text[:40] + '...'!r} at {captions['most'][0]['pictures']:,})"
    return (
        f"repeated   {_counted(captions['captions'], 'text is a caption', 'texts are captions')} of several pictures{shown}; "
        f"{_counted(pictures['rows'], 'row repeats', 'rows repeat')} a picture"
    )


def _counted(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


def _share(part: int, whole: int) -> str:
    """How many captions are longer: "none is", "1.2 % are"."""
    return "none is" if not part else f"{100 * part / whole:.1f} % are" if part / whole >= 0.001 else "some are"


def commands(report: dict[str, Any], out: Path) -> list[str]:
    """What to type next: a released model fine-tuned, or a training from nothing, each with its strings of this data."""
    folders = {split: [one for one in report["written"] if one["split"] == split] for split in ("train", "test")}
    train = "::".join(f"{one['source']}={out / one['folder']}" for one in folders["train"])
    flags = ["--train-data", shlex.quote(train)]
    if len(folders["train"]) > 1:
        flags.append("--debiased-sampling")
    if folders["test"]:
        sets = "::".join(f"{one['source']}={(out / one['folder']).parent}" for one in folders["test"])
        flags += ["--retrieval-data", shlex.quote(sets)]
    if report["captions_per_picture"] > 1:
        flags += ["--captions", "one-per-epoch"]
    smallest = min((one["pictures"] for one in folders["train"]), default=0)
    flags += ["--warmup-share", "0.025", "--batch-size", str(batch_size(smallest))]
    tuned = shlex.quote(f"{out if out.name else out.absolute()}-tuned")
    return [
        f"zerovl finetune --from ViT-B-32/laion2b_s34b_b79k --data {shlex.quote(str(out))} --out {tuned}",
        f"zerovl train --model ViT-B-32 {' '.join(flags)}",
    ]


def batch_size(pictures: int) -> int:
    """A micro-batch for a first run: a power of two up to 128, of which the smallest source has several."""
    size = 128
    while size > 1 and size * 4 > pictures:
        size //= 2
    return size


# ---------------------------------------------------------------------------------------------------------- numbers


def _lengths(store: Store) -> np.ndarray:
    """Words of every caption of a row that is kept."""
    cursor = store.db.execute(
        "SELECT text FROM captions JOIN rows ON rows.id = captions.row JOIN pictures ON pictures.number = rows.picture "
        "WHERE pictures.key IS NOT NULL AND rows.reason IS NULL"
    )
    return np.fromiter((text.count(" ") + 1 for (text,) in cursor), np.int64)


def _spread(values: np.ndarray) -> dict[str, Any]:
    if not len(values):
        return {"min": 0, "median": 0, "p95": 0, "max": 0}
    return {
        "min": int(values.min()),
        "median": int(np.median(values)),
        "p95": int(np.quantile(values, 0.95)),
        "max": int(values.max()),
    }


@functools.cache
def _tokenizer() -> Any:
    from open_clip.tokenizer import SimpleTokenizer

    return SimpleTokenizer()


def _tokens(store: Store) -> dict[str, Any] | None:
    """Tokens of CLIP's tokenizer in captions of the first samples in the order, begin and end included."""
    cursor = store.db.execute(
        "SELECT text FROM samples JOIN pictures ON pictures.key = samples.key JOIN rows ON rows.picture = pictures.number AND "
        "rows.source = samples.source JOIN captions ON captions.row = rows.id WHERE dropped IS NULL AND rows.reason IS NULL "
        "ORDER BY position, rows.id, captions.rowid LIMIT ?",
        (TOKENIZED,),
    )
    counts = np.array([len(_tokenizer().encode(text)) + 2 for (text,) in cursor])
    if not len(counts):
        return None
    return {"captions": len(counts), **_spread(counts), "cut": int((counts > CONTEXT).sum())}


def _most_captions(store: Store) -> int:
    return store.value(
        "SELECT COALESCE(MAX(n), 0) FROM (SELECT COUNT(DISTINCT text) AS n FROM samples JOIN pictures ON pictures.key = "
        "samples.key JOIN rows ON rows.picture = pictures.number AND rows.source = samples.source JOIN captions ON "
        "captions.row = rows.id WHERE dropped IS NULL AND rows.reason IS NULL GROUP BY samples.source, samples.key)"
    )


def _repeated_captions(store: Store) -> dict[str, Any]:
    """How many pictures have a caption that another picture has too, and the captions with most pictures."""
    store.db.execute(
        "CREATE TEMP TABLE IF NOT EXISTS repeated AS SELECT text, COUNT(DISTINCT pictures.key) AS pictures FROM captions JOIN "
        "rows ON rows.id = captions.row JOIN pictures ON pictures.number = rows.picture WHERE pictures.key IS NOT NULL AND "
        "rows.reason IS NULL GROUP BY text HAVING COUNT(DISTINCT pictures.key) > 1"
    )
    most = store.db.execute("SELECT text, pictures FROM repeated ORDER BY pictures DESC, text LIMIT 10")
    return {
        "captions": store.value("SELECT COUNT(*) FROM repeated"),
        "pictures": store.value("SELECT COALESCE(SUM(pictures), 0) FROM repeated"),
        "most": [{"caption": text, "pictures": count} for text, count in most],
    }


def _repeated_pictures(store: Store) -> dict[str, Any]:
    """How many rows have the picture of an earlier row of their source, and the pictures with most rows."""
    store.db.execute(
        "CREATE TEMP TABLE IF NOT EXISTS often AS SELECT pictures.key AS key, rows.source AS source, COUNT(*) AS n, "
        "COUNT(DISTINCT pictures.number) AS files FROM rows JOIN pictures ON pictures.number = rows.picture WHERE "
        "pictures.key IS NOT NULL AND rows.reason IS NULL GROUP BY rows.source, pictures.key HAVING COUNT(*) > 1"
    )
    most = store.db.execute("SELECT key, source, n, files FROM often ORDER BY n DESC, key LIMIT 8").fetchall()
    return {
        "rows": store.value("SELECT COALESCE(SUM(n - 1), 0) FROM often"),
        "pictures": store.value("SELECT COUNT(*) FROM often"),
        "most": [{"key": key, "source": source, "rows": rows, "files": files} for key, source, rows, files in most],
    }


def _sizes(store: Store) -> dict[str, Any]:
    found = store.db.execute(
        "SELECT width, height, bytes, turned, shrunk FROM (SELECT DISTINCT picture FROM samples WHERE dropped IS NULL) AS one "
        "JOIN pictures ON pictures.number = one.picture"
    )
    rows = np.fromiter(found, dtype=np.dtype((np.int64, 5)))  # not fetchall: ten million tuples take gigabytes
    longer, shorter = rows[:, :2].max(1, initial=0), rows[:, :2].min(1, initial=1 << 30)
    return {
        "longer_side": _spread(longer),
        "shorter_side": _spread(shorter),
        "mean_bytes": round(float(rows[:, 2].mean()), 1) if len(rows) else 0.0,
        "turned": int(rows[:, 3].sum()),
        "shrunk": int(rows[:, 4].sum()),
    }
