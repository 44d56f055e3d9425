"""Pairs of a fine-tuning: the contents of a folder, the split by picture, pictures on both sides, captions that are cut."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.reader import samples_of
from open_clip_zerovl.data.splits import write_trained_on
from open_clip_zerovl.evaluate.zero_shot import open_labelled_set
from open_clip_zerovl.finetune.data import (
    DataArguments,
    FinetuneData,
    all_classes,
    find_data,
    open_sources,
    sets_of,
)
from open_clip_zerovl.finetune.split import Split
from open_clip_zerovl.finetune.split import hold_out as hold_out_of
from open_clip_zerovl.shards.files import write_retrieval_set, write_source
from open_clip_zerovl.shards.tar import Sample
from support.pairs import picture
from support.tars import encoded


def sample(number: int, *captions: str, key: str = "") -> Sample:
    texts = captions or (f"picture {number}",)
    return Sample(
        key or f"{number:05d}",
        {"png": picture(number), "txt": "\n".join(texts).encode(), "json": b"{}"},
    )


def source(folder, numbers, **options) -> str:
    write_source(folder, [sample(number) for number in numbers], shard_size=30, **options)
    return f"{folder.name}={folder}"


def hold_out(data: str, new: str, out, *, old=None, labelled=None, kept=None, **more) -> Split:
    """Hold pictures out of the data of --data."""
    request = SimpleNamespace(
        data=data, retrieval_data=new, keep_data=old, kept=kept, zero_shot_data=labelled
    )
    return hold_out_of(DataArguments.of(request), out, **more)


@pytest.mark.parametrize(
    ("given", "places", "train_data", "held_out"),
    [
        ("one", ["one/0.tar"], "one={}/one", ""),
        (
            "packed",
            ["packed/a/0.tar", "packed/b/0.tar", "packed/test/0.tar", "packed/test/b/test/0.tar"],
            "a={}/packed/a::b={}/packed/b",
            "held-out={}/packed::b={}/packed/test/b",
        ),
        ("coco", ["coco/train/0.tar", "coco/test/0.tar"], "coco={}/coco/train", "held-out={}/coco"),
        (
            "both",
            ["both/x/train/0.tar", "both/x/test/0.tar", "both/y/train/0.tar", "both/y/test/0.tar"],
            "x={}/both/x/train::y={}/both/y/train",
            "x={}/both/x::y={}/both/y",
        ),
        ("dots", ["dots/v1.0/0.tar", "dots/v1.1/0.tar"], "v1={}/dots/v1.0::v1={}/dots/v1.1", ""),
        ("my pairs", ["my pairs/0.tar"], "my-pairs={}/my pairs", ""),
        ("x=/data/x::y=/data/{{00..03}}.tar", [], "x=/data/x::y=/data/{{00..03}}.tar", ""),
    ],
)
def test_what_a_folder_holds(tmp_path, monkeypatch, given, places, train_data, held_out):
    monkeypatch.chdir(tmp_path)
    for folder in (Path(place).parent for place in places):
        if "test" in folder.parts:
            write_retrieval_set(folder.parent, [sample(100)])
        else:
            source(folder, range(5))
    expected = (text.format(*[tmp_path] * 4) for text in (train_data, held_out))
    assert find_data(given.format()) == FinetuneData(*expected)


def held_out_of(split) -> list:
    """(held-out set, captions of each held-out picture, captions of each sample to train on)."""
    (held_out,) = sets_of(split.new).values()
    trained = [
        tuple(one.captions)
        for source in open_sources(split.train_data)
        for shard in range(len(source.shards))
        for one in samples_of(source, shard)
    ]
    return [held_out, {one.captions for one in held_out.samples}, trained]


def test_the_split_is_by_picture_and_the_same_whatever_the_order(tmp_path):
    # Picture 7 is in both sources, and twice in the first with another caption.
    first = [*(sample(number) for number in range(40)), sample(7, "seven again", key="again")]
    second = [sample(number) for number in (7, *range(40, 80))]
    write_source(tmp_path / "a", first, shard_size=15)
    write_source(tmp_path / "b", second, shard_size=100)
    write_source(tmp_path / "turned" / "a", first[::-1], shard_size=9)
    write_source(tmp_path / "turned" / "b", second[::-1], shard_size=10)
    held, keys = {}, {}
    for seed, where in ((0, ""), (1, ""), (0, "turned")):
        data, out = tmp_path / where, tmp_path / f"out-{seed}{where}"
        given = (f"a={data / 'a'}::b={data / 'b'}", "", out)
        split = hold_out(*given, seed=seed, model="none", share=0.25)
        held_out, captions, trained = held_out_of(split)
        texts = {text for one in captions for text in one}
        assert 10 < len(held_out) < 30
        assert texts.isdisjoint(text for one in trained for text in one)
        assert texts | {text for one in trained for text in one} == {
            *(f"picture {number}" for number in range(80)),
            "seven again",
        }
        assert len(trained) == 82 - len(held_out) - 2 * ("seven again" in texts)
        assert not list(out.rglob(".writing-*"))
        assert set(split.held_out).isdisjoint(split.trained) and len(split.trained) == 80 - len(
            held_out
        )
        again = hold_out(*given, seed=seed, model="none", share=0.25)
        assert again.train_data == split.train_data and again.notes == split.notes
        held[seed, where], keys[seed, where] = texts, set(split.held_out.tolist())
    assert held[0, ""] == held[0, "turned"] != held[1, ""]
    assert keys[0, ""] == keys[0, "turned"] != keys[1, ""]
    # As many pictures, of which one is another: the former shards do not fit.
    write_source(data / "b", [*second[1:], sample(80)], shard_size=10)
    _, captions, trained = held_out_of(hold_out(*given, seed=seed, model="none", share=0.25))
    assert ("picture 80",) in {*captions, *trained}


def test_pictures_of_classes_are_a_labelled_set_when_they_are_held_out(tmp_path):
    """As `zerovl data pack` writes them without a held-out part."""
    for name in "ab":
        pairs = [
            sample(number, key=f"{number:03d}")
            for number in range(40 * (name == "b"), 40 * (name == "b") + 40)
        ]
        pairs = [
            replace(one, files={**one.files, "cls": str(n % 2).encode()})
            for n, one in enumerate(pairs)
        ]
        write_source(tmp_path / name / "train", pairs, shard_size=100)
        (tmp_path / name / "classnames.txt").write_text("cat\ndog\n")
        (tmp_path / name / "zeroshot_classification_templates.txt").write_text("a {c}\n")
    train = "::".join(f"{name}={tmp_path / name / 'train'}" for name in "ab")
    split = hold_out(train, "", tmp_path / "out", seed=0, model="none", share=0.25)
    assert all(source.classes for source in open_sources(split.train_data))
    assert all_classes(split.new)
    labelled = open_labelled_set(str(tmp_path / "out" / "held-out"))
    assert (
        len(labelled.images.labels) == len(split.held_out) > 10
        and list(labelled.names) == ["cat", "dog"]
        and list(labelled.templates) == ["a {c}"]
    )
    # Of other classes: no labelled set.
    (tmp_path / "b" / "classnames.txt").write_text("dog\ncat\n")
    split = hold_out(train, "", tmp_path / "other", seed=0, model="none", share=0.25)
    assert not all_classes(split.new)


def test_pictures_of_given_sets_are_not_trained_on(tmp_path):
    """By their pixels: one of the sets' pictures is stored in another format. Old pairs and labelled sets count, too."""
    data, old = source(tmp_path / "mine", range(50)), source(tmp_path / "old", range(60, 70))
    write_retrieval_set(tmp_path / "clean", [sample(number) for number in range(100, 110)])
    clean, dirty = f"clean={tmp_path / 'clean'}", f"dirty={tmp_path / 'dirty'}"

    def given(new: str, **more):
        return hold_out(data, new, tmp_path / "out", seed=0, model="none", **more)

    assert given(clean).train_data == data and given(clean).notes == ()  # negative control
    webp = encoded(Image.open(io.BytesIO(picture(33))), "WEBP", lossless=True)
    changed = Sample("00033", {"webp": webp, "txt": b"another caption"})
    write_retrieval_set(tmp_path / "dirty", [changed, sample(200), sample(4), sample(61)])
    split = given(f"{clean}::{dirty}", old=old)
    rest = open_sources("::".join(split.sources.values()))
    assert [one.num_samples for one in rest] == [48, 9] and len(split.held_out) == 14
    assert split.notes == ("Left out: 3 samples, whose pictures are in the sets to score.",)
    assert given(f"{clean}::{dirty}", compare=False).train_data == data
    for number, name in ((5, "cat"), (200, "dog")):
        (tmp_path / "folders" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "folders" / name / f"{number}.png").write_bytes(picture(number))
    labelled = str(tmp_path / "folders")
    (rest,) = open_sources(given(clean, labelled=labelled).train_data)
    assert rest.num_samples == 49
    source(tmp_path / "mine", range(51, 101))  # as many samples: identities are read again
    assert given(clean, labelled=labelled).notes == (
        "Left out: 1 samples, whose pictures are in the sets to score.",
    )


