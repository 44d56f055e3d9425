"""Lists of addresses to shards, against a real web server on loopback that serves the good, the bad and the slow."""

from __future__ import annotations

import dataclasses
import io
import json
import socket
import subprocess
import time
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.identity import sha256_of
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.prepare.check import check_shards
from open_clip_zerovl.prepare.public import download, manifest, pairs
from open_clip_zerovl.prepare.public.download import Downloader
from open_clip_zerovl.prepare.public.inputs import PictureStore
from open_clip_zerovl.prepare.public.lists import prepare_list
from open_clip_zerovl.prepare.public.pictures import Encoding, Failure, encode_picture
from open_clip_zerovl.prepare.public.spool import Spool
from open_clip_zerovl.prepare.settings import Limits, Work
from open_clip_zerovl.shards.archives import open_member
from open_clip_zerovl.shards.members import read_samples
from support.hostile_server import hostile_server, photo

LIMITS = Limits(idle_seconds=0.5, total_seconds=1.0, max_bytes=1_000_000, private_redirects=True)
WORK = Work(threads=16, attempts=2, backoff_seconds=0.01, progress=False)

#: The outcome of each kind of address.
EXPECTED = {
    "good": None,
    "png": None,
    "chunked": None,
    "moved": None,
    "flaky": None,
    "missing": "http 404",
    "loop": "bad redirect",
    "html": "not a picture",
    "busy": "http 503",
    "cut": "cut off",
    "truncated": "broken picture",
    "pixel": "picture too small",
    "huge": "too many bytes",
    "flood": "too many bytes",
    "drip": "timed out",
    "silent": "timed out",
}


@pytest.fixture(scope="module")
def server():
    with hostile_server() as running:
        yield running


@pytest.fixture
def make(tmp_path):
    """`make([ADDRESS, ...], OPTION=...)` packs a list of them into `out` and returns the manifest."""

    def run(
        urls: list[str], dataset: str = "cc3m", *, out: str = "out", work: Work = WORK, **options
    ):
        listed = tmp_path / "list.tsv"
        listed.write_text(
            "".join(f"caption {i}\t{url}\n" for i, url in enumerate(urls)), encoding="utf-8"
        )
        return prepare_list(
            dataset, tmp_path / out, source=[str(listed)], limits=LIMITS, work=work, **options
        )

    return run


def contents(folder: Path) -> dict[str, str]:
    """Every shard, sizes.json and record of a folder, by its hash."""
    files = [*folder.glob("*.tar"), folder / "sizes.json", *folder.glob("records/*.json")]
    return {file.relative_to(folder).as_posix(): sha256_of(file) for file in files}


def captions(folder: Path) -> list[str]:
    return [
        s.files["txt"].decode()
        for shard in sorted(folder.glob("*.tar"))
        for s in read_samples(shard)
    ]


# ----------------------------------------------------------------------------------------------------- contents


def test_every_kind_of_answer_is_counted_by_its_reason(server, make, tmp_path):
    kinds = [kind for kind in EXPECTED for _ in range(2)]
    urls = [server.url(kind, i) for i, kind in enumerate(kinds)]
    urls += [
        "",
        "ftp://127.0.0.1/x.jpg",
        "http://127.0.0.1:1/x.jpg",
        "http://no host/x.jpg",
        server.url("tofile", 0),
    ]
    begin = time.monotonic()
    result = make(urls, shard_size=10)
    assert (
        time.monotonic() - begin < 20
    )  # no address holds the rest up for longer than its limit and its retry

    came = [i for i, kind in enumerate(kinds) if EXPECTED[kind] is None]
    assert captions(tmp_path / "out") == [f"caption {i}" for i in came]  # in the list's order
    failures = Counter(EXPECTED[kind] for kind in kinds if EXPECTED[kind])
    failures.update(
        {
            "no address": 1,
            "not a web address": 2,
            "connection refused or lost": 1,
            "bad redirect": 1,
        }
    )
    assert result["failures"] == failures
    assert result["complete"] and result["pairs"] == len(came) and result["rows"] == len(urls)
    # Only what may pass is tried again.
    assert server.requests["/missing/10.jpg"] == 1 and server.requests["/busy/16.jpg"] == 2

    (source,) = parse_sources(f"cc3m={tmp_path / 'out'}")
    assert source.num_samples == len(came)
    assert not check_shards(tmp_path / "out", hashes=True, decode=True, progress=False).faults
    for shard, entry in result["shards"].items():
        assert entry["sha256"] == sha256_of(tmp_path / "out" / shard)
    records = [json.loads(file.read_text()) for file in (tmp_path / "out/records").glob("*.json")]
    lost = {row for record in records for rows in record["failures"].values() for row in rows}
    assert lost == set(range(len(urls))) - set(came)  # which ones, by their number in the list


