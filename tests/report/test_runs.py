"""A run's record and its page: positions that come once, damaged files, the contents of the page, and that it loads nothing."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.retrieval import RetrievalExample
from open_clip_zerovl.report import pages
from open_clip_zerovl.report import run as charts
from open_clip_zerovl.report.pages import thumbnail
from open_clip_zerovl.report.run import Record, read_record, write_examples, write_run_page
from open_clip_zerovl.report.tables import duration

PICTURE = "data:image/jpeg;base64,AAAA"


@pytest.fixture
def as_figures(monkeypatch):
    """The charts as matplotlib's figures instead of PNG."""
    monkeypatch.setattr(pages, "png_bytes", lambda figure: figure)


def test_the_retrieval_chart_of_one_epoch_has_that_epoch_and_begins_at_zero(as_figures):
    """By itself matplotlib shows a single point among fractions of an epoch and of one RSUM."""
    lines = [
        {"at": at, "metrics": {"coco": {"rsum": rsum}}} for at, rsum in ((3, 120.0), (5, 140.0))
    ]
    (one,), (two,) = (
        charts.evaluation_picture(of, {"coco": "red"}).axes for of in (lines[:1], lines)
    )
    assert list(one.get_xticks()) == [3] and one.get_ylim()[0] == 0 and one.get_ylim()[1] > 120
    assert two.get_ylim()[0] > 100


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


RECALLS = {f"{way}_R@{k}": 0.5 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}


def write_record(folder: Path, *, name: str = "a") -> None:
    start = {"model": "tiny", "batch": "4 x 2 x 1", "epochs": 2, "steps": 4, "sources": {name: 40, "b": 20},
             "settings": {"lr": "0.001", "train_data": "<script>"}}  # fmt: skip
    losses = [5.0 - i / 2 if i != 6 else math.nan for i in range(8)]
    sources = [{name: 5.0 - i / 2} if i % 2 else {"b": 4.0} for i in range(8)]
    lost = {"delivered": {name: 40, "b": 20}, "lost": {name: {"no caption": 2}}}
    write(
        folder,
        ("start", 0.0, start),
        *(step((i + 1) / 4, losses[i], **sources[i]) for i in range(8)),
        ("retrieval", 1, {"metrics": {"coco": {**RECALLS, "rsum": 300.0}}}),
        ("lost", 1, lost),
        ("retrieval", 2, {"metrics": {"coco": {**RECALLS, "rsum": 250.0}}}),
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


def test_an_evaluation_that_is_made_again_counts_once(tmp_path):
    """A run that was killed after it had evaluated an epoch and before the epoch's checkpoint evaluates it again."""
    for at, rsum in ((0.0, 1.0), (1.0, 2.0)):
        write(tmp_path, ("retrieval", 1, {"metrics": {"x": {"rsum": rsum}}}), at=at)
    assert [line["metrics"]["x"]["rsum"] for line in read_record(tmp_path)["retrieval"]] == [2.0]


def test_the_page(tmp_path):
    write_record(tmp_path / "run", name="a & <b>")
    shown = (thumbnail(Image.new("RGB", (9, 9))), True)
    write_examples(
        tmp_path / "run",
        2,
        [RetrievalExample("a <i>cat</i>", "coco", PICTURE, [shown], 3)],
    )
    assert "<pre>" not in write_run_page(tmp_path / "run").read_text()  # nothing to export
    (tmp_path / "run/checkpoints").mkdir()
    for saved in (2, 10, "latest"):
        (tmp_path / f"run/checkpoints/epoch_{saved}.pt").touch()
    page = write_run_page(tmp_path / "run").read_text()
    run = tmp_path / "run"
    assert f"<pre>zerovl export {run}/checkpoints/epoch_10.pt {run}/exported</pre>" in page
    assert page.count('src="data:image/png;base64,') == 3  # loss, retrieval, course
    for words in (
        "Training run run", "tiny. 2 of 2 epochs, 4 x 2 x 1. Ended as planned.", "Best RSUM: coco 300.0 after epoch 1.",
        "The loss of 1 logged steps is not a number, first at epoch 1.75.", "coco, best", "coco, last", "own picture at rank 3",
        "a &lt;i&gt;cat&lt;/i&gt;", "<td>a &amp; &lt;b&gt;</td><td>40</td><td>80</td><td>4 no caption (5 %)</td>",
        "<td>b</td><td>20</td><td>40</td><td>none</td>", "<td>--train-data</td><td>&lt;script&gt;</td>",
    ):  # fmt: skip
        assert words in page, words
    assert "<script" not in page and not re.search(r'(?:src|href)="(?!data:)', page)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        ("", "does not say how the run began"),
        (
            'not json\n{"kind": "step", "at": -1}\n[]\n{"kind": "else", "at": 1}\n',
            "does not say how the run began",
        ),
    ],
)
def test_no_record(tmp_path, content, words):
    if content is not None:
        (tmp_path / "record.jsonl").write_text(content)
    with pytest.raises((UserError, FileNotFoundError)) as refused:
        write_run_page(tmp_path)
    assert words in str(refused.value)
    assert not (tmp_path / "run.html").exists()


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


