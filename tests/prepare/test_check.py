"""Counting and checking shards that are there already."""

from __future__ import annotations

import io
import json
import os
import tarfile

import pytest

from open_clip_zerovl import cli
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import count_tar_samples
from open_clip_zerovl.prepare.check import check_shards, write_sizes
from open_clip_zerovl.shards.files import write_shard
from open_clip_zerovl.shards.tar import BrokenTar, Member, Sample, read_samples, walk_tar
from support.pairs import picture
from support.tars import png, write_source, write_tar


def tar_of(form: int, sizes: dict[str, int]) -> bytes:
    """A tar of a folder and of plain files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, size in sizes.items():
            member = tarfile.TarInfo(name)
            member.size = size
            member.mtime = 1700000000.5  # pax keeps the half second in a header of its own
            tar.addfile(member, io.BytesIO(os.urandom(size)))
    return stream.getvalue()


def members_of(content: bytes) -> list[Member]:
    return list(walk_tar(lambda offset, size: content[offset : offset + size], len(content)))


def plain_tar(count: int) -> tuple[bytes, list[Member]]:
    """A tar of plain files, and its members."""
    sizes = (0, 1, 511, 512, 513, 3000)
    files = {f"{n:05d}.{('jpg', 'txt')[n % 2]}": sizes[n % 6] for n in range(count)}
    content = tar_of(tarfile.USTAR_FORMAT, files)
    return content, members_of(content)


SIZES = {
    "000000001.jpg": 700,
    "000000001.txt": 0,
    "folder/2.tar.gz": 512,
    "a/" * 60 + "long.jpg": 5,
    "\u00fcml.png": 3,
}


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_headers_are_read_as_tarfile_reads_them(form):
    longer = {"b" * 180 + ".txt": 1024} if form != tarfile.USTAR_FORMAT else {}
    content = tar_of(form, SIZES | longer)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        expected = [Member(m.name, m.offset_data, m.size, m.offset) for m in tar if m.isreg()]
    assert members_of(content) == expected and len(expected) >= 5
    end = expected[-1].offset + expected[-1].size
    for length in (0, 100, 512, end - 1, end):
        with pytest.raises(BrokenTar):
            members_of(content[:length])


def test_broken_headers_end_the_walk_after_the_members_before_them():
    content, expected = plain_tar(40)
    head = expected[20].offset - 512
    changes = {
        0: [b"?"],
        130: [b"?"],
        110: [b"7"],
        124: [b"\x80", b"-0000001000", b"-0000000001"],
        150: [b"9"],
        345: [b"d"],
    }
    for spot, changed in ((spot, changed) for spot, every in changes.items() for changed in every):
        broken = content[: head + spot] + changed + content[head + spot + len(changed) :]
        found = []
        with pytest.raises(BrokenTar, match=f"at byte {head}"):
            for member in walk_tar(lambda at, size, held=broken: held[at : at + size], len(broken)):
                found.append(member)
        assert found == expected[:20], spot


def test_sizes_are_counted_as_training_counts(tmp_path):
    write_source(tmp_path / "s", 0, 57, 10, sizes=False)
    names = ["__meta__/x.json", "k.jpg", "k.txt", "k.jpg", "d/e.f.txt", "README"]
    write_tar(tmp_path / "s" / "odd.tar", [(name, b"1") for name in names])
    sizes = write_sizes(tmp_path / "s", progress=False)
    assert sizes == {p.name: count_tar_samples(p) for p in sorted((tmp_path / "s").glob("*.tar"))}
    assert sizes["odd.tar"] == 3 and sum(sizes.values()) == 60
    assert json.loads((tmp_path / "s/sizes.json").read_text()) == sizes
    with pytest.raises(UserError, match="holds no"):
        write_sizes(tmp_path, progress=False)


def pax_member(record: bytes) -> bytes:
    """A pax header of one record, and the header of the file that it is about."""
    about = tarfile.TarInfo("pax")
    about.type, about.size = tarfile.XHDTYPE, len(record)
    member = tarfile.TarInfo("b.txt")
    return (
        about.tobuf(tarfile.USTAR_FORMAT)
        + record.ljust(512, b"\0")
        + member.tobuf(tarfile.USTAR_FORMAT)
    )


def long_name_of(size: int) -> bytes:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, size
    return header.tobuf(tarfile.GNU_FORMAT)


ROTTEN_HEADERS = {
    "a pax record of length 0": pax_member(b"0 path=x\n"),
    "a negative size in pax": pax_member(b"14 size=-1024\n"),
    "a name that claims 8 GiB": long_name_of(8 << 30),
    "5,000 headers about headers": b"".join(
        long_name_of(1) + b"n".ljust(512, b"\0") for _ in range(5000)
    ),
}


@pytest.mark.parametrize("kind", ROTTEN_HEADERS)
def test_rotten_headers_end_in_a_sentence_and_training_reads_what_lies_before(tmp_path, kind):
    """Counting and checking; before, they went round for ever."""
    content, members = plain_tar(4)
    (tmp_path / "s").mkdir()
    shard = tmp_path / "s/0.tar"
    shard.write_bytes(content[: members[-1].offset + 512] + ROTTEN_HEADERS[kind] + bytes(1024))
    with pytest.raises(UserError, match=r"0\.tar is broken: "):
        write_sizes(tmp_path / "s", progress=False)
    assert "0.tar: broken: " in check_shards(tmp_path / "s", progress=False).report
    with pytest.raises(UserError, match=r"shard .*0\.tar cannot be read"):
        list(read_samples(shard))
    # the last one's end is not seen where reading breaks off
    assert count_tar_samples(shard, torn=True) in (3, 4)


def test_check_finds_every_kind_of_fault(tmp_path):
    jpg = b"\xff\xd8\xff" + b"x" * 50 + b"\xff\xd9"
    noise = {kind: picture(0, kind) for kind in ("JPEG", "PNG")}
    write_shard(
        tmp_path / "00000.tar", [Sample(f"{i}", {"jpg": jpg, "txt": b"fine"}) for i in range(4)]
    )
    faulty = {
        "a": {"jpg": jpg},
        "b": {"txt": b"text only"},
        "c": {"jpg": jpg, "txt": b" \n"},
        "d": {"jpg": jpg, "txt": b"caf\xe9"},
        "e": {"jpg": jpg[:-2], "txt": b"cut"},
        "f": {"png": b"<html>", "txt": b"page"},
        "g": {"png": png((1, 2, 3)), "txt": b"fine"},
        "h": {"gif": b"GIF89a", "txt": b"fine"},
        "i": {"jpg": picture(0, "JPEG") + b"a phone's own", "txt": b"fine"},
        "j": {"jpg": noise["JPEG"][:-40], "txt": b"cut in its last lines"},
        "k": {"png": noise["PNG"][:-80] + noise["PNG"][-12:], "txt": b"whole from outside"},
    }
    write_shard(tmp_path / "00001.tar", [Sample(key, files) for key, files in faulty.items()])
    write_tar(
        tmp_path / "00002.tar",
        [("k.jpg", jpg), ("k.txt", b"1"), ("l.jpg", jpg), ("l.txt", b"2"), ("k.jpg", jpg)],
    )
    (tmp_path / "00003.tar").write_bytes((tmp_path / "00000.tar").read_bytes()[:2000])
    sizes = {"00000.tar": 4, "00001.tar": 11, "00002.tar": 2, "00003.tar": 4, "00009.tar": 1}
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    faults, report = check_shards(tmp_path, progress=False)
    head, *lines, last = report.splitlines()
    assert (
        head.startswith("18 samples in 5 shards, ") and last == f"{faults} faults." == "13 faults."
    )
    broken = [line for line in lines if line.startswith("00003.tar: broken: it is cut off after")]
    assert [line for line in lines if line not in broken] == [
        "00001.tar: no caption: 1 (a)",
        "00001.tar: no picture: 1 (b)",
        "00001.tar: caption is empty: 1 (c)",
        "00001.tar: caption is not UTF-8: 1 (d)",
        "00001.tar: picture is cut off: 2 (e, j)",
        "00001.tar: picture is not a png: 1 (f)",
        "00002.tar: key comes twice: 1 (k)",
        "00002.tar: no caption: 1 (k)",
        "00002.tar: holds 3 samples, and 2 in sizes.json",
        "00003.tar: holds 0 samples, and 4 in sizes.json",
        "00009.tar: shard missing",
    ]
    # A broken picture that looks whole from outside is found when it is decoded.
    decoded = check_shards(tmp_path, decode=True, progress=False).report
    assert (
        "00001.tar: picture cannot be decoded (UnidentifiedImageError): 4 (a, c, d, h)" in decoded
    )
    assert "00001.tar: picture cannot be decoded (OSError): 1 (k)" in decoded


def test_the_command_counts_or_checks(tmp_path, capsys):
    write_source(tmp_path / "s", 0, 12, 10, sizes=False)
    assert cli.main(["data", "check", str(tmp_path / "s"), "--sizes"]) == 0
    assert cli.main(["data", "check", str(tmp_path / "s"), "--decode"]) == 0
    assert cli.main(["data", "check", str(tmp_path / "s"), "--hash"]) == 2  # without a manifest
    (tmp_path / "s/sizes.json").write_text('{"00000.tar": 10, "00001.tar": 3}')
    assert cli.main(["data", "check", str(tmp_path / "s")]) == 2
    assert "has 1 faults: see above" in capsys.readouterr().err