def test_a_second_call_fetches_nothing_and_a_folder_keeps_to_its_list(server, make, tmp_path):
    urls = [server.url("good", 1000 + i) for i in range(25)]
    first = make(urls, shard_size=10)
    before, asked = contents(tmp_path / "out"), server.requests.total()
    assert make(urls, shard_size=10) == first
    assert contents(tmp_path / "out") == before and server.requests.total() == asked
    assert json.loads((tmp_path / "out/sizes.json").read_text()) == {
        "00000.tar": 10,
        "00001.tar": 10,
        "00002.tar": 5,
    }
    # A shard that has gone is made again, and only that one.
    (tmp_path / "out/00001.tar").unlink()
    make(urls, shard_size=10)
    assert contents(tmp_path / "out") == before and server.requests.total() == asked + 10
    with pytest.raises(UserError, match="was begun with made_from"):
        make(urls[1:], shard_size=10)
    with (
        manifest.sole_writer(tmp_path / "busy", "0-of-1"),
        pytest.raises(UserError, match="process is writing"),
    ):
        make(urls, out="busy")


def test_failures_for_a_passing_reason_can_be_tried_again(server, make, tmp_path):
    urls = [server.url("flaky" if i % 3 else "missing", 2000 + i) for i in range(12)]
    once = dataclasses.replace(WORK, attempts=1)
    first = make(urls, "cc12m", shard_size=6, work=once)
    assert first["failures"] == {"http 503": 8, "http 404": 4} and first["pairs"] == 0
    assert not list((tmp_path / "out").glob("*.tar"))
    again = dataclasses.replace(once, retry_failed=True)
    second = make(urls, "cc12m", shard_size=6, work=again)
    assert second["failures"] == {"http 404": 4} and second["pairs"] == 8
    assert captions(tmp_path / "out") == [f"caption {i}" for i in range(12) if i % 3]
    assert all(
        server.requests[f"/missing/{2000 + i}.jpg"] == 1 for i in range(0, 12, 3)
    )  # gone is gone
    # A transfer that its limit cuts: without an announced length the bytes that came look like a whole answer.
    urls = [server.url("open", 6000 + i) for i in range(3)]
    assert make(urls, out="open", work=once)["failures"] == {"timed out": 3}
    assert make(urls, out="open", work=again)["pairs"] == 3
    urls = [server.url("half", 6000 + i) for i in range(3)]
    assert make(urls, out="half", work=once)["failures"] == {"cut off": 3}
    assert make(urls, out="half", work=again)["pairs"] == 3


@pytest.mark.parametrize("named", [False, True])
def test_redirects_to_private_addresses_are_refused_unless_allowed(server, monkeypatch, named):
    """By the address in the redirect, and where that is a name by the address that is connected to."""
    guarded = Downloader(dataclasses.replace(LIMITS, private_redirects=False))
    assert guarded(server.url("good", 1)) == photo(1)  # the list's own address
    if named:  # the redirect names a host, of which only the connection shows the address
        monkeypatch.setattr(
            download, "urljoin", lambda url, found: url.replace("127.0.0.1", "ip6-localhost") + "?"
        )
        known = socket.getaddrinfo
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda host, *rest, **more: known("127.0.0.1", *rest, **more)
        )
    before = server.requests.total()
    with pytest.raises(Failure, match="redirect to a private address"):
        guarded(server.url("moved", 1))
    assert server.requests.total() == before + 1
    monkeypatch.undo()
    assert Downloader(LIMITS)(server.url("moved", 1)) == photo(1)


@pytest.mark.parametrize(
    ("public", "hosts"),
    [
        (
            False,
            ["127.0.0.1", "::1", "::ffff:10.0.0.1", "169.254.169.254", "fe80::1%eth0", "fc00::1"],
        ),
        (True, ["8.8.8.8", "2606:4700::1", "photos.example.org"]),
    ],
)
def test_public_addresses_are_distinguished_from_private_ones(public, hosts):
    assert [download._is_public(host) for host in hosts] == [public] * len(hosts)


