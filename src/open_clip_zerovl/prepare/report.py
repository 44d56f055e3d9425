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
    marks = ", ".join("?" * len(WORDS_FOR_NOTHING))
    first = store.db.execute(
        "SELECT text FROM written ORDER BY position, row, place LIMIT ?", (COUNTED,)
    )
    words = np.array([len(text.split()) for (text,) in first])
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
        "dropped": store.counts(
            "SELECT dropped, COUNT(*) FROM samples WHERE dropped IS NOT NULL GROUP BY dropped"
        ),
        "words": {"captions": len(words), **_spread(words)},
        "words_for_nothing": store.counts(
            f"SELECT text, COUNT(*) FROM written WHERE lower(text) IN ({marks}) GROUP BY text",
            *WORDS_FOR_NOTHING,
        ),
        # rows of which an earlier row of the source has the picture with each of the captions
        "repeated_rows": store.value(
            "SELECT (SELECT COUNT(*) FROM good JOIN samples USING (source, key) WHERE dropped IS NULL) - (SELECT "
            "COUNT(DISTINCT row) FROM (SELECT MIN(row) AS row FROM written GROUP BY source, key, text))"
        ),
        "repeated_captions": _repeated_captions(store),
        "sizes": _sizes(store),
    }


def _split_notes(store: PairDatabase, input: int, reader: Reader) -> list[str]:
    """Say how many rows of an input are of each split, if its names or a column say splits."""
    counts = store.counts("SELECT split, COUNT(*) FROM rows WHERE input = ? GROUP BY split", input)
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
    why = "COALESCE(rows.reason, pictures.reason)"
    rows = "FROM rows LEFT JOIN pictures ON pictures.number = rows.picture WHERE"
    counts = store.db.execute(
        f"SELECT {why} AS why, COUNT(*), COUNT(DISTINCT picture), MAX(COALESCE(transient, 0)) {rows} why IS NOT NULL GROUP BY "
        "why ORDER BY COUNT(*) DESC, why"
    )
    examples = f"SELECT file, line, place {rows} {why} = ? ORDER BY rows.id LIMIT {_EXAMPLES}"
    return {
        reason: {
            "rows": count,
            "pictures": places,
            "transient": bool(transient),
            "examples": [  # pets.csv line 17, or the file alone
                {"at": f"{file} line {line}" if line else file, "picture": place or ""}
                for file, line, place in store.db.execute(examples, (reason,))
            ],
        }
        for reason, count, places, transient in counts.fetchall()
    }


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
    """Write the report for a terminal, without the next commands and what only the page shows."""
    texts = []
    for entry in report["inputs"]:
        texts += [f"{entry['input']}: {entry['form']}, {entry['columns']}; {entry['rows']:,} rows"]
        texts += [f"  {note}" for note in entry["notes"]]
    counts = [f"{report[name]:,} {name}" for name in ("pictures", "captions", "rows")]
    texts.append(f"{counts[0]} with {counts[1]} of {counts[2]} are in {out}")
    for part in report["written"]:
        plural = "shard " if part["shards"] == 1 else "shards"
        texts.append(
            f"  {part['source'] + ' ' + part['split']:18s} {part['pictures']:>9,} pictures {part['captions']:>9,} captions "
            f"{part['shards']:>5} {plural} {part['bytes'] / 1e6:>9,.1f} MB  {part['folder']}"
        )
    if classes := report["classes"]:
        smallest, largest = (pick(classes, key=classes.__getitem__) for pick in (min, max))
        spread = (
            f"{classes[smallest]:,} ({smallest!r}) to {classes[largest]:,} ({largest!r}) pictures"
        )
        if classes[smallest] == classes[largest]:
            spread = f"{classes[largest]:,} pictures each"
        texts.append(f"classes    {len(classes)}, of {spread}")
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
    if passing := sum(entry["rows"] for entry in report["refused"].values() if entry["transient"]):
        texts.append(
            f"{passing:,} rows failed for a reason that may pass: the same command with --retry-failed tries them again"
        )
    return [printable(line) for line in (*texts, f"samples    {out / 'report.html'}")]


