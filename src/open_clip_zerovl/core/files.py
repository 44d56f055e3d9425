"""Files that are written whole or not at all: under another name first, then renamed."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import getpass
import glob
import io
import json
import os
import re
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

SCRATCH_LOCK = (
    "lock"  # in a temporary folder; held by the process that made it, as long as it lives
)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """An open binary file that takes the name `path` when the block ends without an error.

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
        try:
            raw = _Scratch(cast(int, lock_file(scratch, create=True)), "wb")
        except OSError:  # also of a file system without locks
            raw = _Scratch(scratch, "wb")
    except OSError as error:
        raise _refused(path, error) from error
    try:
        with io.BufferedWriter(raw, 1 << 20) as file:
            yield cast(BinaryIO, file)
            file.flush()
            raw.sync()
        with raw.noting_failure():
            os.replace(scratch, target)
    except BaseException as error:
        # The writer may have turned the failure into another error: torch raises RuntimeError on a full disk.
        if raw.failure is not None and isinstance(error, Exception):
            raise _refused(path, raw.failure) from error
        raise
    finally:
        scratch.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file's content by `atomic_file`; UserError as there. Text is written as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def remove_scratch(path: str | os.PathLike[str]) -> None:
    """Remove what `atomic_file` has left beside `path` in processes that were killed; a living process locks its file."""
    target = Path(os.path.realpath(path))
    for scratch in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        with contextlib.suppress(OSError):  # another user's
            if (descriptor := lock_file(scratch, wait=False)) is not None:
                scratch.unlink(missing_ok=True)
                os.close(descriptor)


@contextlib.contextmanager
def scratch_folder(place: str | os.PathLike[str], prefix: str) -> Iterator[Path]:
    """A temporary folder in `place` for the block; the next one with this prefix removes it where its process was killed."""
    remove_scratch_folders(Path(place), prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as folder:
        descriptor = None
        with contextlib.suppress(OSError):  # a file system without locks
            descriptor = lock_file(Path(folder, SCRATCH_LOCK), create=True, forked=False)
        try:
            yield Path(folder)
        finally:
            if descriptor is not None:
                os.close(descriptor)


def remove_scratch_folders(place: Path, prefix: str) -> None:
    """Remove temporary folders whose process, which locks their file SCRATCH_LOCK, has ended without removing them."""
    for lock in place.glob(f"{glob.escape(prefix)}*/{SCRATCH_LOCK}"):
        with contextlib.suppress(OSError):  # another user's
            if (descriptor := lock_file(lock, wait=False, forked=False)) is not None:
                shutil.rmtree(lock.parent, ignore_errors=True)
                os.close(descriptor)


def save_atomically(content: Any, path: str | os.PathLike[str], **options: Any) -> None:
    """`torch.save(content, path, **options)` by `atomic_file`; UserError as there."""
    # Not torch.save: while open_clip's main runs, that name is this function (training/hooks.py).
    from torch.serialization import save

    with atomic_file(path) as file:
        save(content, file, **options)


def lock_file(
    path: str | os.PathLike[str],
    *,
    shared: bool = False,
    wait: bool = True,
    create: bool = False,
    forked: bool = True,
) -> int | None:
    """A descriptor of a file that holds a lock on it, until the descriptor is closed or the process ends, in whatever way.

    Args:
        shared: several processes may hold the lock together, instead of one alone.
        wait: for processes that hold it.
        create: the file if it is absent.
        forked: forks of this process hold the lock too, until they end; False: they do not (an exclusive lock only).

    Returns:
        None if there is no file, or, without `wait`, if another process holds the lock.

    Raises:
        OSError: the file cannot be opened.
        UserError: its file system has no locks.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        try:
            descriptor = os.open(
                path, os.O_RDONLY if shared else os.O_RDWR | (os.O_CREAT if create else 0), 0o666
            )
        except FileNotFoundError:
            if create:  # its folder is absent
                raise
            return None
        try:
            (fcntl.flock if forked else fcntl.lockf)(descriptor, kind)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except (BlockingIOError, PermissionError):  # lockf may give either for a lock that is held
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
    """One process at a time in the block; the folder is made if absent. The lock ends with the process that holds it.

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
    """The content of a JSON file. Errors as `reading`."""
    with reading(path, remedy):
        return json.loads(Path(path).read_text(encoding="utf-8"))


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` by name, read whole; no pickle in it is opened.

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
    """An existing file, open for reading. A pipe might never be written to, and a device might never end: both are refused.

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


class _Scratch(io.FileIO):
    """A file that keeps the error with which writing to it failed."""

    failure: OSError | None = None

    @contextlib.contextmanager
    def noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise

    def write(self, data: Any, /) -> int:
        with self.noting_failure():
            return super().write(data)

    def sync(self) -> None:
        """Flush the content to the disk, so that the renamed file is not empty after a power cut."""
        with self.noting_failure():
            os.fsync(self.fileno())


def check_writable(path: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Check before a long computation that its result can be written. Nothing is made.

    Args:
        folder: the result is a folder with files.

    Raises:
        UserError: it cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
        if folder and target.exists() and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not folder and target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not folder and target.exists() and not target.is_file():
            return  # a device or a pipe
        place = target if folder else target.parent
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place) as scratch:
            scratch.write(b"x")
    except OSError as error:
        raise _refused(path, error) from error


def user_cache(name: str) -> Path:
    """A program's folder in the user's cache, for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / name


def free_space(folder: str | os.PathLike[str]) -> tuple[Path, int]:
    """The nearest existing folder at or above `folder`, and the free bytes of its disk."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    return place, shutil.disk_usage(place).free


def did_you_mean(path: str | os.PathLike[str], otherwise: str = "") -> str:
    """A sentence's end for a path that does not exist: "; did you mean PATH?".

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


RUN_PREFIX = "zerovl-run-"
LONGEST_TMPDIR = 55  # bytes of TMPDIR: the path of a socket has at most 107, of which 52 follow (multiprocessing's listeners)


def use_scratch_folder() -> None:
    """Make this process and those that it starts use a temporary folder of their own, which is removed at exit."""
    place = Path(tempfile.gettempdir())
    # made by the process that started this one
    if place.name.startswith(RUN_PREFIX) or len(os.fsencode(place)) > LONGEST_TMPDIR:
        return
    remove_scratch_folders(place, RUN_PREFIX)
    try:
        folder = Path(tempfile.mkdtemp(prefix=RUN_PREFIX))
        lock_file(folder / SCRATCH_LOCK, create=True, forked=False)
    except OSError:  # a full disk, a file system without locks
        return
    # a user without a name; as torch itself names its cache
    with contextlib.suppress(OSError, KeyError):
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place / f"torchinductor_{user}"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    atexit.register(_remove_own, folder, os.getpid())


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