def test_two_processes_share_a_list(server, make, tmp_path):
    urls = [server.url("good", 3000 + i) for i in range(35)]
    half = make(urls, shard_size=10, work=dataclasses.replace(WORK, part=(0, 2)))
    assert not half["complete"] and half["pairs"] == 20
    whole = make(urls, shard_size=10, work=dataclasses.replace(WORK, part=(1, 2)))
    assert whole["complete"] and captions(tmp_path / "out") == [f"caption {i}" for i in range(35)]
    assert make(urls, out="alone", shard_size=10)["shards"] == whole["shards"]


# ------------------------------------------------------------------------------------------------------ interrupted


@pytest.mark.parametrize("crash_in", ["write_shard", "sha256_of", "write_record"])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_between_any_two_steps_of_a_shard_is_mended(
    server, make, tmp_path, monkeypatch, crash_in, after
):
    urls = [server.url("good", i) for i in range(8)]
    original = getattr(manifest, crash_in)
    # It hashes the list too: the shard's own hash shall crash.
    monkeypatch.setattr(
        "open_clip_zerovl.prepare.public.lists.described", lambda paths: ["the list"]
    )

    def crash(*args):
        if after:
            original(*args)
        raise SystemError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, crash_in, crash)
        with pytest.raises(SystemError, match="killed here"):
            make(urls, shard_size=4)
    result = make(urls, shard_size=4)
    assert result["complete"] and captions(tmp_path / "out") == [f"caption {i}" for i in range(8)]
    assert not list((tmp_path / "out/records").glob("*.spool"))


def test_a_spool_survives_a_kill_at_any_byte(tmp_path):
    spool = Spool(tmp_path / "whole")
    spool.add(3, "jpg", b"first")
    spool.fail(1, "http 404", transient=False)
    spool.add(2, "png", b'{"row": 9, "size": 0}\n')  # a picture that looks like a record
    spool.close()
    whole = (tmp_path / "whole").read_bytes()
    for length in range(len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        cut = Spool(tmp_path / "cut")
        assert list(cut.outcomes) == [3, 1, 2][: len(cut.outcomes)]
        cut.add(7, "jpg", b"next")
        assert cut.read(7) == b"next" and (3 not in cut.outcomes or cut.read(3) == b"first")
        cut.close()
        again = Spool(tmp_path / "cut")
        assert again.outcomes == cut.outcomes and 9 not in again.outcomes
        again.close()
    assert len(cut.outcomes) == 4


# --------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("AVIF: decoding failed"),
        NotImplementedError("DDS"),
        AssertionError(),
        KeyError("x"),
    ],
)
def test_whatever_a_decoder_raises_costs_one_picture(tmp_path, monkeypatch, error):
    """One undecodable AVIF or DDS ended `zerovl data sbu`, and again at every call."""
    rows = [pairs.DatasetRow(str(i), "a caption", str(i)) for i in range(3)]
    load = ImageFile.ImageFile.load

    def rotten(image):
        if image.size == (99, 98):
            raise error
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", rotten)
    contents = [photo(0, 40, 40), photo(1, 99, 98), photo(2, 40, 40)]
    work = Work(threads=1, progress=False)
    about = {"dataset": "sbu", "made_from": {}, "encoding": Encoding(32), "work": work}
    made = pairs.prepare_pairs(tmp_path, rows, lambda where: contents[int(where)], **about)
    assert made["pairs"] == 2 and made["failures"] == {"broken picture": 1}


def test_pictures_of_other_formats_are_not_opened(monkeypatch):
    """EPS from the web started Ghostscript."""
    monkeypatch.setattr(
        "PIL.EpsImagePlugin.Ghostscript", lambda *args, **options: pytest.fail("it was started")
    )
    for form in ("EPS", "DDS", "TGA"):
        with pytest.raises(Failure, match="not a picture"):
            encode_picture(saved(Image.new("RGB", (32, 32), (9, 9, 9)), form), Encoding())


