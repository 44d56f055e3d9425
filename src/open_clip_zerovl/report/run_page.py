"""`run.html`: a training run on one page that needs no other file. Training writes it at its end; so does `zerovl report`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.report.html import chart, heading, html_page, paragraph, table
from open_clip_zerovl.report.record import read_record
from open_clip_zerovl.report.run_charts import course_picture, loss_picture, number, retrieval_picture
from open_clip_zerovl.report.run_examples import read_examples

PAGE = "run.html"
_STATES = {"done": "Ended as planned.", "stopped": "Stopped, and can go on.", "failed": "Ended by an error."}
_RECALLS = [f"{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]


def write_run_page(folder: str | os.PathLike[str]) -> Path:
    """Write a run's page, `run.html`, from its record.

    Args:
        folder: of the run, logs/NAME.

    Returns:
        The page's path.

    Raises:
        UserError: no record there, matplotlib is missing, or the page cannot be written.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give that of a run, logs/NAME")
    record = read_record(folder)
    check_writable(folder / PAGE)
    if not record["start"]:
        raise UserError(f"{folder / 'record.jsonl'} does not say how the run began; its file is cut off")
    start, steps = record["start"][-1], record["step"]
    sources = list(_mapping(start.get("sources")))
    body = [paragraph(_lead(record), "lead")]
    if steps:
        body += [
            heading("Loss"),
            chart(loss_picture(steps, sources), "Loss over the epochs"),
            *_loss_words(steps, sources),
        ]
    else:
        body.append(paragraph("No step is recorded; --log-every-n-steps says how often one is."))
    if record["retrieval"]:
        body += [heading("Retrieval"), chart(retrieval_picture(record["retrieval"]), "RSUM over the epochs")]
        body += [_retrieval_table(record["retrieval"]), *_examples(folder)]
    if steps:
        body += [heading("Course"), chart(course_picture(steps), "Learning rate, samples a second, waiting for data")]
    body += [heading("Data"), *_data(start, record["lost"])]
    body += [heading("Settings"), *_settings(start, record["start"])]
    write_atomically(folder / PAGE, html_page(f"Training run {folder.resolve().name}", body))
    return folder / PAGE


def best_evaluation(evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The evaluation with the largest RSUM, on average over the sets; None where there is none."""
    return max(evaluations, key=_mean_rsum, default=None)


def _mean_rsum(line: Mapping[str, Any]) -> float:
    sums = [number(metrics.get("rsum")) for metrics in line["metrics"].values()]
    return sum(sums) / len(sums) if sums else 0.0


def _lead(record: Mapping[str, list[dict[str, Any]]]) -> str:
    start, steps, ends = record["start"][-1], record["step"], record["end"]
    words = [f"{start.get('model', '')}."] if start.get("model") else []
    at = max([*(line["at"] for line in steps), *(line["at"] for line in ends), 0.0])
    epochs = number(start.get("epochs"))
    words.append(f"{at:.4g} of {epochs:.0f} epochs" + (f", {start['batch']}." if start.get("batch") else "."))
    if ends:
        words.append(_STATES.get(ends[-1].get("how", ""), ""))
        if ends[-1].get("words"):
            words.append(str(ends[-1]["words"]))
    else:
        words.append("The record has no end: the run is going on, or was killed.")
    if (best := best_evaluation(record["retrieval"])) is not None:
        sums = ", ".join(f"{name} {number(metrics.get('rsum')):.1f}" for name, metrics in best["metrics"].items())
        words.append(f"Best RSUM: {sums} after epoch {best['at']:.0f}.")
    return " ".join(word for word in words if word)


def _loss_words(steps: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> list[str]:
    words = "Each logged step's loss on the whole effective batch, as a moving average."
    if len(sources) > 1:
        words += (
            " Coloured: the mean loss of each source's pairs. Losses of sources are comparable only where their batches are of "
            "the same kind."
        )
    gone = [step["at"] for step in steps if step.get("loss") is None]
    if gone:
        words += f" The loss of {len(gone)} logged steps is not a number, first at epoch {gone[0]:.4g}."
    return [paragraph(words)]


def _retrieval_table(evaluations: Sequence[Mapping[str, Any]]) -> str:
    best, last = best_evaluation(evaluations), evaluations[-1]
    rows = []
    for line, which in ((best, "best"), (last, "last")):
        assert line is not None
        if line is last and which == "best":
            continue
        for name, metrics in line["metrics"].items():
            values = [f"{100 * number(metrics.get(key)):.1f}" for key in _RECALLS]
            rows.append((f"{name}, {which}", f"{line['at']:.0f}", *values, f"{number(metrics.get('rsum')):.1f}"))
    header = ("set", "epoch", *(f"{way} R@{k}" for way in ("I→T", "T→I") for k in (1, 5, 10)), "RSUM")
    return table(header, rows)


def _examples(folder: Path) -> list[str]:
    epoch, examples = read_examples(folder)
    if not examples:
        return []
    words = (
        f"After epoch {epoch}: captions spread evenly over the set, none picked by its result; each with its own picture, then "
        "the best pictures of the set, the own one framed in green."
    )
    return [heading("Examples"), paragraph(words), *map(_example, examples)]


def _example(example: Mapping[str, Any]) -> str:
    def shown(uri: str, kind: str, words: str) -> str:
        return f'<img class="thumb {kind}" src="{uri}" alt="{escape(words)}">'

    found = "".join(shown(uri, "right" if own else "", "own" if own else "another") for uri, own in example["top"])
    query = f"<span>{escape(example['caption'])}<br><small>{escape(example['set'])}</small></span>"
    return (
        f'<div class="example"><div class="query">{shown(example["own"], "", "the own picture")}{query}</div>'
        f'<div class="ranking"><div class="run"><small>own picture at rank {example["rank"]}</small></div>{found}</div></div>'
    )


def _data(start: Mapping[str, Any], lost: Sequence[Mapping[str, Any]]) -> list[str]:
    sources = _mapping(start.get("sources"))
    delivered: dict[str, int] = {}
    reasons: dict[str, dict[str, int]] = {}
    for line in lost:
        for name, count in _mapping(line.get("delivered")).items():
            delivered[name] = delivered.get(name, 0) + int(count)
        for name, own in _mapping(line.get("lost")).items():
            counts = reasons.setdefault(name, {})
            for reason, count in _mapping(own).items():
                counts[reason] = counts.get(reason, 0) + int(count)
    rows = []
    for name in dict.fromkeys([*sources, *delivered]):
        bad = sum(reasons.get(name, {}).values())
        said = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.get(name, {}).items())) or "none"
        share = f" ({100 * bad / delivered[name]:.2g} %)" if bad and delivered.get(name) else ""
        rows.append((name, _count(sources.get(name)), _count(delivered.get(name, 0)), said + share))
    if not rows:
        return [paragraph("Data of open_clip's own pipeline, whose losses are not counted.")]
    return [
        table(("source", "samples", "shown", "replaced by others of the source"), rows, "words"),
        paragraph("Shown and replaced are counted at the end of each epoch, and of a run that was stopped in one."),
    ]


def _settings(start: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [(f"--{name.replace('_', '-')}", str(value)) for name, value in _mapping(start.get("settings")).items()]
    words = "Flags that are not at their defaults; params.txt has all."
    if len(starts) > 1:
        again = ", ".join(f"{line['at']:.4g}" for line in starts[1:])
        often = "once" if len(starts) == 2 else f"{len(starts) - 1} times"
        words += f" The run was resumed {often}, at epoch {again}."
    return [paragraph(words), table(("flag", "value"), rows, "words")]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"
