"""Official files as they are published: plain, gzipped, or in a zip or tar; read as streams, so that nothing is unpacked."""

from __future__ import annotations

import codecs
import errno
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, cast

import ijson

from open_clip_zerovl.core.errors import UserError

#: Errors of reading a broken archive: corrupt data, and entries that are encrypted or packed in a way that Python does not know
#: (RuntimeError).
BROKEN_ARCHIVE = (
    EOFError,
    RuntimeError,
    gzip.BadGzipFile,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
)


def members(path: Path) -> list[str]:
    """Names of the files in a zip or tar; for any other file its own name, without `.gz`.

    Raises:
        UserError: a broken archive.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return [name for name in archive.namelist() if not name.endswith("/")]
        if _is_tar(path):
            with tarfile.open(path) as tar:
                return [member.name for member in tar if member.isfile()]
    except (zipfile.BadZipFile, tarfile.TarError, OSError, EOFError) as error:
        raise UserError(f"{path} is a broken archive ({error}): fetch it again.") from error
    return [path.name.removesuffix(".gz")]


def _is_tar(path: Path) -> bool:
    return ".tar" in path.name or path.suffix == ".tgz"


def find_member(paths: Iterable[Path], *endings: str) -> tuple[Path, str] | None:
    """(path, name) of the first file, or member of an archive, whose name has one of the endings; None if there is none."""
    for path in paths:
        if path.is_file():
            for name in members(path):
                if name.lower().endswith(endings) and "__MACOSX" not in name:
                    return path, name
    return None


@contextmanager
def open_member(path: Path, name: str) -> Iterator[IO[bytes]]:
    """A file, or one member of an archive, as a stream of its plain bytes.

    Raises:
        UserError: the archive is broken; also raised while it is read.
    """
    with ExitStack() as stack:
        try:
            if zipfile.is_zipfile(path):
                yield stack.enter_context(stack.enter_context(zipfile.ZipFile(path)).open(name))
            elif _is_tar(path):
                handle = stack.enter_context(tarfile.open(path)).extractfile(name)
                assert handle is not None  # `members` lists files only
                yield stack.enter_context(handle)
            elif path.suffix == ".gz":
                yield stack.enter_context(cast(IO[bytes], gzip.GzipFile(path)))
            else:
                yield stack.enter_context(open(path, "rb"))
        except BROKEN_ARCHIVE as error:
            raise UserError(f"{path} is broken or encrypted ({error}): fetch it again.") from error
        except OSError as error:
            if error.errno != errno.EINVAL:  # a zip whose directory points before its beginning
                raise
            raise UserError(f"{path} is broken ({error.strerror}): fetch it again.") from error


def json_array(stream: IO[bytes], name: str, *, key: str | None = None) -> Iterator[Any]:
    """The elements of a long JSON array, one at a time.

    Args:
        stream: the document, UTF-8; one that can seek.
        name: its name in messages.
        key: of the outermost object, under which the array stands; None where the document itself is the array.

    Raises:
        UserError: the document is not JSON, ends early, or has no elements at this place.
    """
    if stream.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        stream.seek(0)
    found = False
    try:
        for element in ijson.items(stream, "item" if key is None else f"{key}.item", use_float=True):
            found = True
            yield element
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise UserError(
            f"{name} cannot be read as JSON ({' '.join(str(error).split())}): give the whole file."
        ) from error
    if not found:
        place = "a list" if key is None else f"a list under {key!r}"
        raise UserError(f"{name} has no elements in {place}: give the official file.")