def test_sets_that_are_scored_later_change_no_training_that_has_begun(tmp_path):
    """Its list of trained pictures stays true, and a note tells how many of the later set's pictures it was trained on."""
    data = source(tmp_path / "mine", range(50))
    write_retrieval_set(tmp_path / "given", [sample(100), sample(3)])
    write_retrieval_set(tmp_path / "later", [sample(7), sample(8), sample(200)])

    def call(**more) -> Split:
        new = f"given={tmp_path / 'given'}"
        return hold_out(data, new, tmp_path / "out", seed=0, model="none", **more)

    first = call()
    retrieval = {"kept": f"later={tmp_path / 'later'}"}
    assert len(call(**retrieval).trained) == 47  # nothing was trained yet
    call()
    later = call(**retrieval, begun=True)
    assert later.sources == first.sources and later.trained.tolist() == first.trained.tolist()
    assert later.notes[-1] == (
        "--kept later: The model of this folder was trained on 2 of the 3 held-out pictures, so that scores on them "
        "measure memorisation."
    )
    assert call(begun=True).notes == first.notes


def test_pictures_that_the_model_has_seen_are_not_held_out_again(tmp_path):
    """One answer to "was it trained on?", in a model's folder."""
    data = source(tmp_path / "mine", range(50))
    first = hold_out(data, "", tmp_path / "first", seed=0, model="none")
    write_trained_on(tmp_path / "model", first.trained, None)
    model = f"local-dir:{tmp_path / 'model'}"
    again = hold_out(data, "", tmp_path / "again", seed=1, model=model)
    assert set(again.held_out) == set(first.held_out) and len(again.notes) == 1
    other = hold_out(data, "", tmp_path / "other", seed=1, model="none")  # negative control
    assert set(other.held_out) & set(first.trained)
    write_trained_on(tmp_path / "model", np.concatenate([first.trained, first.held_out]), None)
    none_left = hold_out(data, "", tmp_path / "none", seed=1, model=model)
    assert set(none_left.held_out) == set(other.held_out)
    assert "was trained on 10 of the 10 held-out pictures" in none_left.notes[1]
    (tmp_path / "model" / "trained_on.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"trained_on.npy cannot be read"):
        hold_out(data, "", tmp_path / "bad", seed=1, model=model)
