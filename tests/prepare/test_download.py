"""Lists of addresses to shards, against a real web server on loopback that serves the good, the bad and the slow."""

from __future__ import annotations

import dataclasses
import io
import socket

import numpy as np
import pytest
from PIL import Image, ImageFile

from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.prepare import pictures as download
from open_clip_zerovl.prepare.pictures import Downloader, Failure, encode_picture
from open_clip_zerovl.prepare.settings import Limits, PackSettings
from open_clip_zerovl.prepare.store import Spool
from support.servers import HostileServer, photo

LIMITS = Limits(private_redirects=True)
SMALL = PackSettings(shorter_side_px=256)  # as the public sets


@pytest.fixture(scope="module")
def server():
    with HostileServer() as running:
        yield running


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


def test_a_spool_survives_a_kill_at_any_byte(tmp_path):
    spool = Spool(tmp_path / "whole")
    records = [
        spool.add(b"first", number=3, extension="jpg"),
        spool.add(b"", number=1, reason="http 404"),
        spool.add(b'{"number": 9, "size": 0}\n', number=2),  # a picture that looks like a record
    ]
    spool.close()
    whole = (tmp_path / "whole").read_bytes()
    for length in range(len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        cut = Spool(tmp_path / "cut")
        left = list(cut.recovered())
        assert left == records[: len(left)]
        left.append(cut.add(b"next", number=7, extension="jpg"))
        for facts in left:
            wanted = {3: b"first", 7: b"next"}.get(facts["number"])
            assert wanted in (None, cut.content(facts["offset"], facts["size"]))
        cut.close()
        again = Spool(tmp_path / "cut")
        assert list(again.recovered()) == left
        again.close()
    assert len(left) == 4


# --------------------------------------------------------------------------------------------------------- pictures


def test_whatever_a_decoder_raises_costs_one_picture(monkeypatch):
    """One undecodable AVIF or DDS ended `zerovl data public sbu`, and again at every call."""

    def rotten(image):
        raise NotImplementedError("AVIF: decoding failed")

    monkeypatch.setattr(ImageFile.ImageFile, "load", rotten)
    with pytest.raises(Failure, match="broken picture"):
        encode_picture(photo(1, 99, 98), SMALL)


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
    made = encode_picture(content, SMALL)
    image = opened(made.content)
    assert (made.extension, image.format, image.mode, image.size) == ("jpg", "JPEG", "RGB", size)
    assert colour is None or image.getpixel((5, 5)) == colour
    if kind == "sixteen bits":  # as in training; Pillow alone would make white of them
        assert decode_image(content).getpixel((5, 5)) == colour


def test_originals_can_be_kept_and_are_still_checked(monkeypatch):
    for form, extension in (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")):
        content = photo(1, 900, 700, form)
        assert encode_picture(content, PackSettings())[:2] == (extension, content)
        with pytest.raises(Failure, match="broken picture"):
            encode_picture(content[: len(content) // 2], PackSettings())
    assert encode_picture(photo(1, format="GIF", mode="P"), PackSettings()).extension == "jpg"
    original = photo(5, 300, 256, "PNG")  # and otherwise the quality is the paper's
    assert encode_picture(original, SMALL).content == saved(opened(original), "JPEG", quality=95)
    monkeypatch.setattr(download, "MOST_PIXELS", 100_000)
    with pytest.raises(Failure, match="picture too large"):
        encode_picture(photo(1, 900, 700), SMALL)
