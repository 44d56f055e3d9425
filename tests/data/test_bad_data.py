"""The corruption suite: every kind of damage, its outcome, and that a run never hangs or drifts (docs/reading.md)."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import struct
import subprocess
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from open_clip import SimpleTokenizer
from PIL import Image
from torchvision import transforms

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.loader import JUDGED_SAMPLES, DataStats, EpochStats
from open_clip_zerovl.data.mixture import Mixture
from open_clip_zerovl.data.reader import ShardReader
from open_clip_zerovl.data.sample_stream import BatchReport, DroppedSample, SliceReader
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.sampling.schedule import Batching, ShardSlice
from open_clip_zerovl.shards.tar import Member
from support import ROOT, loading, warm
from support.tars import add_file, encoded, noise_jpeg, png, write_source, write_tar

SIZE = 12  # samples a shard; the bad one is number BAD of the first
BAD = 5
Members = list[tuple[str, bytes]]


def bomb() -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


JPEG = noise_jpeg(1, 40, 30)
# One sample: name -> (image's suffix and bytes or None, caption or None, reason of the loss or None = it is shown)
SAMPLES: dict[str, tuple[tuple[str, bytes] | None, bytes | None, str | None]] = {
    "an empty image": (("jpg", b""), b"x 5", "undecodable image"),
    "a truncated JPEG": (("jpg", JPEG[: len(JPEG) // 2]), b"x 5", "undecodable image"),
    "a truncated PNG": (("png", png((200, 200, 200), 64)[:-60]), b"x 5", "undecodable image"),
    "a web page for an image": (("jpg", b"<html>404</html>"), b"x 5", "undecodable image"),
    "floating-point pixels": (
        ("png", encoded(Image.new("F", (9, 7)), "TIFF")),
        b"x 5",
        "undecodable image",
    ),
    "a decompression bomb": (("png", bomb()), b"x 5", "oversized image"),
    "a one-pixel image": (("png", png((9, 9, 9), 1)), b"x 5", "one-pixel image"),
    "a line of one pixel": (("png", encoded(Image.new("RGB", (40, 1)))), b"x 5", "one-pixel image"),
    "a PNG called jpg": (("jpg", png((200, 200, 200))), b"x 5", None),
    "an upper-case suffix": (("JPG", JPEG), b"x 5", None),
    "no image": (None, b"x 5", "no image"),
    "a dot in the key": (("b.png", png((1, 2, 3))), b"x 5", "no image"),
    "no caption": (("png", png((200, 200, 200))), None, "no caption"),
    "an empty caption": (("png", png((200, 200, 200))), b"", "empty caption"),
}


def good_members(first: int = 0, leave_out: int | None = None) -> Members:
    members = []
    for number in range(first, first + SIZE):
        if number != leave_out:
            members += [
                (f"{number:04d}.png", png((200, 200, 200))),
                (f"{number:04d}.txt", f"x {number}".encode()),
            ]
    return members


def truncate(shard: Path, sample: int, *, behind_picture: bool = False) -> None:
    """Cut a shard off in the middle of a sample's picture, or between picture and caption."""
    with tarfile.open(shard) as tar:
        picture, caption = tar.getmembers()[2 * sample :][:2]
    shard.write_bytes(
        shard.read_bytes()[: caption.offset if behind_picture else picture.offset_data + 20]
    )


def damage_header(shard: Path, member: int) -> None:
    with tarfile.open(shard) as tar:
        offset = tar.getmembers()[member].offset
    data = bytearray(shard.read_bytes())
    data[offset : offset + 512] = os.urandom(512)
    shard.write_bytes(data)


def drop_tail(shard: Path) -> None:
    write_tar(shard, good_members()[: 2 * BAD])


def compress(shard: Path, share: float = 1) -> None:
    data = gzip.compress(shard.read_bytes())
    shard.write_bytes(data[: int(len(data) * share)])


def sizes_as(count: int) -> Callable[[Path], None]:
    def write(shard: Path) -> None:
        (shard.parent / "sizes.json").write_text(json.dumps({"0.tar": count, "1.tar": SIZE}))

    return write


def extra_members(shard: Path) -> None:
    with tarfile.open(shard, "w") as tar:
        for name, content in good_members():
            for extra in (f"__meta{name}__", f"{name.partition('.')[0]}.{name}.json", "README"):
                tar.addfile(tarfile.TarInfo(extra))
            for extra, kind in (("folder", tarfile.DIRTYPE), ("latest", tarfile.SYMTYPE)):
                info = tarfile.TarInfo(f"{extra}-{name.partition('.')[0]}")
                info.type, info.linkname = kind, "elsewhere"
                tar.addfile(info)
            add_file(tar, name, content)


