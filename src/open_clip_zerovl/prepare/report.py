"""The report of a call: numbers for `report.json`, lines for a terminal, tables of refused and of packed rows, a page."""

from __future__ import annotations

import csv
import gzip
import io
import os
import shlex
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import printable
from open_clip_zerovl.core.files import atomic_file
from open_clip_zerovl.data.names import FEWEST_PICTURES
from open_clip_zerovl.data.splits import SPLITS
from open_clip_zerovl.prepare.rows import Reader
from open_clip_zerovl.prepare.store import PairDatabase, Stored
from open_clip_zerovl.report.pages import thumbnail, write_page
from open_clip_zerovl.report.verdicts import LOW_BEST, RECALL_KS, SHARED_CAPTIONS
from open_clip_zerovl.shards.pictures import BadPicture, as_shown, decoded
from open_clip_zerovl.shards.tar import BYTES_BEHIND
from open_clip_zerovl.shards.texts import UNMARKED, WORDS_FOR_NOTHING

_EXAMPLES = 5
_SHOWN_EXAMPLES = 3
RELEASED = "ViT-B-32/laion2b_s34b_b79k"
IMAGE = "timm:vit_base_patch14_dinov2.lvd142m"
TEXT = "hf:sentence-transformers/all-mpnet-base-v2"
_REPOSITORIES = {  # the models of the proposed commands -> their repositories on the hub
    RELEASED: "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
    IMAGE: "timm/vit_base_patch14_dinov2.lvd142m",
    TEXT: "sentence-transformers/all-mpnet-base-v2",
}
_OPEN_CLIP = "open_clip_config.json"  # marks a repository of open_clip
FEWEST = 10_000  # pictures for a training from nothing
COUNTED = 2_000  # captions whose words are counted
_AS_UTF8 = "probably Latin-1: convert the file to UTF-8 (iconv -f CP1252 -t UTF-8 OLD > NEW)"
ADVICE = {  # reason of refused rows -> remedy
    "caption not UTF-8": _AS_UTF8,
    "path not UTF-8": _AS_UTF8,
    "source not UTF-8": _AS_UTF8,
    BYTES_BEHIND: "unpack all of it with tar --ignore-zeros, and pack the folder",
    UNMARKED: "convert the file to UTF-8 (iconv -f UTF-16LE, or UTF-16BE, -t UTF-8 OLD > NEW)",
}


def summarize(
    store: PairDatabase, readers: Sequence[Reader], written: Sequence[dict[str, Any]], out: Path
) -> dict[str, Any]:
    """Compute all numbers of the report.

    Args:
        store: with its samples split.
        readers: the inputs.
        written: results of `write_split`.
        out: the folder that their folders are relative to.
    """
    return {
        "inputs": [
            {
                "input": str(reader.path),
                "form": reader.form,
                "columns": reader.columns,
                "rows": store.value("SELECT COUNT(*) FROM rows WHERE input = ?", number),
                "notes": [
                    *_split_notes(store, number, reader),
                    *reader.notes,
                    *(_class_notes(store, number) if reader.classes else ()),
                ],
            }
            for number, reader in enumerate(readers)
        ],
        "rows": store.row_count,
        "pictures": store.count(),
        "captions": sum(part["captions"] for part in written),
        "written": [
            {**part, "folder": str(Path(part["folder"]).relative_to(out))} for part in written
        ],
        "classes": store.classes(),
        "refused": refused(store),
        "dropped": dict(
            store.db.execute(
                "SELECT dropped, COUNT(*) FROM samples WHERE dropped IS NOT NULL GROUP BY dropped"
            ).fetchall()
        ),
        "words": _words(store),
        "captions_per_picture": _most_captions(store),
        "words_for_nothing": _words_for_nothing(store),
        "repeated_rows": _repeated_rows(store),
        "repeated_captions": _repeated_captions(store),
        "repeated_pictures": _repeated_pictures(store),
        "sizes": _sizes(store),
    }


