"""What the room refuses, in one sentence each: sources as they are written, numbers out of range, tokenizers and transforms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transform import image_transform
from torchvision.transforms import Compose, PILToTensor, Resize

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.images import split_normalize, with_auto_augment
from open_clip_zerovl.data.names import caption_fields, check_paths
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.data.tokens import WordAugment
from open_clip_zerovl.prepare.door import as_shards
from open_clip_zerovl.shards.files import write_retrieval_set
from open_clip_zerovl.shards.tar import Sample
from open_clip_zerovl.shards.urls import check_quotes
from support.loading import loader_of
from support.tars import png, write_source, write_tar
from support.tiny_clip import WORDS, write_bert


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_source(home / "a", 0, 4, 4)
    write_source(home / "badsizes", 0, 4, 4)
    (home / "badsizes/sizes.json").write_text(json.dumps(["00000.tar"]))
    write_source(home / "missing", 0, 12, 4)
    (home / "missing/00001.tar").unlink()
    (home / "empty").mkdir()
    write_tar(home / "broken/0.tar", []).write_bytes(b"no tar at all" * 100)
    write_tar(home / "none/0.tar", [])
    (home / "addresses.csv").write_text("url,caption\nhttps://example.org/1.jpg,a dog\n")
    for name in ("coco", "half"):
        write_retrieval_set(home / name, [Sample("0", {"png": png((0, 0, 0)), "txt": b"a cat"})])
    write_source(home / "half/val", 0, 2, 2)
    (home / "half/test/nshards.txt").unlink()
    write_bert(home / "bert", words=WORDS)
    write_bert(home / "wordless", words=["7"])
    return home


# --train-data, with {} for the folder -> words of its refusal; an option of `parse_sources` behind &
SOURCES = {
    "a=": "source 1 .* has no shards",
    "a={}/a/00000.tar::": "source 2 .* has no shards",
    "a={}/a/{{00000..00007}}.tar": "7 of 8 shards of source 'a' do not exist, first .*00001.tar",
    "a={}/a::a={}/a": "two sources are called 'a'",
    "a={}/a:b={}/a": "a:b=.*/a does not exist; correct the path",
    "a={}/empty": "holds no [*].tar shards; .* `zerovl data pack .*/empty --out DIR`",
    "a={}/addresses.csv": "cannot be read as a tar file .* or pack it with `zerovl data pack .*addresses.csv`",
    "a={}/p/*.parquet": "no file is named like .*/p/.*.parquet; correct the pattern",
    "a=s3://bucket/{{0..3}}.tar": "shard s3://bucket/sizes.json cannot be opened .* 'pipe:aws s3 cp",
    "a=pipe:cat /nowhere/{{0..3}}.tar": "4 remote shards of source 'a' have no size",
    "a={}/broken": "cannot be read as a tar file",
    "a={}/badsizes": "sizes.json cannot be read .*to have the shards counted",
    "a={}/none": "holds no samples",
    "a={}/coco": "coco is a retrieval set, .* name the shards to read, as .*coco/train$",
    "{}/half & evaluation=True": "is a retrieval set",
    "a={}/a & weights=1::2": "gives 2 weights for 1 sources",
    "a={}/a & weights=0": "is not a positive number",
    "a={}/a & weights=vg=2": "unknown source 'vg'; the sources are a",
    "a={}/a::b={}/a & weights=a=2::1": "names the unknown source '1'",
    "a={}/a & captions=some": "unknown --captions 'some'; use one of one-per-epoch, all",
    "s=pipe:cat {}/a/0.tar & captions=all": "cannot count the captions of remote shards .*, first pipe:",
    "a={}/missing & on_bad_sample=fail": r"1 of 3 shards of source 'a' do not exist, first .*1\.tar",
}  # fmt: skip


@pytest.mark.parametrize("given", SOURCES)
def test_a_source(home, given):
    data, _, option = given.partition(" & ")
    options = dict([option.split("=", 1)]) if option else {}
    with pytest.raises(UserError, match=SOURCES[given]):
        parse_sources(data.replace("{}", "{0}").format(home), **options)


CALLS = {
    "shares of 0.9": (lambda home: caption_fields("txt=0.5,syn=0.4"), "sum to 1, not to 0.9"),
    "a field twice": (lambda home: caption_fields("txt=0.5,txt=0.5"), "each field is given once"),
    "a negative share": (lambda home: caption_fields("txt=-1,syn=2"), "a share above 0"),
    "a path that is not there": (lambda home: check_paths("a=~/gone"), "source 'a': ~/gone does not"),
    "a quote": (lambda home: check_quotes("https://h/a'; touch x; '/0.tar"), "has a single quote"),
    "addresses of pictures": (
        lambda home: as_shards(f"a={home}/addresses.csv"),
        r"holds addresses of pictures .*`zerovl data pack .*addresses\.csv",
    ),
    "a step before the first": (
        lambda home: loader_of(f"a={home}/a").set_epoch(0, -1),
        "cannot begin at step -1",
    ),
    "a step behind the last": (
        lambda home: loader_of(f"a={home}/a").set_epoch(0, 2),
        "cannot begin at step 2",
    ),
    "words without a mask": (lambda home: WordAugment(SimpleTokenizer()), "mask token.*SimpleTokenizer"),
    "a cleaned mask": (
        lambda home: WordAugment(HFTokenizer(str(home / "bert"), clean="canonicalize")),
        "does not read the text",
    ),
    "no words": (lambda home: WordAugment(HFTokenizer(str(home / "wordless"))), "no whole words"),
    "a policy without a crop": (
        lambda home: with_auto_augment(image_transform(32, is_train=False)),
        "has none",
    ),
    "a transform to bytes": (
        lambda home: split_normalize(Compose([Resize(3), PILToTensor()])),
        "ends in ToTensor and Normalize, and this one ends in Resize, PILToTensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_call(home, call):
    refused, words = CALLS[call]
    with pytest.raises(UserError, match=words):
        refused(home)
