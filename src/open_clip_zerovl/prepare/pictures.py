"""The bytes of a picture as shards store it: fetched from the web where it lies there, decoded to its end, made smaller.

Stored pictures are neither padded nor enlarged. They are rotated by their EXIF tag, and transparency becomes white, so that a
stored picture looks as on its web page. The default is section 2.1's: shorter side 256 pixels, JPEG quality 95.

Hosts are slow, gone, or answer with something else. Time, bytes and redirects of a transfer are bounded by aiohttp, on fsspec's
event loop. A transfer ends as the host ended it, or raises `Failure`, which has a constant reason to count by and tells callers
whether a retry may help.
"""

from __future__ import annotations

import asyncio
import errno
import io
import ipaddress
import socket
import ssl
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from PIL import Image

from open_clip_zerovl.data.splits import picture_key
from open_clip_zerovl.prepare.settings import JPEG_QUALITY, MOST_PIXELS, Limits, PackSettings
from open_clip_zerovl.shards.pictures import (
    BadPicture,
    as_shown,
    decoded,
    has_transparency,
    orientation_of,
    stock_reads_alike,
)
from open_clip_zerovl.shards.urls import announces_end

if TYPE_CHECKING:  # imported where it is used: the flags below are shown by `--help`
    from aiohttp import TCPConnector


#: Formats whose bytes may be stored unchanged -> the extension that webdataset and CLIP_benchmark look for.
_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
_REASONS = {"undecodable image": "broken picture", "oversized image": "picture too large"}


class Unannounced(bytes):
    """An answer whose length was not announced: one that was cut off ends in the same way as a whole one."""