def _refused_lines(report: dict[str, Any]) -> list[str]:
    total = sum(entry["rows"] for entry in report["refused"].values())
    if not total:
        return ["refused    nothing"]
    texts = [
        f"refused    {'1 row, which is' if total == 1 else f'{total:,} rows, all of them'} in refused.csv:"
    ]
    for reason, entry in report["refused"].items():
        shown = ", ".join(example["at"] for example in entry["examples"][:_SHOWN_EXAMPLES])
        more = " ..." if entry["rows"] > _SHOWN_EXAMPLES else ""
        advice = f"; {ADVICE[reason]}" if reason in ADVICE else ""
        texts.append(f"  {entry['rows']:>7,} {reason}: {shown}{more}{advice}")
    return texts


def next_steps(report: dict[str, Any], out: Path) -> tuple[str, str, list[str]]:
    """Write the commands to type next with the strings of this data: a model fine-tuned, encoders aligned, a training from
    nothing.

    A training from nothing is proposed for `FEWEST` pictures or more. For fewer, an evaluation of the released model on the
    pictures that are held out.

    Returns:
        A heading, a note on models that would be fetched, "" for none, and the commands.
    """
    written = report["written"]
    training, held_out = (
        [part for part in written if part["split"] == split] for split in ("train", "test")
    )
    sets = shlex.quote(
        "::".join(f"{part['source']}={(out / part['folder']).parent}" for part in held_out)
    )
    packed = shlex.quote(str(out))
    base = out if out.name else out.absolute()
    models = models_at_hand()
    released, image, text = models
    commands = [
        f"zerovl finetune --from {released} --data {packed} --out {shlex.quote(f'{base}-tuned')}",
        f"zerovl align --image {image} --text {text} --data {packed} --out {shlex.quote(f'{base}-aligned')}",
    ]
    pictures = [part["pictures"] for part in training]
    if report["pictures"] < FEWEST_PICTURES and len(training) == len(written):
        heading = f"{report['pictures']} pictures are too few to train on: `zerovl finetune` needs {FEWEST_PICTURES}"
        commands = []
    elif sum(pictures) < FEWEST:
        heading = f"next (with fewer than {FEWEST:,} pictures fine-tune or evaluate; a training from nothing needs more):"
        if held_out:
            command = "zero-shot" if report["classes"] else "retrieval"
            commands.append(f"zerovl {command} {released} --data {sets}")
    else:
        heading = "next, a released model fine-tuned, or one from nothing:"
        train = "::".join(f"{part['source']}={out / part['folder']}" for part in training)
        flags = f" --train-data {shlex.quote(train)}"
        flags += " --debiased-sampling" * (len(training) > 1)
        flags += f" --retrieval-data {sets}" * bool(held_out)
        flags += f" --zero-shot-data {sets}" * bool(report["classes"] and len(held_out) == 1)
        # where there are classes it is the default
        shared = not report["classes"] and report["repeated_captions"]["best_rsum"] < LOW_BEST
        flags += " --positives caption" * shared
        # several micro-batches of the smallest source
        batch = max((2**n for n in range(1, 8) if 4 * 2**n <= min(pictures)), default=1)
        flags += f" --warmup-share 0.025 --batch-size {batch}"
        commands.append(f"zerovl train --model ViT-B-32{flags}")
    missing = [
        model
        for model, absent in models.items()
        if absent and any(model in command for command in commands)
    ]
    note = f"(fetched from the hub: {', '.join(missing)}; a model on this disk takes its place)"
    return heading, note if missing else "", commands


def next_lines(report: dict[str, Any], out: Path) -> list[str]:
    """List the commands to type next under their heading."""
    heading, note, commands = next_steps(report, out)
    return [heading, *filter(None, [note]), *commands]


