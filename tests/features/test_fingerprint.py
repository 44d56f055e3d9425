"""Fingerprints: other weights, layers, tokenizers, transforms and files have other fingerprints; equal ones have the same."""

from __future__ import annotations

import copy
import os

import pyarrow
import pyarrow.parquet
import pytest
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transform import image_transform

from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.data.table import CsvFormat
from open_clip_zerovl.features.fingerprint import (
    describe_source,
    difference_of_sources,
    module_digest,
    tower_digest,
)
from open_clip_zerovl.shards.marks import digests_of, file_mark, is_same
from support.dga_reference import bert_clip
from support.tars import png
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, WORDS, random_model, register, write_bert


def test_the_fingerprint_changes_with_weights_tokenizer_data_and_precision(tmp_path):
    folder = write_bert(tmp_path / "bert")
    tokenizer = HFTokenizer(str(folder), context_length=12)
    model = bert_clip(torch.float32)
    first = tower_digest(model, "text", inputs=tokenizer)
    tokenizer(["a cat"])  # leaves a length to cut and to pad to in the tokenizer
    assert tower_digest(model, "text", inputs=tokenizer) == first
    assert (
        tower_digest(
            bert_clip(torch.float32), "text", inputs=HFTokenizer(str(folder), context_length=12)
        )
        == first
    )
    image_only = copy.deepcopy(model)
    with torch.no_grad():
        image_only.visual.proj.add_(1)
        image_only.logit_scale.add_(1)
    assert tower_digest(image_only, "text", inputs=tokenizer) == first
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.text.proj.weight[0, 0] += 1e-6
    smaller = write_bert(tmp_path / "smaller", words=WORDS[:-1])
    others = [
        tower_digest(changed, "text", inputs=tokenizer),
        tower_digest(model, "image", inputs=tokenizer),
        tower_digest(model, "text", inputs=tokenizer, precision="amp_bf16"),
        tower_digest(model, "text", inputs=HFTokenizer(str(folder), context_length=11)),
        tower_digest(
            model, "text", inputs=HFTokenizer(str(folder), context_length=12, clean="lower")
        ),
        tower_digest(model, "text", inputs=HFTokenizer(str(smaller), context_length=12)),
        tower_digest(model, "image", inputs=image_transform(32, is_train=False)),
        tower_digest(model, "image", inputs=image_transform(40, is_train=False)),
    ]
    assert len({first, *others}) == 9


def test_the_fingerprint_of_clips_own_tokenizer_is_the_same_in_each_process():
    model = bert_clip(torch.float32)
    one, other = (
        tower_digest(model, "text", inputs=SimpleTokenizer(context_length=12)) for _ in range(2)
    )  # each its own object, as in another process
    assert one == other != tower_digest(model, "text", inputs=SimpleTokenizer(context_length=11))


def test_strides_and_buffers_that_no_checkpoint_holds_count():
    class Rotary(torch.nn.Module):
        def __init__(self, theta: float) -> None:
            super().__init__()
            self.register_buffer("frequencies", theta ** -torch.arange(4.0), persistent=False)

    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(3, 4, 3, stride=1)
    strided = copy.deepcopy(convolution)
    strided.stride = (2, 2)
    for one, other in ((convolution, strided), (Rotary(10.0), Rotary(100.0))):
        assert module_digest(one, inputs=None) == module_digest(copy.deepcopy(one), inputs=None)
        assert module_digest(one, inputs=None) != module_digest(other, inputs=None)


@pytest.mark.parametrize("changed", ["quick_gelu", "head_width"])
def test_towers_of_the_same_tensors_and_another_function_have_digests_of_their_own(
    tmp_path, changed
):
    configs = {"plain": (NATIVE_VISION, False), "quick_gelu": (NATIVE_VISION, True)}
    configs["head_width"] = ({**NATIVE_VISION, "head_width": 8}, False)
    plain, quick = (
        random_model(
            register(
                tmp_path, f"digest-{kind}", configs[kind][0], CLIP_TEXT, quick_gelu=configs[kind][1]
            )
        )
        for kind in ("plain", changed)
    )
    quick.load_state_dict(plain.state_dict())
    transform = image_transform(32, is_train=False)
    for digest in (
        lambda m: tower_digest(m, "image", inputs=transform),
        lambda m: module_digest(m.visual, inputs=transform),
    ):
        assert digest(quick) != digest(plain)
        same = digest(plain)
        with torch.no_grad():
            plain.logit_scale.add_(1)
        assert digest(plain) == same