class Failure(Exception):
    """The reason why a pair has no picture: a short constant phrase to count by, and whether a retry may help."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.transient = transient


class Picture(NamedTuple):
    """A picture as it is stored: extension, bytes, and further facts for its spool."""

    extension: str
    content: bytes
    about: Mapping[str, Any]


def encode_picture(content: bytes, settings: PackSettings) -> Picture:
    """Encode a picture as it is stored, decoded to its end, so that a truncated one is refused.

    Returns:
        The picture, about which is known: "width" and "height" in pixels as it is stored, upright; 1 or 0 for "turned",
        "shrunk" and "whitened"; "key", a hash of its RGB pixels before it is shrunk, the same for all files with these pixels.

    Raises:
        Failure: no picture, or one that is broken, truncated, too small or too large. A broken one of which nobody knows the
            length counts as cut off, which may pass.
    """

    def use(image: Image.Image) -> Picture:
        if min(image.size) < settings.min_side_px:
            raise BadPicture("picture too small", "")
        if image.width * image.height > MOST_PIXELS:
            raise BadPicture("picture too large", "")
        turned = orientation_of(image) != 1
        picture = as_shown(image)
        alike = stock_reads_alike(image, picture)
        whitened = has_transparency(image) and not alike
        smaller = _shrunk(picture, settings)
        width, height = smaller.size
        shrunk = smaller.size != picture.size
        extension = _EXTENSIONS.get(image.format or "")
        if settings.shorter_side_px is not None or shrunk or not alike:
            extension = None  # its bytes cannot stay
        about = {
            "key": picture_key(picture),
            "width": width,
            "height": height,
            "turned": int(turned and extension is None),
            "shrunk": int(shrunk),
            "whitened": int(whitened and extension is None),
        }
        if extension:
            return Picture(extension, content, about)
        jpeg = io.BytesIO()
        smaller.save(jpeg, "JPEG", quality=JPEG_QUALITY)
        return Picture("jpg", jpeg.getvalue(), about)

    try:
        with warnings.catch_warnings():
            # Pillow warns of large pictures, for which MOST_PIXELS is the limit here, and of odd EXIF.
            warnings.simplefilter("ignore")
            return decoded(content, use)
    except BadPicture as error:
        if isinstance(error.__cause__, Image.UnidentifiedImageError):
            raise Failure("not a picture") from error
        if isinstance(content, Unannounced) and error.reason == "undecodable image":
            raise Failure("cut off", transient=True) from error
        raise Failure(_REASONS.get(error.reason, error.reason)) from error


def _shrunk(picture: Image.Image, settings: PackSettings) -> Image.Image:
    """Shrink a picture to both limits."""
    shorter, longer = settings.shorter_side_px, settings.max_side_px
    scale = 1.0 if shorter is None else shorter / min(picture.size)
    if longer is not None:
        scale = min(scale, longer / max(picture.size))
    if scale >= 1.0:
        return picture
    least = 1 if longer is not None else shorter or 1
    size = (max(least, round(picture.size[0] * scale)), max(least, round(picture.size[1] * scale)))
    return picture.resize(size, Image.Resampling.LANCZOS)


_PIECE_BYTES = 1 << 16
_PRIVATE = "redirect to a private address"
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 10
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class Downloader:
    """A function of URLs that any thread may call, with the proxies of the environment."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    def __call__(self, url: str) -> bytes:
        """Fetch the bytes behind a URL.

        Raises:
            Failure: no address, no answer, an error of the host, a transfer that breaks off, or a limit that is exceeded.
        """
        from fsspec.asyn import get_loop

        if not url:
            raise Failure("no address")
        transfer = asyncio.wait_for(self._received(url), self.limits.total_seconds)
        try:
            return asyncio.run_coroutine_threadsafe(transfer, get_loop()).result()
        except Failure:
            raise
        except Exception as error:
            known = _explained(error)
            if known is None:
                raise
            raise known from error

    async def _received(self, url: str) -> bytes:
        """Follow redirects to bytes."""
        guarded = False
        for _ in range(_MOST_REDIRECTS + 1):
            if not url.lower().startswith(("http://", "https://")) or " " in url.split("/")[2]:
                raise Failure("bad redirect" if guarded else "not a web address")
            answer = await self._answer(url, guarded)
            if isinstance(answer, bytes):
                return answer
            url, guarded = urljoin(url, answer), True
        raise Failure("bad redirect")

    async def _answer(self, url: str, redirected: bool) -> bytes | str:
        """Return the bytes of an answer, or the address of a redirect."""
        import aiohttp

        limits = self.limits
        pieces = []
        size = 0
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=limits.idle_seconds, sock_read=limits.idle_seconds
        )
        headers = {
            "User-Agent": limits.user_agent,
            "Accept": "image/*,*/*;q=0.8",
            "Accept-Encoding": "identity",
        }
        connector = self._connector(url, redirected and not limits.private_redirects)
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=headers, trust_env=True
            ) as session,
            session.get(url, allow_redirects=False) as answer,
        ):
            if answer.status in _REDIRECTS:
                return answer.headers.get("Location", "")
            if answer.status >= 300:
                raise Failure(f"http {answer.status}", transient=answer.status in _TRANSIENT_STATUS)
            if (answer.content_length or 0) > limits.max_bytes:
                raise Failure("too many bytes")
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > limits.max_bytes:
                    raise Failure("too many bytes")
            announced = announces_end(answer.headers)
        return b"".join(pieces) if announced else Unannounced(b"".join(pieces))

    def _connector(self, url: str, guarded: bool) -> TCPConnector:
        """Make connections to any host, or only to public addresses (of a URL behind a proxy its host is checked)."""
        from aiohttp import TCPConnector
        from aiohttp.resolver import ThreadedResolver

        class PublicResolver(ThreadedResolver):
            async def resolve(self, *arguments: Any, **options: Any) -> Any:
                addresses = await super().resolve(*arguments, **options)
                if not all(_is_public(entry["host"]) for entry in addresses):
                    raise Failure(_PRIVATE)
                return addresses

        host = urlsplit(url).hostname or ""
        if guarded and (host == "localhost" or not _is_public(host)):
            raise Failure(_PRIVATE)
        proxied = urlsplit(url).scheme in getproxies() and not proxy_bypass(host)
        resolver = PublicResolver() if guarded and not proxied else ThreadedResolver()
        return TCPConnector(resolver=resolver)


def _is_public(host: str) -> bool:
    """Return whether a host is a name, or an address in the public network."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return True
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_global and not address.is_multicast


def _explained(error: BaseException) -> Failure | None:
    """Translate an exception of the network into a Failure.

    Returns:
        None for a bug in this program, or too many open files.
    """
    import aiohttp

    cause = getattr(error, "os_error", error)  # of aiohttp's errors of connecting
    if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
        return None
    if isinstance(cause, socket.gaierror):
        again = cause.errno == socket.EAI_AGAIN
        return Failure("no answer on the host's name" if again else "unknown host", transient=again)
    kinds: tuple[tuple[Any, str, bool], ...] = (  # the first that fits counts
        ((TimeoutError, asyncio.TimeoutError), "timed out", True),
        (
            (aiohttp.ClientConnectorCertificateError, ssl.SSLCertVerificationError),
            "bad certificate",
            False,
        ),
        ((aiohttp.ClientSSLError, ssl.SSLError), "tls error", False),
        (aiohttp.ClientPayloadError, "cut off", True),
        ((aiohttp.InvalidURL, ValueError), "not a web address", False),
        ((aiohttp.ServerConnectionError, ConnectionError), "connection refused or lost", True),
        (aiohttp.ClientResponseError, "not http", True),
        ((aiohttp.ClientError, OSError), "network error", True),
    )
    failures = (
        Failure(why, transient=again)
        for kind, why, again in kinds
        if isinstance(error, kind) or isinstance(cause, kind)
    )
    return next(failures, None)
