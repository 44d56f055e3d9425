"""Pairs of a fine-tuning: the contents of a folder, the split by picture, pictures on both sides, captions that are cut."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import open_clip
import pytest
from PIL import Image

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.retrieval import open_retrieval_set
from open_clip_zerovl.embeddings.sources import cut_captions
from open_clip_zerovl.evaluate.bias.samples import read_samples
from open_clip_zerovl.evaluate.zero_shot.sets import open_labelled_set
from open_clip_zerovl.finetune.data import (
    all_classes,
    all_samples,
    find_data,
    open_sources,
    refuse_test_pictures,
    sets_of,
)
from open_clip_zerovl.finetune.finetuning import _compare_pictures
from open_clip_zerovl.finetune.request import Request
from open_clip_zerovl.finetune.split import split_off
from open_clip_zerovl.shards.members import Sample
from open_clip_zerovl.shards.writing import write_retrieval_set, write_source


def picture(number: int) -> bytes:
    """A small picture of its own."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(
        buffer, "PNG"
    )
    return buffer.getvalue()


def sample(number: int, *captions: str, key: str = "") -> Sample:
    texts = captions or (f"picture {number}",)
    return Sample(
        key or f"{number:05d}",
        {"png": picture(number), "txt": "\n".join(texts).encode(), "json": b"{}"},
    )


def source(folder, numbers, **options) -> str:
    write_source(folder, [sample(number) for number in numbers], shard_size=30, **options)
    return f"{folder.name}={folder}"


def test_training_and_evaluation_divide_captions_at_newlines_alone(tmp_path):
    """Unicode's line separators are parts of a caption: evaluation made three captions of one."""
    first, second = "a dog\u2028runs on \x85grass", "a \x0bcat"
    write_source(tmp_path / "a", [sample(0, first + "\r", "  ", f" {second} ")], shard_size=30)
    (source,) = open_sources(f"a={tmp_path / 'a'}")
    assert [captions for _, _, captions in all_samples(source)] == [[first, second]]
    assert open_retrieval_set(tmp_path / "a").samples[0].captions == (first, second)
    assert [one.caption for one in read_samples([source], 5)[0]] == [first]  # of bias and compare