def test_an_evaluation_without_some_of_its_numbers_has_a_page(tmp_path):
    write_record(tmp_path)
    metrics = {"coco": {"rsum": 310.0, "rsum_chance_upper": 400.0}, "own": {}}
    write(tmp_path, ("retrieval", 3, {"metrics": metrics}), at=3.0)
    assert "<td>310.0</td>" in write_run_page(tmp_path).read_text()


def test_a_run_without_steps_has_a_page(tmp_path):
    write(tmp_path, ("start", 0.0, {"sources": {}, "settings": {}}))
    assert "No step is recorded" in write_run_page(tmp_path).read_text()


def test_chance_stands_on_the_page_of_a_run_that_learned_nothing(tmp_path, monkeypatch):
    start = {
        "model": "tiny",
        "epochs": 1,
        "sources": {"shop": 40, "web": 20},
        "settings": {},
        "loss_at_chance": 2.77,
    }
    metrics = {"rsum": 90.0, "rsum_chance": 80.0, "rsum_chance_upper": 130.0, "rsum_best": 90.0}
    write(
        tmp_path,
        ("start", 0.0, start),
        step(0.5, 2.78, shop=2.78),  # a single logged step
        ("retrieval", 1, {"metrics": {"shop": RECALLS | metrics}}),
        ("end", 1.0, {"how": "done", "words": ""}),
    )
    page = write_run_page(tmp_path).read_text()
    chance = "Not above chance: shop (RSUM 90.0; a random order has 80.0, and reaches 130.0)."
    assert chance in page and "<td>80.0</td>" in page
    assert "The loss ends at 2.780; a model that cannot tell pairs apart has 2.770." in page
    monkeypatch.setattr(pages, "png_bytes", lambda figure: figure)
    steps, colours = read_record(tmp_path)["step"], {"shop": "#332288", "web": "#DDCC77"}
    (loss,) = charts.loss_picture(steps, colours, 2.77).axes
    (retrieval,) = charts.evaluation_picture(read_record(tmp_path)["retrieval"], colours).axes
    marked = [line.get_color() for line in loss.lines if line.get_marker() == "o"]
    assert marked == [
        "#332288",
        pages.INK,
    ]  # what matplotlib would not draw; the source's colour is that of its set
    assert retrieval.lines[0].get_color() == "#332288"
    assert [text.get_text() for text in loss.texts] == [
        "chance 2.77"
    ] and "not from 0" in loss.get_ylabel()
    assert [text.get_text() for text in retrieval.texts] == ["chance 80.0"]


@pytest.mark.parametrize("given", [{}, {"positives": "caption"}])
def test_the_page_of_class_folders_begins_with_their_accuracy_and_says_the_ceiling_once(
    tmp_path, given
):
    bounds = {"rsum": 90.0, "rsum_chance": 12.0, "rsum_chance_upper": 20.0, "rsum_best": 95.0}
    write(
        tmp_path,
        ("start", 0.0, {"model": "tiny", "epochs": 1, "settings": given}),
        step(0.5, 2.0),
        ("retrieval", 1, {"metrics": dict.fromkeys("abcd", RECALLS | bounds)}),
        ("zero-shot", 1, {"metrics": {"shop": {"top1": 0.7, "top1_chance": 0.1}}}),
        ("end", 1.0, {"how": "done", "words": ""}),
    )
    page = write_run_page(tmp_path).read_text()
    places = [
        page.index(words)
        for words in ("Zero-shot top-1 after epoch 1: shop 70.0 %", "Best RSUM: a 90.0", "tiny. 1 of 1",
                      "<h2>Zero-shot", "<h2>Retrieval", "<h2>Loss")
    ]  # fmt: skip
    assert places == sorted(places)
    assert page.count("Few captions serve many pictures") == 1
    assert ("without --positives caption" in page) == (not given)


def test_labels_of_chance_do_not_overprint_each_other(as_figures):
    """Four sets whose chance differs by one RSUM on an axis of 600; sets of one size share a label."""

    def labels(*chances: float) -> list:
        metrics = {
            str(i): {"rsum": 550.0, "rsum_chance": chance} for i, chance in enumerate(chances)
        }
        colours = dict.fromkeys(metrics, "red")
        (axes,) = charts.evaluation_picture([{"at": 1, "metrics": metrics}], colours).axes
        return axes.texts

    crowded = labels(12.0, 13.0, 14.0, 15.0)
    crowded[0].figure.canvas.draw()
    boxes = sorted((text.get_window_extent() for text in crowded), key=lambda box: box.y0)
    assert len(boxes) == 4
    assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))
    assert [text.get_text() for text in labels(16.0, 16.0, 16.0)] == ["chance 16.0"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"), (0, "0 s"), (0.0858, "85.8 ms"), (0.1134, "0.113 s"), (41, "41 s"), (59.99, "60 s"), (200, "3 min 20 s"),
        (3600, "1 h"), (18_750, "5 h 12 min"), (190_000, "2 d 4 h"),
    ],
)  # fmt: skip
def test_duration(seconds, words):
    assert duration(seconds) == words
