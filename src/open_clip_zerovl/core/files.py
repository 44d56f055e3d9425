"""Files that are written whole or not at all: under another name first, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
import stat
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from open_clip_zerovl.core.errors import UserError, first_line, nearest

if TYPE_CHECKING:  # numpy loads slowly; a command line gets its error messages without it
    import numpy as np

#: Errors that numpy, torch, zipfile and pickle raise on wrong or truncated bytes, besides `pickle.UnpicklingError`, with which
#: torch refuses a file that could run code.
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    EOFError,
    TypeError,
    AttributeError,
    AssertionError,
    RuntimeError,  # NotImplementedError and RecursionError are some
    SyntaxError,
    ArithmeticError,
    MemoryError,  # of a tensor that claims to be larger than the machine
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,  # of numpy, on a damaged header
)

# Errors of the disk itself, which torch turns into RuntimeErrors.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a binary file that takes the name `path` when the block ends without an error.

    A reader sees the old content or the new one, never a part, even when the process is killed or the machine loses power. The
    content is first written beside its destination, as `.NAME.PROCESS.RANDOM.part`; such files that killed processes have left
    are removed. Missing folders are made. The file gets the permissions of any new file (0666 less the umask).

        with atomic_file("a/b.npz") as file:
            np.savez(file, x=x)

    Raises:
        UserError: the file cannot be written (full disk, read-only folder ...). An old file is kept.
    """
    target = Path(os.path.realpath(path))  # a link stays a link: its target is replaced
    # a device or a pipe is written to, not replaced
    if target.exists() and not target.is_file() and not target.is_dir():
        with open(target, "wb") as file:
            yield file
        return
    scratch = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_scratch(target)
        place = _locked_if_possible(scratch)
    except OSError as error:
        raise _refused(path, error) from error
    try:
        with open(place, "wb", 1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # so that the renamed file is not empty after a power cut
        os.replace(scratch, target)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None and (cause.errno in _DISK or cause.filename == os.fspath(scratch)):
            raise _refused(path, cause) from error
        raise
    finally:
        scratch.unlink(missing_ok=True)


def _locked_if_possible(scratch: Path) -> int | Path:
    """Lock a new file for `remove_scratch`, or return its path where the file system has no locks."""
    try:
        return cast(int, lock_file(scratch, create=True))
    except UserError:
        return scratch


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file's content by `atomic_file`, with its UserError, text as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def remove_scratch(path: str | os.PathLike[str]) -> None:
    """Remove what `atomic_file` has left beside `path` in processes that were killed and hold no lock."""
    target = Path(os.path.realpath(path))
    _remove_unlocked(target.parent, f".{glob.escape(target.name)}.*.part")


def _remove_unlocked(place: Path, pattern: str) -> None:
    for scratch in place.glob(pattern):
        with contextlib.suppress(
            OSError, UserError
        ):  # another user's, or a file system without locks
            if (descriptor := lock_file(scratch, wait=False)) is not None:
                if scratch.is_dir():
                    shutil.rmtree(scratch, ignore_errors=True)
                scratch.unlink(missing_ok=True)
                os.close(descriptor)


@contextlib.contextmanager
def scratch_folder(place: str | os.PathLike[str], prefix: str) -> Iterator[Path]:
    """Make a temporary folder for the block, which the next one with this prefix removes where its process was killed."""
    _remove_unlocked(Path(place), f"{glob.escape(prefix)}*.part")
    with tempfile.TemporaryDirectory(prefix=prefix, suffix=".part", dir=place) as folder:
        held = None
        with contextlib.suppress(OSError, UserError):  # a file system without locks
            held = lock_file(folder)
        try:
            yield Path(folder)
        finally:
            if held is not None:
                os.close(held)


def save_atomically(content: Any, path: str | os.PathLike[str], **options: Any) -> None:
    """Save as `torch.save(content, path, **options)` does by `atomic_file`, with its UserError."""
    # Not torch.save: while open_clip's main runs, that name is this function (training/hooks.py).
    from torch.serialization import save

    with atomic_file(path) as file:
        save(content, file, **options)


def lock_file(
    path: str | os.PathLike[str], *, shared: bool = False, wait: bool = True, create: bool = False
) -> int | None:
    """Return a descriptor that holds a lock on a file or folder until it is closed or the process ends, in whatever way.

    Forks of this process hold the lock too, until they end.

    Args:
        shared: several processes may hold the lock together, instead of one alone.
        wait: for processes that hold it.
        create: the file if it is absent.

    Returns:
        None if there is no file, or, without `wait`, if another process holds the lock.

    Raises:
        OSError: the file cannot be opened.
        UserError: its file system has no locks.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    mode = os.O_RDONLY if shared or os.path.isdir(path) else os.O_RDWR
    while True:
        try:
            descriptor = os.open(path, mode | (os.O_CREAT if create else 0), 0o666)
        except FileNotFoundError:
            if create:  # its folder is absent
                raise
            return None
        try:
            fcntl.flock(descriptor, kind)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
            folder = os.path.dirname(os.path.abspath(path))
            raise UserError(
                f"the file system of {folder} has no locks ({error.strerror}): give a folder on a local disk (--cache, --out)"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the file was renamed or removed before it was locked


@contextlib.contextmanager
def locked(
    folder: str | os.PathLike[str], *, name: str = "lock", busy: str | None = None
) -> Iterator[None]:
    """Let one process at a time into the block, with a lock that ends with its process.

    Args:
        name: the locked file's name in the folder.
        busy: the sentence for a lock that another process holds; None waits for it.

    Raises:
        UserError: `busy`.
        OSError: the folder cannot be made or written.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = lock_file(Path(folder, name), wait=busy is None, create=True)
    if descriptor is None:
        raise UserError(busy or "")
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], remedy: str = "give a whole file") -> Iterator[None]:
    """Name the file in the errors of a block that reads it: those of its content do not name it.

    Args:
        remedy: the end of the sentence.

    Raises:
        UserError: the content cannot be read.
        OSError: the file cannot be opened.
    """
    try:
        yield
    except (OSError, UserError) as error:
        if isinstance(error, UserError) or error.filename is not None:
            raise
        raise UserError(f"{path} cannot be read ({first_line(error)}); {remedy}") from error
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # of a GPU that is to hold the content
            raise
        raise UserError(f"{path} cannot be read ({first_line(error)}); {remedy}") from error