def test_what_a_folder_holds(tmp_path):
    source(tmp_path / "one", range(5))
    assert find_data(str(tmp_path / "one")).train_data == f"one={tmp_path / 'one'}"
    packed = tmp_path / "packed"
    source(packed / "a", range(5))
    source(packed / "b", range(5, 9))
    write_retrieval_set(packed, [sample(100)])
    write_retrieval_set(packed / "test" / "b", [sample(101)])
    found = find_data(str(packed))
    assert found.train_data == f"a={packed / 'a'}::b={packed / 'b'}"
    assert found.held_out == f"held-out={packed}::b={packed / 'test' / 'b'}"
    assert {name: len(dataset) for name, dataset in sets_of(found.held_out).items()} == {
        "held-out": 1,
        "b": 1,
    }
    coco = tmp_path / "coco"
    source(coco / "train", range(5))
    write_retrieval_set(coco, [sample(100)])
    assert find_data(str(coco)).train_data == f"coco={coco / 'train'}"
    both = tmp_path / "both"
    for name, numbers in (("drawing", range(4)), ("photo", range(4, 9))):
        source(both / name / "train", numbers)
        write_retrieval_set(both / name, [sample(200 + numbers[0])])
    found = find_data(str(both))
    assert (
        found.train_data
        == f"drawing={both / 'drawing' / 'train'}::photo={both / 'photo' / 'train'}"
    )
    assert found.held_out == f"drawing={both / 'drawing'}::photo={both / 'photo'}"
    assert [one.num_samples for one in open_sources(found.train_data)] == [4, 5]
    assert (
        find_data("x=/data/x::y=/data/{00..03}.tar").train_data == "x=/data/x::y=/data/{00..03}.tar"
    )
    source(tmp_path / "my pairs", range(5))
    assert find_data(str(tmp_path / "my pairs")).train_data == f"my-pairs={tmp_path / 'my pairs'}"
    with pytest.raises(UserError, match="my_pairs does not exist; did you mean .*my pairs"):
        find_data(str(tmp_path / "my_pairs"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no shards .*zerovl data pack"):
        find_data(str(tmp_path / "empty"))


def test_the_split_is_by_picture_and_the_same_whatever_the_order(tmp_path):
    # Picture 7 is in both sources, and twice in the first with another caption.
    first = [*(sample(number) for number in range(40)), sample(7, "seven again", key="again")]
    second = [sample(number) for number in (7, *range(40, 80))]
    write_source(tmp_path / "a", first, shard_size=15)
    write_source(tmp_path / "b", second, shard_size=100)
    write_source(tmp_path / "turned" / "a", first[::-1], shard_size=9)
    write_source(tmp_path / "turned" / "b", second[::-1], shard_size=10)
    held = {}
    for seed, where in ((0, ""), (1, ""), (0, "turned")):
        data = tmp_path / where
        out = tmp_path / f"out-{seed}{where}"
        found = split_off(
            open_sources(f"a={data / 'a'}::b={data / 'b'}"), out, seed=seed, share=0.25
        )
        (held_out,) = sets_of(found.held_out).values()
        texts = [{caption for one in held_out.samples for caption in one.captions}]
        texts += [
            {
                c
                for one in open_sources(found.train_data)
                for _, _, own in all_samples(one)
                for c in own
            }
        ]
        assert len(held_out) == 20 and texts[0].isdisjoint(texts[1])
        assert texts[0] | texts[1] == {f"picture {number}" for number in range(80)} | {
            "seven again"
        }
        assert ("picture 7" in texts[0]) == ("seven again" in texts[0])
        refuse_test_pictures(open_sources(found.train_data), sets_of(found.held_out))
        held[seed, where] = texts[0]
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")}
        again = split_off(
            open_sources(f"a={data / 'a'}::b={data / 'b'}"), out, seed=seed, share=0.25
        )
        assert again == found and before == {
            path: path.stat().st_mtime_ns for path in out.rglob("*.tar")
        }
    assert held[0, ""] == held[0, "turned"] != held[1, ""]
    write_source(
        data / "b", [*second[1:], sample(80)], shard_size=10
    )  # as many pictures, of which one is another
    found = split_off(open_sources(f"a={data / 'a'}::b={data / 'b'}"), out, seed=seed, share=0.25)
    texts = {
        c for one in open_sources(found.train_data) for _, _, own in all_samples(one) for c in own
    }
    assert "picture 80" in texts | {
        c for one in sets_of(found.held_out)["held-out"].samples for c in one.captions
    }
    kept = next(iter(all_samples(open_sources(found.train_data)[0])))[0]
    assert kept.files["json"] == b"{}"


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
    found = split_off(open_sources(train), tmp_path / "out", seed=0, share=0.25)
    assert all(source.classes for source in open_sources(found.train_data)) and all_classes(
        found.held_out
    )
    labelled = open_labelled_set(str(tmp_path / "out" / "held-out"))
    assert (
        len(labelled.images.labels) == 20
        and list(labelled.names) == ["cat", "dog"]
        and list(labelled.templates) == ["a {c}"]
    )
    (tmp_path / "b" / "classnames.txt").write_text(
        "dog\ncat\n"
    )  # of other classes: no labelled set
    found = split_off(open_sources(train), tmp_path / "other", seed=0, share=0.25)
    assert all(source.classes for source in open_sources(found.train_data)) and not all_classes(
        found.held_out
    )


def test_too_few_pictures_to_split(tmp_path):
    with pytest.raises(UserError, match=r"the data has 12 pictures, too few .*--retrieval-data"):
        split_off(open_sources(source(tmp_path / "few", range(12))), tmp_path / "out", seed=0)
    assert not (tmp_path / "out").exists()


def test_a_test_picture_among_the_training_pictures_is_refused_by_its_bytes(tmp_path):
    sources = open_sources(source(tmp_path / "mine", range(50)))
    write_retrieval_set(tmp_path / "clean", [sample(number) for number in range(100, 110)])
    refuse_test_pictures(sources, sets_of(f"clean={tmp_path / 'clean'}"))
    write_retrieval_set(
        tmp_path / "dirty", [sample(number, "another caption") for number in (33, 200, 4)]
    )
    with pytest.raises(
        UserError,
        match=r"2 of the 3 pictures of dirty are trained on \(first: 00004, in sample 00004 of",
    ):
        refuse_test_pictures(
            sources, sets_of(f"clean={tmp_path / 'clean'}::dirty={tmp_path / 'dirty'}")
        )
    for number in (4, 60):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "pairs.csv").write_text("filepath,title\n4.png,four\n60.png,sixty\n")
    with pytest.raises(UserError, match="1 of the 3 pictures of dirty are trained on"):
        refuse_test_pictures(
            open_sources(f"table={tmp_path / 'pairs.csv'}"), sets_of(f"dirty={tmp_path / 'dirty'}")
        )


def test_pictures_of_a_labelled_set_are_compared_too(tmp_path):
    """Class folders, and shards with classes: two of the three pictures of each are trained on."""
    sources = open_sources(source(tmp_path / "mine", range(50)))
    for number, name in ((4, "cat"), (33, "dog"), (200, "dog")):
        (tmp_path / "folders" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "folders" / name / f"{number}.png").write_bytes(picture(number))
    labelled = [
        Sample(f"{n}", {"png": picture(n), "cls": str(n % 2).encode()}) for n in (4, 33, 200)
    ]
    write_source(tmp_path / "shards", labelled, shard_size=2)
    (tmp_path / "shards" / "classnames.txt").write_text("cat\ndog\n")
    for name, first in (("folders", "4.png"), ("shards", "4")):
        images = open_labelled_set(str(tmp_path / name)).images
        with pytest.raises(
            UserError,
            match=rf"2 of the 3 pictures of new are trained on \(first: {first}, in sample 00004",
        ):
            refuse_test_pictures(sources, {"new": images})
    refuse_test_pictures(open_sources(source(tmp_path / "other", range(50, 60))), {"new": images})


@pytest.mark.parametrize("changed", ["pairs", "set"])
def test_pictures_are_compared_again_once_either_side_has_changed(tmp_path, changed):
    data = source(tmp_path / "mine", range(50))
    write_retrieval_set(tmp_path / "test", [sample(100)])
    request, said = Request(Encoder("x"), data, tmp_path / "out"), []

    def compare() -> None:
        _compare_pictures(
            request, open_sources(data), sets_of(f"test={tmp_path / 'test'}"), said.append
        )

    compare()
    compare()
    assert len(said) == 1
    if changed == "pairs":
        source(tmp_path / "mine", range(51, 101))  # of as many samples
    else:
        write_retrieval_set(tmp_path / "test", [sample(7)])
    with pytest.raises(UserError, match="1 of the 1 pictures of test are trained on"):
        compare()


def test_captions_that_the_context_cuts(tmp_path):
    texts = [
        "a cat",
        "a cat " * 3,
        "a cat " * 4,
        " ".join(["dog"] * 300),
    ]  # 4, 8, 10 and 302 tokens
    write_source(
        tmp_path / "mine", [sample(i, text) for i, text in enumerate(texts)], shard_size=10
    )
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    sources = open_sources(f"mine={tmp_path / 'mine'}")
    assert cut_captions(tokenizer, 8, sources) == (4, 2, 64)
    assert cut_captions(tokenizer, 77, sources) == (4, 1, 302)
