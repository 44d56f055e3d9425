"""Sources of shard sizes: one validator of numbers, no command that nobody requested."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.components import listed_sizes
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.prepare.check import check_shards
from open_clip_zerovl.shards.fetch import ShardCache
from open_clip_zerovl.shards.files import parse_sizes, read_sizes
from open_clip_zerovl.shards.urls import check_quotes, is_command
from support.tars import write_source

WRONG = {
    "a list": "[1]",
    "no JSON": "{",
    "no text": b"\xff\xfe\x00",
    "negative": '{"0.tar": -1}',
    "infinite": '{"0.tar": Infinity}',
    "more than a float holds": '{"0.tar": 1e999}',
    "not a number": '{"0.tar": NaN}',
    "huge": '{"0.tar": 100000000000000000000}',
    "too many digits": '{"0.tar": ' + "9" * 5000 + "}",
    "a fraction": '{"0.tar": 1.5}',
    "a word": '{"0.tar": "many"}',
    "true": '{"0.tar": true}',
    "nested": '{"0.tar": {"0.tar": 3}}',
    "nested deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_numbers_are_one_sentence_wherever_sizes_are_read(tmp_path, kind):
    write_source(tmp_path, 0, 4, 4)
    (tmp_path / "00000.tar").rename(tmp_path / "0.tar")
    text = WRONG[kind]
    (tmp_path / "sizes.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for read in (
        lambda: parse_sources(f"a={tmp_path}"),
        lambda: parse_sources(f"a={tmp_path}/0.tar"),
        lambda: check_shards(tmp_path, progress=False),
    ):
        with pytest.raises(UserError, match=r"sizes\.json cannot be read") as raised:
            read()
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_numbers_that_open_clip_takes_are_taken(tmp_path):
    assert parse_sizes('{"0.tar": 3, "1.tar": 4.0, "2.tar": "5", "3.tar": 0}', "here") == {
        "0.tar": 3, "1.tar": 4, "2.tar": 5, "3.tar": 0,
    }  # fmt: skip
    assert read_sizes(tmp_path) is None


def test_no_command_is_run_for_the_sizes(tmp_path):
    """The same command with sizes.json in place of the shard's name was run: it overwrote a cached shard."""
    write_source(tmp_path / "d", 0, 7, 4)
    marker = tmp_path / "ran"
    pattern = f"pipe:cat {tmp_path}/d/{{00000..00001}}.tar | tee {marker}"
    (source,) = parse_sources(f"a={pattern}")
    assert source.sizes == (4, 3) and not marker.exists()
    # Two tars in one command, a relative path, an unknown place: the count is unknown, and no command is run to find it.
    for command in (
        f"cat {tmp_path}/d/00000.tar > copy.tar; touch {marker}",
        f"touch {marker}; cat d/00000.tar",
        "cat '",
    ):
        assert listed_sizes([f"pipe:{command}"]) == {} and not marker.exists()
    with pytest.raises(
        UserError, match=r"1 remote shards of source 'a' have no size.*SHARDS@/path/sizes\.json"
    ):
        parse_sources("a=pipe:cat d/00000.tar")
    (named,) = parse_sources(
        f"a=pipe:cd {tmp_path}; cat d/{{00000..00001}}.tar@{tmp_path}/d/sizes.json"
    )
    assert named.sizes == (4, 3) and named.shards[1] == f"pipe:cd {tmp_path}; cat d/00001.tar"
    with pytest.raises(FileNotFoundError, match=r"other\.json"):
        parse_sources(f"a=pipe:cat d/00000.tar@{tmp_path}/other.json")


def test_the_sizes_of_a_url_lie_beside_it(tmp_path, monkeypatch):
    asked = []

    @contextmanager
    def borrowed(self, url, policy):
        asked.append(url)
        (tmp_path / "sizes.json").write_text('{"00000.tar": 5}')
        yield tmp_path / "sizes.json"

    monkeypatch.setattr(ShardCache, "borrowed", borrowed)
    shards = [
        "https://host/d/00000.tar?token=a/b",
        "s3://bucket/d/00000.tar",
        "pipe:curl -s https://host/e/00000.tar",
    ]
    assert list(listed_sizes([*shards, "pipe:aws s3 cp s3://bucket/d/00000.tar -"]).values()) == [
        5,
        5,
        5,
    ]
    assert asked == [
        "https://host/d/sizes.json?token=a/b",
        "s3://bucket/d/sizes.json",
        "https://host/e/sizes.json",
    ]


@pytest.mark.parametrize("shards", ["", "/{00000..00002}.tar"])
def test_a_folder_and_a_range_miss_the_shards_that_sizes_list(tmp_path, caplog, shards):
    """Those of a folder were dropped without a word, with `--on-bad-sample fail` too."""
    write_source(tmp_path, 0, 12, 4)
    (tmp_path / "00001.tar").unlink()
    with pytest.raises(
        UserError, match=r"1 of 3 shards of source 'a' do not exist, first .*00001\.tar"
    ):
        parse_sources(f"a={tmp_path}{shards}", on_bad_sample="fail")
    (source,) = parse_sources(f"a={tmp_path}{shards}")
    assert (
        source.sizes == (4, 4, 4)
        and "other samples of the source replace their 4 samples" in caplog.text
    )


@pytest.mark.parametrize("url", ["https://host/a'; touch x; '/0.tar", "s3://bucket/it's/0.tar"])
def test_a_quote_in_a_url_reaches_no_shell(url):
    with pytest.raises(UserError, match="has a single quote in its URL"):
        check_quotes(url)
    assert not is_command(url)