def _words_for_nothing(store: PairDatabase) -> dict[str, int]:
    """Count the captions that programs write for an empty cell ("nan", "None")."""
    marks = ", ".join("?" * len(WORDS_FOR_NOTHING))
    return dict(
        store.db.execute(
            f"SELECT text, COUNT(*) FROM written WHERE lower(text) IN ({marks}) GROUP BY text",
            WORDS_FOR_NOTHING,
        ).fetchall()
    )


def _split_notes(store: PairDatabase, input: int, reader: Reader) -> list[str]:
    """Say how many rows of an input are of each split, if its names or a column say splits."""
    counts = dict(
        store.db.execute(
            "SELECT split, COUNT(*) FROM rows WHERE input = ? GROUP BY split", (input,)
        ).fetchall()
    )
    odd = ", ".join(map(repr, sorted(store.odd_splits[input])))
    notes = [
        f"column {reader.split_column!r} names no split with {odd}: such rows count as without one"
    ]
    if not reader.splits.says and counts.keys() <= {"train"}:
        return notes if odd else []
    by = f"column {reader.split_column!r}" if reader.split_column else "names of folders and files"
    parts = [f"{split} {counts[split]:,}" for split in SPLITS if split in counts]
    as_test = "val" in counts and not store.count(split="val")
    only = "; validation is the test split, as there is no other" if as_test else ""
    return [f"splits, by {by}: {', '.join(parts)} rows{only}", *(notes if odd else ())]


def _class_notes(store: PairDatabase, input: int) -> list[str]:
    """Note pictures that several classes hold, if the first row of one is of this input."""
    count, first = store.db.execute(
        "SELECT COUNT(*), MIN(place) FROM (SELECT MIN(place) AS place FROM good WHERE label IS NOT NULL GROUP BY source, key "
        "HAVING COUNT(DISTINCT label) > 1 AND MIN(input) = ?)",
        (input,),
    ).fetchone()
    words = f"pictures in several classes: {count:,} (one is {first}); the first class counts, all captions are kept"
    return [words] if count else []


def refused(store: PairDatabase) -> dict[str, Any]:
    """Return reason -> {rows, pictures, transient, examples} of rows that are refused, the most frequent first."""
    refusals: dict[str, Any] = {}
    for reason, count, places, transient in store.db.execute(
        "SELECT COALESCE(rows.reason, pictures.reason) AS why, COUNT(*), COUNT(DISTINCT picture), MAX(COALESCE(transient, 0)) "
        "FROM rows LEFT JOIN pictures ON pictures.number = rows.picture WHERE why IS NOT NULL GROUP BY why "
        "ORDER BY COUNT(*) DESC, why"
    ):
        refusals[reason] = {
            "rows": count,
            "pictures": places,
            "transient": bool(transient),
            "examples": [],
        }
    for reason, entry in refusals.items():
        entry["examples"] = [
            {"at": where(file, line), "picture": place or ""}
            for file, line, place in store.db.execute(
                "SELECT file, line, place FROM rows LEFT JOIN pictures ON pictures.number = rows.picture "
                "WHERE COALESCE(rows.reason, pictures.reason) = ? ORDER BY rows.id LIMIT ?",
                (reason, _EXAMPLES),
            )
        ]
    return refusals


def where(file: str, line: int) -> str:
    """Write `pets.csv line 17`, or the file alone."""
    return f"{file} line {line}" if line else file


def write_refused(store: PairDatabase, path: Path) -> None:
    """Write every row that is not in the shards as CSV: file, line, reason, the picture's place."""
    rows = store.db.execute(
        "SELECT file, line, COALESCE(rows.reason, pictures.reason, dropped) AS why, place FROM rows LEFT JOIN pictures ON "
        "pictures.number = rows.picture LEFT JOIN samples ON samples.key = pictures.key AND samples.source = rows.source "
        "WHERE why IS NOT NULL ORDER BY rows.id"
    )
    with atomic_file(path) as file:
        _write_csv(file, ("file", "line", "reason", "picture"), rows)