def models_at_hand() -> dict[str, bool]:
    """Choose a model to fine-tune and an image and a text encoder to align: the usual ones, or else what lies on this disk.

    Returns:
        Model -> whether it would be fetched from the hub. The smallest on this disk comes first.
    """
    from huggingface_hub import constants, scan_cache_dir

    cached: dict[str, set[str]] = {}
    if os.path.isdir(constants.HF_HUB_CACHE):
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
        for repository in sorted(repositories, key=lambda each: (each.size_on_disk, each.repo_id)):
            if repository.repo_type == "model":
                files = (file for revision in repository.revisions for file in revision.files)
                cached[repository.repo_id] = {file.file_name for file in files}
    chosen = {}
    for usual, usual_repository, form, mark, owner in (
        (RELEASED, "laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "hf-hub:{}", _OPEN_CLIP, ""),
        (IMAGE, "timm/vit_base_patch14_dinov2.lvd142m", "{}", "config.json", "timm/"),
        (TEXT, "sentence-transformers/all-mpnet-base-v2", "hf:{}", "modules.json", ""),
    ):
        here = [
            form.format(name.replace("timm/", "timm:"))
            for name, names in cached.items()
            if mark in names
            and name.startswith(owner)
            and (usual == RELEASED or _OPEN_CLIP not in names)
        ]
        absent = usual_repository not in cached
        chosen[here[0] if here and absent else usual] = absent and not here
    return chosen


# ---------------------------------------------------------------------------------------------------------- numbers


def _spread(values: np.ndarray) -> dict[str, Any]:
    shown = np.quantile(values, (0, 0.5, 0.95, 1)).astype(int).tolist() if len(values) else [0] * 4
    return dict(zip(("min", "median", "p95", "max"), shown, strict=True))


def _repeated_captions(store: PairDatabase) -> dict[str, Any]:
    """Count the pictures with a caption that another picture has too, and list the captions with most pictures.

    RSUM of the best possible model, which cannot tell pictures of one text apart: a text with n pictures finds its own among K
    with the probability K/n, and the picture its text likewise.
    """
    store.db.execute(
        "CREATE TEMP TABLE IF NOT EXISTS repeated AS SELECT text, COUNT(DISTINCT key) AS pictures FROM texts GROUP BY text "
        "HAVING COUNT(DISTINCT key) > 1"
    )
    most = store.db.execute(
        "SELECT text, pictures FROM repeated ORDER BY pictures DESC, text LIMIT 10"
    )
    pairs = store.value("SELECT COUNT(*) FROM (SELECT DISTINCT text, key FROM texts)")
    pictures = store.value("SELECT COALESCE(SUM(pictures), 0) FROM repeated")
    hits = [
        pairs - pictures + store.value(f"SELECT COALESCE(SUM(MIN(pictures, {k})), 0) FROM repeated")
        for k in RECALL_KS
    ]
    return {
        "captions": store.value("SELECT COUNT(*) FROM repeated"),
        "pictures": pictures,
        "most": [{"caption": text, "pictures": count} for text, count in most],
        "best_rsum": round(200 * sum(hits) / max(pairs, 1), 1),
    }


def _sizes(store: PairDatabase) -> dict[str, Any]:
    cursor = store.db.execute(
        "SELECT width, height, turned, shrunk, whitened FROM pictures JOIN (SELECT DISTINCT picture FROM samples "
        "WHERE dropped IS NULL) AS one ON pictures.number = one.picture"
    )
    # not fetchall: ten million tuples take gigabytes
    rows = np.fromiter(cursor, dtype=np.dtype((np.int64, 5)))
    longer, shorter = rows[:, :2].max(1, initial=0), rows[:, :2].min(1, initial=1 << 30)
    return {
        "longer_side": _spread(longer),
        "shorter_side": _spread(shorter),
        "turned": int(rows[:, 2].sum()),
        "shrunk": int(rows[:, 3].sum()),
        "whitened": int(rows[:, 4].sum()),
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
            return decoded(store.content(sample), lambda opened: thumbnail(as_shown(opened))), words
        except BadPicture:
            return None, words

    samples = []
    for part in report["written"][: 2 * _SOURCES]:
        some = [
            figure(sample, " / ".join(texts))
            for sample, texts, _ in islice(store.pairs(part["source"], part["split"]), _SAMPLES)
        ]
        heading = f"{part['source']} {part['split']}: {len(some)} of {part['pictures']:,}"
        samples.append((heading, some))
    best = report["repeated_captions"]["best_rsum"]
    heading, _, commands = next_steps(report, out)
    write_page(
        out / "report.html",
        "pack.html",
        title="What was packed",
        report=report,
        next_line=heading,
        commands=commands,
        samples=samples,
        few_captions=SHARED_CAPTIONS if best < LOW_BEST else "",
    )