@pytest.mark.parametrize("kind", ["corrupt deflate data", "encrypted", "unknown compression"])
def test_a_rotten_entry_of_a_zip_is_one_missing_picture(tmp_path, kind):
    path = tmp_path / "images.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jpg", photo(0, 40, 40))
        archive.writestr("good.jpg", photo(1, 40, 40))
    content = bytearray(path.read_bytes())
    local, central = content.index(b"PK\x03\x04"), content.index(b"PK\x01\x02")
    if kind == "encrypted":
        content[local + 6] |= 1
        content[central + 8] |= 1
    elif kind == "unknown compression":
        content[local + 8] = content[central + 10] = 99
    else:
        content[local + 35 : local + 60] = b"\xff" * 25
    path.write_bytes(content)
    store = PictureStore([path])
    try:
        with pytest.raises(Failure, match="picture cannot be read"):
            store("a.jpg")
        assert store("good.jpg") == photo(1, 40, 40)
    finally:
        store.close()
    with (
        pytest.raises(UserError, match=r"images\.zip is broken or encrypted"),
        open_member(path, "a.jpg") as stream,
    ):
        stream.read()


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


def saved(image: Image.Image, form: str, **options) -> bytes:
    content = io.BytesIO()
    image.save(content, form, **options)
    return content.getvalue()


def quarter_turn() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(Image.new("RGB", (64, 32)), "JPEG", exif=exif)


GREY = Image.new("L", (40, 30), 90)
#: A picture -> its size as a JPEG of at most 256 pixels on the shorter side, and the colour of a pixel if it is known.
STORED = {
    "wide": (photo(0, 1000, 500), (512, 256), None),
    "tall": (photo(0, 500, 1001), (256, 513), None),
    "small, which is not enlarged": (photo(0, 200, 100), (200, 100), None),
    "narrow": (photo(0, 256, 4000), (256, 4000), None),
    "transparent": (
        saved(Image.new("RGBA", (64, 32), (0, 0, 0, 0)), "PNG"),
        (64, 32),
        (255, 255, 255),
    ),
    "turned by EXIF": (quarter_turn(), (32, 64), None),
    "sixteen bits": (
        saved(Image.fromarray(np.full((32, 32), 0x4000, np.uint16)), "PNG"),
        (32, 32),
        (64, 64, 64),
    ),
    **{
        f"mode {mode}": (saved(GREY.convert(mode), "PNG"), (40, 30), None)
        for mode in ("L", "LA", "P", "1")
    },
    "mode CMYK": (saved(GREY.convert("CMYK"), "TIFF"), (40, 30), None),
    "mode I;16": (saved(Image.new("I;16", (40, 30), 90), "TIFF"), (40, 30), None),
}


@pytest.mark.parametrize("kind", STORED)
def test_pictures_are_stored_as_rgb_of_at_most_256_pixels(kind):
    content, size, colour = STORED[kind]
    made = encode_picture(content, Encoding())
    image = opened(made.content)
    assert (made.extension, image.format, image.mode, image.size) == ("jpg", "JPEG", "RGB", size)
    assert colour is None or image.getpixel((5, 5)) == colour
    if kind == "sixteen bits":  # as in training; Pillow alone would make white of them
        assert decode_image(content).getpixel((5, 5)) == colour


def test_quality_95_is_what_pillow_writes_at_95():
    original = photo(5, 300, 256, "PNG")
    assert encode_picture(original, Encoding()).content == saved(
        opened(original), "JPEG", quality=95
    )


def test_originals_can_be_kept_and_are_still_checked():
    keep = Encoding(shorter_side_px=None)
    for form, extension in (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")):
        content = photo(1, 900, 700, form)
        assert encode_picture(content, keep)[:2] == (extension, content)
        with pytest.raises(Failure, match="broken picture"):
            encode_picture(content[: len(content) // 2], keep)
    assert encode_picture(photo(1, format="GIF", mode="P"), keep).extension == "jpg"
    with pytest.raises(Failure, match="picture too large"):
        encode_picture(photo(1, 900, 700), Encoding(max_pixels=100_000))


def test_wrong_certificates_are_refused_unless_allowed(tmp_path):
    """A server with a self-signed certificate: a reason of its own, and the picture where that is switched off."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -keyout key -out cert"
    made = subprocess.run(command.split(), cwd=tmp_path, capture_output=True)
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    import ssl

    with hostile_server() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url("good", 1).replace("http:", "https:")
        with pytest.raises(Failure, match="bad certificate"):
            Downloader(LIMITS)(url)