def write_origins(store: PairDatabase, path: Path) -> None:
    """Write every row that is in a sample, as gzipped CSV: the sample's key, source and split, file and line, the picture's
    place.
    """
    rows = store.db.execute(
        "SELECT key, source, split, file, line, good.place FROM good JOIN samples USING (key, source) WHERE dropped IS NULL "
        "ORDER BY row"
    )
    with atomic_file(path) as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        _write_csv(packed, ("key", "source", "split", "file", "line", "picture"), rows)


def _write_csv(file: Any, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.TextIOWrapper(file, "utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:  # Python 3.10 writes no zero byte
        writer.writerow(
            [each.replace("\0", " ") if isinstance(each, str) else each for each in row]
        )
    text.detach()  # writes the rest, and leaves the file open


# ------------------------------------------------------------------------------------------------------------ lines


def lines(report: dict[str, Any], out: Path) -> list[str]:
    """Write the report for a terminal, without the commands and what only the page shows."""
    texts = []
    for entry in report["inputs"][:3]:
        texts += [f"{entry['input']}: {entry['form']}, {entry['columns']}; {entry['rows']:,} rows"]
        texts += [f"  {note}" for note in entry["notes"]]
    if len(report["inputs"]) > 3:
        texts.append(f"and {len(report['inputs']) - 3} more inputs; {report['rows']:,} rows in all")
    counts = [f"{report[name]:,} {name}" for name in ("pictures", "captions", "rows")]
    texts.append(f"{counts[0]} with {counts[1]} of {counts[2]} are in {out}")
    for part in report["written"][:6]:
        plural = "shard " if part["shards"] == 1 else "shards"
        texts.append(
            f"  {part['source'] + ' ' + part['split']:18s} {part['pictures']:>9,} pictures {part['captions']:>9,} captions "
            f"{part['shards']:>5} {plural} {part['bytes'] / 1e6:>9,.1f} MB  {part['folder']}"
        )
    if len(report["written"]) > 6:
        texts.append(f"  and {len(report['written']) - 6} more folders")
    if classes := report["classes"]:
        smallest = min(classes, key=classes.__getitem__)
        largest = max(classes, key=classes.__getitem__)
        spread = f"{classes[smallest]:,} ({smallest!r}) to {classes[largest]:,} ({largest!r})"
        equal = classes[smallest] == classes[largest]
        spread = f"{classes[largest]:,}" if equal else spread
        texts.append(f"classes    {len(classes)}, of {spread} pictures{' each' * equal}")
    texts += _refused_lines(report)
    texts += [
        f"left out   {count:,} pictures {reason}, in refused.csv too"
        for reason, count in report["dropped"].items()
    ]
    if nothing := report["words_for_nothing"]:
        words = ", ".join(f"{count:,} {word!r}" for word, count in nothing.items())
        texts.append(
            f"nothing    captions that stand for an empty cell: {words}; leave their rows out"
        )
    if repeated := report["repeated_rows"]:
        texts.append(
            f"left out   {repeated:,} row{'s' * (repeated > 1)} with picture and captions of earlier rows"
        )
    if report["repeated_captions"]["best_rsum"] < LOW_BEST:
        texts.append(f"repeated   {SHARED_CAPTIONS}")
    return [printable(line) for line in texts]


def _refused_lines(report: dict[str, Any]) -> list[str]:
    refused = list(report["refused"].items())
    total = sum(entry["rows"] for _, entry in refused)
    if not total:
        return ["refused    nothing"]
    texts = [
        f"refused    {'1 row, which is' if total == 1 else f'{total:,} rows, all of them'} in refused.csv:"
    ]
    shown_reasons = 5 if len(refused) == 5 else 4
    for reason, entry in refused[:shown_reasons]:
        shown = ", ".join(example["at"] for example in entry["examples"][:_SHOWN_EXAMPLES])
        more = " ..." if entry["rows"] > _SHOWN_EXAMPLES else ""
        advice = f"; {ADVICE[reason]}" if reason in ADVICE else ""
        texts.append(f"  {entry['rows']:>7,} {reason}: {shown}{more}{advice}")
    if rest := refused[shown_reasons:]:
        texts.append(
            f"  {sum(entry['rows'] for _, entry in rest):>7,} for {len(rest)} other reasons"
        )
    return texts


def commands(report: dict[str, Any], out: Path) -> list[str]:
    """Write the commands to type next with the strings of this data: a model fine-tuned, encoders aligned, a training from
    nothing.

    A training from nothing is proposed for `FEWEST` pictures or more. For fewer, an evaluation of the released model on the
    pictures that are held out.
    """
    folders = {
        split: [part for part in report["written"] if part["split"] == split] for split in SPLITS
    }
    train = "::".join(f"{part['source']}={out / part['folder']}" for part in folders["train"])
    sets = "::".join(
        f"{part['source']}={(out / part['folder']).parent}" for part in folders["test"]
    )
    tuned, aligned = (
        shlex.quote(f"{out if out.name else out.absolute()}-{end}") for end in ("tuned", "aligned")
    )
    packed = shlex.quote(str(out))
    released, image, text = models_at_hand()
    proposals = [
        f"zerovl finetune --from {released} --data {packed} --out {tuned}",
        f"zerovl align --image {image} --text {text} --data {packed} --out {aligned}",
    ]
    if few_to_hold_out(report):
        proposals = []
    if too_few(report):
        command = "zero-shot" if report["classes"] else "retrieval"
        return [
            *proposals,
            *([f"zerovl {command} {released} --data {shlex.quote(sets)}"] if sets else []),
        ]
    flags = ["--train-data", shlex.quote(train)]
    if len(folders["train"]) > 1:
        flags.append("--debiased-sampling")
    if sets:
        flags += ["--retrieval-data", shlex.quote(sets)]
    if sets and report["classes"] and len(folders["test"]) == 1:
        flags += ["--zero-shot-data", shlex.quote(sets)]
    # where there are classes it is the default
    if not report["classes"] and report["repeated_captions"]["best_rsum"] < LOW_BEST:
        flags += ["--positives", "caption"]
    smallest = min((part["pictures"] for part in folders["train"]), default=0)
    flags += ["--warmup-share", "0.025", "--batch-size", str(batch_size(smallest))]
    return [*proposals, f"zerovl train --model ViT-B-32 {' '.join(flags)}"]


def next_line(report: dict[str, Any]) -> str:
    """Write the line above the commands."""
    if few_to_hold_out(report):
        return f"{report['pictures']} pictures are too few to train on: `zerovl finetune` needs {FEWEST_PICTURES}"
    if too_few(report):
        return f"next (with fewer than {FEWEST:,} pictures fine-tune or evaluate; a training from nothing needs more):"
    return "next, a released model fine-tuned, or one from nothing:"


def next_lines(report: dict[str, Any], out: Path) -> list[str]:
    """List the commands to type next under their heading, and which models of theirs would be fetched."""
    proposals = commands(report, out)
    cached = _cached_models()
    missing = [
        name
        for name, repository in _REPOSITORIES.items()
        if any(name in command for command in proposals) and repository not in cached
    ]
    note = f"(fetched from the hub: {', '.join(missing)}; a model on this disk takes its place)"
    return [next_line(report), *([note] if missing else []), *proposals]


def _cached_models() -> dict[str, set[str]]:
    """Return the files of each repository in the hub's cache on this disk, the smallest repository first."""
    from huggingface_hub import constants, scan_cache_dir

    if not os.path.isdir(constants.HF_HUB_CACHE):
        return {}
    repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    return {
        repository.repo_id: {
            file.file_name for revision in repository.revisions for file in revision.files
        }
        for repository in sorted(repositories, key=lambda each: (each.size_on_disk, each.repo_id))
        if repository.repo_type == "model"
    }


def models_at_hand() -> tuple[str, str, str]:
    """Choose a model to fine-tune and an image and a text encoder to align: the usual ones, or else what lies on this disk."""
    cached = _cached_models()
    marks = (
        (RELEASED, "hf-hub:{}", _OPEN_CLIP, ""),
        (IMAGE, "{}", "config.json", "timm/"),
        (TEXT, "hf:{}", "modules.json", ""),
    )
    chosen = []
    for usual, form, mark, owner in marks:
        here = [
            form.format(name.replace("timm/", "timm:"))
            for name, files in cached.items()
            if mark in files
            and name.startswith(owner)
            and (usual == RELEASED or _OPEN_CLIP not in files)
        ]
        chosen.append(here[0] if here and _REPOSITORIES[usual] not in cached else usual)
    return chosen[0], chosen[1], chosen[2]


def few_to_hold_out(report: dict[str, Any]) -> bool:
    """Return whether nothing is held out, and `zerovl finetune` has too few pictures to hold some out."""
    nothing = all(part["split"] == "train" for part in report["written"])
    return nothing and report["pictures"] < FEWEST_PICTURES


def too_few(report: dict[str, Any]) -> bool:
    """Return whether there are too few training pictures to train a model from nothing."""
    return sum(part["pictures"] for part in report["written"] if part["split"] == "train") < FEWEST


def batch_size(pictures: int) -> int:
    """Choose a micro-batch for a first run: a power of two up to 128, of which the smallest source has several."""
    return max((size for size in (2, 4, 8, 16, 32, 64, 128) if size * 4 <= pictures), default=1)


# ---------------------------------------------------------------------------------------------------------- numbers


def _spread(values: np.ndarray) -> dict[str, Any]:
    shown = np.quantile(values, (0, 0.5, 0.95, 1)).astype(int).tolist() if len(values) else [0] * 4
    return dict(zip(("min", "median", "p95", "max"), shown, strict=True))


def _words(store: PairDatabase) -> dict[str, Any]:
    """Count the words of captions of the first samples in the order."""
    cursor = store.db.execute(
        "SELECT text FROM written ORDER BY position, row, place LIMIT ?", (COUNTED,)
    )
    counts = np.array([len(text.split()) for (text,) in cursor])
    return {"captions": len(counts), **_spread(counts)}


def _most_captions(store: PairDatabase) -> int:
    return store.value(
        "SELECT COALESCE(MAX(n), 0) FROM (SELECT COUNT(DISTINCT text) AS n FROM written GROUP BY source, key)"
    )


def _repeated_rows(store: PairDatabase) -> int:
    """Count the rows that add nothing: an earlier row of their source has the same picture with each of their captions."""
    rows = store.value(
        "SELECT COUNT(*) FROM good JOIN samples USING (source, key) WHERE dropped IS NULL"
    )
    return rows - store.value(
        "SELECT COUNT(DISTINCT row) FROM (SELECT MIN(row) AS row FROM written GROUP BY source, key, text)"
    )


def _repeated_captions(store: PairDatabase) -> dict[str, Any]:
    """Count the pictures with a caption that another picture has too, and list the captions with most pictures."""
    store.db.execute(
        "CREATE TEMP TABLE IF NOT EXISTS repeated AS SELECT text, COUNT(DISTINCT key) AS pictures FROM texts GROUP BY text "
        "HAVING COUNT(DISTINCT key) > 1"
    )
    most = store.db.execute(
        "SELECT text, pictures FROM repeated ORDER BY pictures DESC, text LIMIT 10"
    )
    return {
        "captions": store.value("SELECT COUNT(*) FROM repeated"),
        "pictures": store.value("SELECT COALESCE(SUM(pictures), 0) FROM repeated"),
        "most": [{"caption": text, "pictures": count} for text, count in most],
        "best_rsum": round(_best_rsum(store), 1),
    }


def _best_rsum(store: PairDatabase) -> float:
    """Compute RSUM of the best possible model, which cannot tell pictures of one text apart by the text.

    A text with n pictures finds its own among K with the probability K/n, and the picture its text likewise.
    """
    whole = store.value("SELECT COUNT(*) FROM (SELECT DISTINCT text, key FROM texts)")
    hits = [
        whole - store.value("SELECT COALESCE(SUM(pictures), 0) FROM repeated")
        + store.value(f"SELECT COALESCE(SUM(MIN(pictures, {k})), 0) FROM repeated")
        for k in RECALL_KS
    ]  # fmt: skip
    return 200 * sum(hits) / max(whole, 1)


def _repeated_pictures(store: PairDatabase) -> dict[str, Any]:
    """Count the rows with the picture of an earlier row of their source, and list the pictures with most rows."""
    store.db.execute(
        "CREATE TEMP TABLE IF NOT EXISTS often AS SELECT key, source, COUNT(*) AS n, COUNT(DISTINCT number) AS files FROM good "
        "GROUP BY source, key HAVING COUNT(*) > 1"
    )
    most = store.db.execute(
        "SELECT key, source, n, files FROM often ORDER BY n DESC, key LIMIT 8"
    ).fetchall()
    return {
        "rows": store.value("SELECT COALESCE(SUM(n - 1), 0) FROM often"),
        "pictures": store.value("SELECT COUNT(*) FROM often"),
        "most": [
            {"key": key, "source": source, "rows": rows, "files": files}
            for key, source, rows, files in most
        ],
    }


def _sizes(store: PairDatabase) -> dict[str, Any]:
    cursor = store.db.execute(
        "SELECT width, height, size, turned, shrunk, whitened FROM pictures JOIN (SELECT DISTINCT picture FROM samples "
        "WHERE dropped IS NULL) AS one ON pictures.number = one.picture"
    )
    # not fetchall: ten million tuples take gigabytes
    rows = np.fromiter(cursor, dtype=np.dtype((np.int64, 6)))
    longer, shorter = rows[:, :2].max(1, initial=0), rows[:, :2].min(1, initial=1 << 30)
    return {
        "longer_side": _spread(longer),
        "shorter_side": _spread(shorter),
        "mean_bytes": round(float(rows[:, 2].mean()), 1) if len(rows) else 0.0,
        "turned": int(rows[:, 3].sum()),
        "shrunk": int(rows[:, 4].sum()),
        "whitened": int(rows[:, 5].sum()),
    }


# ---------------------------------------------------------------------------------------------------------------- a page

_SAMPLES = 12  # shown of a source and split
_SOURCES = 8


def write_report_page(out: Path, report: dict[str, Any], store: PairDatabase) -> None:
    """Write `report.html`.

    Args:
        out: the folder of the shards.
        report: of `report.summarize`.
        store: with its samples split.
    """

    def figure(sample: Stored, words: str) -> tuple[str | None, str]:
        try:
            shown = decoded(store.content(sample), lambda opened: as_shown(opened).copy())
        except BadPicture:
            return None, words
        return thumbnail(shown), words

    samples = []
    for part in report["written"][: 2 * _SOURCES]:
        some = [
            figure(sample, " / ".join(texts))
            for sample, texts, _ in islice(store.pairs(part["source"], part["split"]), _SAMPLES)
        ]
        heading = f"{part['source']} {part['split']}: {len(some)} of {part['pictures']:,}"
        samples.append((heading, some))
    often = []
    for entry in report["repeated_pictures"]["most"]:
        words = f"{entry['rows']:,} rows, {entry['files']:,} file{'s' * (entry['files'] > 1)}"
        the_picture = "samples.source = ? AND samples.key = ?"
        often += [
            figure(sample, words)
            for sample in store.stored(the_picture, entry["source"], entry["key"])
        ]
    best = report["repeated_captions"]["best_rsum"]
    write_page(
        out / "report.html",
        "pack.html",
        title="What was packed",
        report=report,
        next_line=next_line(report),
        commands=commands(report, out),
        samples=samples,
        often=often,
        few_captions=SHARED_CAPTIONS if best < LOW_BEST else "",
    )