SOURCE = {
    "name": "a",
    "marks": [["0.tar", 10, 111, "aa"], ["1.tar", 20, 222, "bb"]],
    "sizes": [3, 4],
    "picked": None,
}


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"marks": [["0.tar", 10, 999, "aa"], ["1.tar", 20, 888, "bb"]]}, None),  # a copy
        ({"sizes": [3, 5]}, "of 7 samples of 'a', and it holds 8"),
        ({"picked": "cc"}, "another selection's 'a'"),
        (
            {"marks": [["0.tar", 10, 111, "aa"], ["1.tar", 20, 222, "cc"]]},
            "shard 1.tar of 'a' differs",
        ),
        ({"marks": SOURCE["marks"][::-1]}, "its shards in another order"),
        ({"sizes": [4, 3]}, "of other sizes"),
    ],
)
def test_other_samples_are_named_and_a_copy_is_the_same(other, sentence):
    found = difference_of_sources(SOURCE, {**SOURCE, **other})
    assert found is None if sentence is None else sentence in found


def test_rows_of_a_source_whose_middle_changed_are_refused_and_those_of_a_copy_are_not(tmp_path):
    """A table of 300 kB, and the pictures that it names, with other times: by size and both ends nothing differs."""
    rows = [f"{n % 4}.png,caption number {n:06d} of this table" for n in range(6000)]
    table = tmp_path / "t.csv"

    def described(rows, known=()):
        table.write_text("\n".join(["filepath,title", *rows]) + "\n")
        os.utime(table, ns=(0, len(known)))  # another time where there are known marks
        return describe_source(parse_sources(f"t={table}")[0], known)

    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(png((number, 0, 0)) + bytes(number))
    stored = described(rows)
    assert difference_of_sources(stored, described(rows, stored["marks"])) is None
    middle = rows[:2500] + rows[3500:2499:-1] + rows[3501:]
    assert "shard t.csv of 't' differs" in difference_of_sources(
        stored, described(middle, stored["marks"])
    )
    (tmp_path / "0.png").rename(tmp_path / "x.png")
    (tmp_path / "3.png").rename(tmp_path / "0.png")
    assert "shard t.csv of 't' differs" in difference_of_sources(
        stored, described(rows, stored["marks"])
    )
    (tmp_path / "0.png").rename(tmp_path / "3.png")
    (tmp_path / "x.png").rename(tmp_path / "0.png")
    assert difference_of_sources(stored, described(rows, stored["marks"])) is None


def test_a_file_is_read_whole_once(tmp_path, monkeypatch):
    """The digest of a known mark of the same name, size and time, or of the user's cache, stands for reading it again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "0.tar"
    file.write_bytes(bytes(10))
    mark = file_mark(str(file), {})
    damaged = ["damaged", ["1.tar", 2], [[], {}, None, 1]]
    assert file_mark(str(file), digests_of([*damaged, [*mark[:3], "known"]]))[3] == "known"
    assert (
        file_mark(str(file), digests_of([[*mark[:3], "a"], [*mark[:3], "b"]])) == mark
    )  # two files of one name
    (kept,) = (tmp_path / "cache").rglob("*.json")
    kept.write_text(kept.read_text().replace(mark[3], "kept"))
    assert file_mark(str(file), {})[3] == "kept"
    kept.write_text("half")
    assert file_mark(str(file), {}) == mark
    os.utime(file, ns=(0, 5))
    file.write_bytes(bytes(9) + b"x")
    assert file_mark(str(file), {})[3] != mark[3]
    assert file_mark(str(tmp_path / "1.tar"), {}) == ["1.tar"] and file_mark("https://h/2.tar") == [
        "2.tar"
    ]


def test_marks_are_compared_without_the_time():
    found = ["t.csv", 9, 1, "aa", "sizes", "image", "caption"]
    assert is_same(["t.csv", 9, 7, *found[3:]], found)
    assert not is_same(["t.csv"], ["t.csv"])
    for changed in range(3, 7):
        assert not is_same([*found[:changed], "other", *found[changed + 1 :]], found)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_rows_of_another_caption_column_are_other_rows(tmp_path, form):
    (tmp_path / "0.png").write_bytes(png((1, 2, 3)))
    if form == "csv":
        (tmp_path / "t.csv").write_text("image,short,long\n0.png,a,b\n")
    else:
        rows = [{"image": png((1, 2, 3)), "short": "a", "long": "b"}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")

    def described(caption):
        style = CsvFormat(image_key="image", caption_key=caption)
        return describe_source(parse_sources(f"t={tmp_path}/t.{form}", table_format=style)[0])

    assert difference_of_sources(described("short"), described("short")) is None
    assert f"shard t.{form} of 't' differs" in difference_of_sources(
        described("short"), described("long")
    )