def long_names(shard: Path) -> None:
    folder = "\u00e9" * 150
    write_tar(shard, [(f"{folder}/{name}", content) for name, content in good_members()])


# One shard of two: name -> (what happens to it, {reason: samples lost})
SHARDS: dict[str, tuple[Callable[[Path], object], dict[str, int]]] = {
    "a tar truncated within a picture": (
        lambda shard: truncate(shard, BAD),
        {"truncated shard": SIZE - BAD},
    ),
    "a tar truncated behind a picture": (
        lambda shard: truncate(shard, BAD, behind_picture=True),
        {"no caption": 1, "short shard": SIZE - BAD - 1},
    ),
    "a tar truncated between samples": (drop_tail, {"short shard": SIZE - BAD}),
    "a damaged header": (lambda shard: damage_header(shard, 2 * BAD), {"short shard": SIZE - BAD}),
    "an empty file": (lambda shard: shard.write_bytes(b""), {"unreadable shard": SIZE}),
    "a web page for a tar": (
        lambda shard: shard.write_bytes(b"<html>404</html>" * 99),
        {"unreadable shard": SIZE},
    ),
    "a vanished shard": (lambda shard: shard.unlink(), {"unreadable shard": SIZE}),
    "a truncated gzip": (lambda shard: compress(shard, 0.5), {"truncated shard": -1}),
    "a gzipped tar": (compress, {}),
    "fewer samples than counted": (sizes_as(SIZE + 4), {"short shard": 4}),
    "more samples than counted": (sizes_as(SIZE - 4), {}),
    "metadata, folders and links": (extra_members, {}),
    "long and foreign names": (long_names, {}),
}


def ids_of(captions: list[str]) -> torch.Tensor:
    assert all(captions)
    return torch.tensor([int(caption.split()[1]) for caption in captions])


def loader_of(sources: tuple[Source, ...] | str, batch: int = 2, **options):
    small = transforms.Compose([transforms.Resize((6, 6)), transforms.PILToTensor()])
    wanted = {"transform": small, "tokenizer": ids_of, "preprocessing": {"with_origin": True}}
    return loading.loader_of(sources, batch, **{**wanted, **options})


def two_shards(folder: Path, members: Members | None = None) -> Path:
    write_tar(folder / "0.tar", members if members is not None else good_members())
    write_tar(folder / "1.tar", good_members(SIZE))
    sizes_as(SIZE)(folder / "0.tar")
    return folder


def test_samples_of_a_torn_slice_are_replaced_at_their_own_places(tmp_path):
    """The place decides augmentation and caption: a slice from the middle of a shard keeps its positions in the cycle."""
    folder = two_shards(tmp_path / "a")
    truncate(folder / "0.tar", 3)
    (source,) = parse_sources(f"a={folder}")
    slices = [ShardSlice(0, 2, 6, 100), ShardSlice(1, 1, 5, 104)]
    samples = list(SliceReader(ShardReader.of_pairs(source), slices, slices).samples())
    assert [placed.place for placed in samples] == list(range(100, 108))
    assert [placed.loss is not None for placed in samples] == [False] + 3 * [True] + 4 * [False]
    # Samples 1 to 3 of the lost slice by samples 1 to 3 of the other one, which shows each of them twice.
    assert [placed.sample.key for placed in samples[1:4]] == [
        placed.sample.key for placed in samples[5:]
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_rotten_sample(tmp_path, kind):
    image, caption, reason = SAMPLES[kind]
    members = good_members()
    sample = [(f"{BAD:04d}.{image[0]}", image[1])] if image is not None else []
    sample += [(f"{BAD:04d}.txt", caption)] if caption is not None else []
    folder = two_shards(tmp_path / "s", [*members[: 2 * BAD], *sample, *members[2 * BAD + 2 :]])
    sources = parse_sources(f"s={folder}")
    loader = loader_of(sources)
    batches = list(loader)
    seen = torch.cat([ids for _, ids, _ in batches]).tolist()
    everything = list(range(2 * SIZE))
    if reason is None:
        assert sorted(seen) == everything and loader.lost == {}
    else:
        assert loader.lost == {"s": {reason: 1}} and len(seen) == 2 * SIZE
        assert set(seen) == set(everything) - {
            BAD
        }  # each of the other samples once, and one of them again
        strict = loader_of(sources, on_bad_sample="fail")
        with pytest.raises(UserError, match=f"sample '000{BAD}' in .*0.tar .source 's'."):
            list(strict)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SHARDS)
