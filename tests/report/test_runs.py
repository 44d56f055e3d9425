"""A run's record and its page: positions that come once, damaged files, the contents of the page, and that it loads nothing."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.report.run import Record, read_record, write_run_page
from open_clip_zerovl.report.tables import duration


def step(at: float, loss: float | None = 1.0, **by_source: float) -> tuple[str, float, dict]:
    course = {"lr": 1e-3, "samples_per_second": 10.0, "waited": 0.1}
    return "step", at, {"loss": loss, "by_source": by_source, **course}


def write(folder: Path, *lines: tuple[str, float, dict], at: float = 0.0) -> Record:
    """Write (kind, position, entries) as a run does that begins at `at`."""
    folder.mkdir(exist_ok=True)
    record = Record(folder, at)
    for kind, place, entries in lines:
        record.add(kind, place, **entries)
    return record


CHANCE = {"rsum_chance": 280.0, "rsum_chance_upper": 310.0, "rsum_best": 320.0}
RECALLS = {f"{way}_R@{k}": 0.5 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}


def write_record(folder: Path, *, name: str = "a") -> None:
    start = {"model": "tiny", "batch": "4 x 2 x 1", "epochs": 2, "loss_at_chance": 1.5, "steps": 4,
             "sources": {name: 40, "b": 20}, "settings": {"lr": "0.001", "train_data": "<script>"}}  # fmt: skip
    losses = [5.0 - i / 2 if i != 6 else math.nan for i in range(8)]
    sources = [{name: 5.0 - i / 2} if i % 2 else {"b": 4.0} for i in range(8)]
    lost = {"delivered": {name: 40, "b": 20}, "lost": {name: {"no caption": 2}}}
    write(
        folder,
        ("start", 0.0, start),
        *(step((i + 1) / 4, losses[i], **sources[i]) for i in range(8)),
        ("retrieval", 1, {"metrics": {"coco": RECALLS | {"rsum": 300.0} | CHANCE}}),
        ("lost", 1, lost),
        ("retrieval", 2, {"metrics": {"coco": {**RECALLS, "rsum": 250.0}}}),
        ("zero-shot", 2, {"metrics": {"shop": {"top1": 0.7, "top1_chance": 0.1}}}),
        ("lost", 2, lost),
        ("end", 2.0, {"how": "done", "words": ""}),
    )


def test_what_lies_after_the_position_of_a_resume_is_taken_back(tmp_path):
    steps = [step(at) for at in (1 / 3, 2 / 3, 1.0, 4 / 3)]
    ended = ("end", 4 / 3, {"how": "stopped"})
    record = write(tmp_path, *steps, ("retrieval", 1, {"metrics": {}}), ended)
    with open(record.path, "a") as file:
        file.write('{"kind": "step", "at": 1.5, "lo')  # a killed process's last line
    write(tmp_path, step(1.0, loss=9.0), at=0 + 2 / 3)
    found = read_record(tmp_path)
    assert [(line["at"], line["loss"]) for line in found["step"]] == [
        (1 / 3, 1.0),
        (2 / 3, 1.0),
        (1.0, 9.0),
    ]
    assert not found["retrieval"] and not found["end"]
    assert len(record.path.read_text().splitlines()) == 3
    # A run that was killed after it had evaluated an epoch and before the epoch's checkpoint evaluates it again.
    for at, rsum in ((1.0, 1.0), (2.0, 2.0)):
        write(tmp_path, ("retrieval", 2, {"metrics": {"x": {"rsum": rsum}}}), at=at)
    assert [line["metrics"]["x"]["rsum"] for line in read_record(tmp_path)["retrieval"]] == [2.0]


def test_the_page(tmp_path):
    write_record(tmp_path / "run", name="a & <b>")
    assert "<pre>" not in write_run_page(tmp_path / "run").read_text()  # nothing to export
    (tmp_path / "run/checkpoints").mkdir()
    for saved in (2, 10, "latest"):
        (tmp_path / f"run/checkpoints/epoch_{saved}.pt").touch()
    page = write_run_page(tmp_path / "run").read_text()
    run = tmp_path / "run"
    assert f"<pre>zerovl export {run}/checkpoints/epoch_10.pt {run}/exported</pre>" in page
    assert page.count('src="data:image/png;base64,') == 4  # loss, retrieval, zero-shot, course
    for words in (
        "Not above chance: coco (RSUM 300.0; a random order has 280.0, and reaches 310.0).", "<td>280.0</td>",
        "The loss ends at 1.500; a model that cannot tell pairs apart has 1.500.", "Zero-shot top-1 after epoch 2: shop 70.0 %",
        "without --positives caption", "can reach at most: coco 320.", "Training run run",
        "tiny. 2 of 2 epochs, 4 x 2 x 1. Ended as planned.", "Best RSUM: coco 300.0 after epoch 1.",
        "The loss of 1 logged steps is not a number, first at epoch 1.75.", "coco, best", "coco, last",
        "<td>a &amp; &lt;b&gt;</td><td>40</td><td>80</td><td>4 no caption (5 %)</td>",
        "<td>b</td><td>20</td><td>40</td><td>none</td>", "<td>--train-data</td><td>&lt;script&gt;</td>",
    ):  # fmt: skip
        assert words in page, words
    assert "<script" not in page and not re.search(r'(?:src|href)="(?!data:)', page)


def test_a_line_of_another_form_is_left_out_and_one_with_other_values_named(tmp_path, caplog):
    write_record(tmp_path)
    page = write_run_page(tmp_path).read_text()
    assert not caplog.messages
    with open(tmp_path / "record.jsonl", "a") as file:
        file.write('{"kind": "end", "at": "2"}\n{"kind": "step", "at"')
    assert write_run_page(tmp_path).read_text() == page
    assert "2 lines are cut off or not as training writes them" in caplog.text
    with open(tmp_path / "record.jsonl", "a") as file:
        file.write('\n{"kind": "retrieval", "at": 2, "metrics": 5}\n')
    with pytest.raises(
        UserError, match="record.jsonl cannot be read .*; the page of the run is not"
    ):
        write_run_page(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"), (0, "0 s"), (0.0858, "85.8 ms"), (0.1134, "0.113 s"), (41, "41 s"), (59.99, "60 s"), (200, "3 min 20 s"),
        (3600, "1 h"), (18_750, "5 h 12 min"), (190_000, "2 d 4 h"),
    ],
)  # fmt: skip
def test_duration(seconds, words):
    assert duration(seconds) == words