def read_json(path: str | os.PathLike[str], remedy: str = "give a whole file") -> Any:
    """Read a JSON file, with the errors of `reading`."""
    with reading(path, remedy):
        return json.loads(Path(path).read_text(encoding="utf-8"))


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read the arrays of an `.npz` by name, without opening a pickle in it.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read, with the reason.
    """
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise
    except UNREADABLE as error:
        raise ValueError(first_line(error)) from error


@contextlib.contextmanager
def regular_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open an existing file for reading, but no pipe, which might never be written to, and no device, which might never end.

    Raises:
        OSError: as `open`, and for a path that is not a regular file.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(
                errno.EINVAL,
                "it is not a regular file but a pipe, a device or a folder",
                os.fspath(path),
            )
        yield file


def check_writable(path: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Check before a long computation that its result can be written, and make nothing.

    Args:
        folder: the result is a folder with files.

    Raises:
        UserError: it cannot be written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not folder and not target.is_file() and not target.is_dir():
        return  # a device or a pipe
    try:
        if target.exists() and target.is_dir() != folder:
            wrong = errno.ENOTDIR if folder else errno.EISDIR
            raise OSError(wrong, os.strerror(wrong))
        with tempfile.TemporaryFile(dir=_existing(target if folder else target.parent)) as scratch:
            scratch.write(b"x")
    except OSError as error:
        raise _refused(path, error) from error


def _existing(folder: Path) -> Path:
    """Return the nearest existing path at or above a folder."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def user_cache(name: str) -> Path:
    """Return a program's folder in the user's cache, for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / name


def free_space(folder: str | os.PathLike[str]) -> tuple[Path, int]:
    """Return the nearest existing folder at or above `folder`, and the free bytes of its disk."""
    place = _existing(Path(folder).absolute())
    return place, shutil.disk_usage(place).free


def did_you_mean(path: str | os.PathLike[str], otherwise: str = "") -> str:
    """End a sentence on a path that does not exist with the path that was meant.

    Args:
        otherwise: the end if no entry of the path's folder has a similar name.
    """
    path = Path(path).expanduser()
    try:
        names = os.listdir(path.parent)
    except OSError:
        return otherwise
    similar = nearest(path.name, names, cutoff=0.7)
    return otherwise if similar is None else f"; did you mean {path.with_name(similar)}?"


def _refused(path: str | os.PathLike[str], error: OSError) -> UserError:
    state = "the former file is kept" if os.path.exists(path) else "nothing was written"
    return UserError(
        f"{path} cannot be written ({error.strerror or error}); {state}: make room, or choose another place"
    )