def test_a_rotten_shard(tmp_path, kind, caplog):
    damage, lost = SHARDS[kind]
    folder = two_shards(tmp_path / "s")
    damage(folder / "0.tar")
    sources = parse_sources(f"s={folder}/{{0..1}}.tar")
    loader = loader_of(sources)
    seen = torch.cat([ids for _, ids, _ in loader]).tolist()
    assert len(seen) == sources[0].num_samples // 2 * 2
    counted = loader.lost.get("s", {})
    assert counted.keys() == lost.keys() and (counted == lost or kind == "a truncated gzip")
    if lost and kind != "fewer samples than counted":
        assert set(range(SIZE, 2 * SIZE)) <= set(
            seen
        )  # the whole shard is seen, and stands in for the other
        with pytest.raises(
            UserError, match=r"shard .*0.tar of source 's' (cannot be read|was counted)"
        ):
            list(loader_of(sources, on_bad_sample="fail"))
    elif kind == "more samples than counted":
        assert "was counted with 8 samples and holds more" in caplog.text
    else:
        assert set(seen) == set(range(2 * SIZE))


@pytest.mark.parametrize("workers", [0, 3])  # of three readers, some enter the shard in its middle
def test_a_disk_that_fails_while_a_sample_is_read(tmp_path, monkeypatch, workers):
    sources = parse_sources(f"s={two_shards(tmp_path / 's')}")
    read, bad = Member.content, f"{BAD:04d}.png"

    def failing(member):
        if member.name == bad and os.readlink(f"/proc/self/fd/{member.descriptor}").endswith(
            "0.tar"
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(member)

    monkeypatch.setattr(Member, "content", failing)
    loader = loader_of(sources, workers=workers)
    seen = torch.cat([ids for _, ids, _ in loader]).tolist()
    assert (
        len(seen) == 2 * SIZE and BAD not in seen and loader.lost["s"].keys() == {"truncated shard"}
    )
    with pytest.raises(
        UserError, match=r"shard .*0.tar of source 's' cannot be read .sample 5: Input/output error"
    ):
        list(loader_of(sources, on_bad_sample="fail", workers=workers))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stalled_pipe_ends_with_a_sentence(workers, tmp_path, monkeypatch):
    """No hang: with worker processes the training process watches too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    loader = loader_of(
        (Source("s", ("pipe:sleep 1000",), (SIZE,)),), workers=workers, stall_timeout_seconds=2
    )
    begin = time.monotonic()
    with pytest.raises(
        UserError, match=r"for 2 s.*shard pipe:sleep 1000|shard pipe:sleep 1000 .* for 2 s"
    ):
        list(loader)
    assert time.monotonic() - begin < 40


@pytest.mark.timeout(60)
def test_a_killed_worker_ends_with_a_sentence(tmp_path):
    """The moment decides which code receives the signal; both give the same sentence."""
    loader = loader_of(parse_sources(f"s={write_source(tmp_path / 's', 0, 200, 50)}"), workers=1)
    with pytest.raises((UserError, RuntimeError)) as raised:
        for _ in loader:
            os.kill(loader.mixture.activity[0][0], signal.SIGKILL)
            time.sleep(0.5)
    error = raised.value
    sentence = str(error) if isinstance(error, UserError) else loader.explain(error)
    assert "loader worker 0 of rank 0 was lost while reading shard" in sentence


def test_a_lost_worker_is_named_below_the_error_of_a_checkpoints_writer(tmp_path):
    loader = loader_of(parse_sources(f"s={write_source(tmp_path / 's', 0, 4, 4)}"))
    error = RuntimeError(
        "unexpected pos 272000 vs 271888"
    )  # torch's, if a worker is lost meanwhile
    assert loader.explain(error) is None
    error.__context__ = RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed. ")
    assert "a loader worker of rank 0 was lost" in loader.explain(error)


def test_an_epoch_that_ends_early_is_an_error(tmp_path, monkeypatch):
    loader = loader_of(parse_sources(f"s={write_source(tmp_path / 's', 0, 4, 4)}"))
    monkeypatch.setattr(Mixture, "_micro_batches", lambda *_: iter(()))
    with pytest.raises(
        UserError, match="ended after 0 of 2 micro-batches; a worker process was lost"
    ):
        list(loader)


ENDS_BY_AN_EXCEPTION = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
sys.path.insert(0, {tests!r})
from data.test_bad_data import loader_of
from open_clip_zerovl.data.sources import parse_sources
batches = iter(loader_of(parse_sources("s={source}"), workers=1))
next(batches)
raise LookupError("unexpected")
"""


@pytest.mark.timeout(90)
def test_a_program_with_a_handler_of_its_own_ends_by_an_exception(tmp_path):
    """multiprocessing's exit sends each worker one SIGTERM and waits for it; a worker that ignores it is ended before."""
    source = write_source(tmp_path / "s", 0, 40, 40)
    script = ENDS_BY_AN_EXCEPTION.format(tests=str(ROOT / "tests"), source=source)
    done = subprocess.run([warm.python(), "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "LookupError: unexpected" in done.stderr


def test_a_source_of_which_nothing_is_left_ends_with_a_sentence(tmp_path):
    folder = two_shards(tmp_path / "s")
    sources = parse_sources(f"s={folder}")
    for shard in folder.glob("*.tar"):
        shard.unlink()
    with pytest.raises(UserError, match="none of the 2 shards of source 's' can be read"):
        list(loader_of(sources))
    members = [
        (name, b"rotten" if name.endswith("png") else content) for name, content in good_members()
    ]
    write_tar(tmp_path / "t" / "0.tar", members)
    with pytest.raises(UserError, match="none of the 128 samples around it can be shown either"):
        list(loader_of(parse_sources(f"t={tmp_path}/t")))


def test_one_bad_sample_that_is_all_that_a_reader_has(tmp_path):
    """24 readers of one sample each: the substitute comes from beyond the reader's own share."""
    members = good_members()
    members[2 * BAD] = (members[2 * BAD][0], b"rotten")
    (source,) = parse_sources(f"s={two_shards(tmp_path / 's', members)}")
    seen = []
    for rank in range(2 * SIZE):
        seen += [
            int(ids[0])
            for _, ids, _ in loader_of((source,), Batching(1, world_size=2 * SIZE), rank=rank)
        ]
    assert len(seen) == 2 * SIZE and set(seen) == set(range(2 * SIZE)) - {BAD}


def test_too_much_rot_ends_the_run(tmp_path, caplog):
    members = good_members()
    for number in (3, 4, 5):
        members[2 * number] = (members[2 * number][0], b"rotten")
    sources = parse_sources(f"s={two_shards(tmp_path / 's', members)}")
    with pytest.raises(
        UserError,
        match=r"source 's' has lost 3 samples \(3 undecodable image\), more than 10% of 24",
    ):
        list(loader_of(sources, max_bad_share=0.1))
    caplog.clear()
    list(loader_of(sources, max_bad_share=0.125))
    assert caplog.text.count("is replaced by another one") == 1  # once for each reason


@pytest.mark.parametrize("words, said", [(40, 1), (3, 0)])
def test_captions_that_fill_the_context_are_reported_once(tmp_path, caplog, words, said):
    shards = write_source(tmp_path / "a", 0, 12, 12, caption="word " * words)
    loader = loader_of(f"long={shards}", 3, workers=2, tokenizer=SimpleTokenizer(context_length=16))
    for _ in range(2):
        list(loader)
    told = [message for message in caplog.messages if "fill the text tower's context" in message]
    assert len(told) == said and all(
        "Source long: 100% of the captions" in message for message in told
    )


def test_the_books_are_judged_over_all_ranks():
    """A rank that loses most of its share ends nothing while the source as a whole is sound, and the other way round."""
    losses = [DroppedSample(0, "short shard", "", "s", "", number) for number in range(600)]
    one = DataStats(["a"], 0.1)
    one.open_epoch([JUDGED_SAMPLES * 10])
    one.add(BatchReport({0: 1000}, losses))  # 60 % of the samples that this rank has read
    healthy = EpochStats({"a": 999_000})
    one.close_epoch([one.epoch, healthy])
    uniform = EpochStats({"a": 125_000}, {"a": {"no image": 30_000}})
    with pytest.raises(
        UserError, match="240000 samples .240000 no image., more than 10% of 1000000"
    ):
        one.close_epoch([uniform] * 8)


def test_a_shard_that_is_torn_before_the_run_is_counted_to_the_tear(tmp_path, caplog):
    folder = two_shards(tmp_path / "s")
    (folder / "sizes.json").unlink()
    truncate(folder / "1.tar", BAD)
    assert (
        parse_sources(f"s={folder}")[0].sizes == (SIZE, 5) and "torn after 5 samples" in caplog.text
    )
    with pytest.raises(UserError, match="1.tar cannot be read as a tar file"):
        parse_sources(f"s={folder}", on_bad_sample="fail")
