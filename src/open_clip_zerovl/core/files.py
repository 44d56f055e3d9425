"""Files that are written whole or not at all, locks, digests, and claims of folders.

A file is written under another name first, then renamed. What a file holds decides, not its path or time.

OUT/pack.json, OUT/request.json ...      the request for which a folder was begun, as JSON

A later call with the same request goes on; another one is refused. An input stands in a request by its path and by a digest of
its content, `--data` and "content of --data". The content decides: a copy at another path is the same request, and other
content at the same path is another one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from open_clip_zerovl.core.errors import UserError, first_line

if TYPE_CHECKING:  # numpy loads slowly; a command line gets its error messages without it
    import numpy as np

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
    place: int | Path | None = scratch
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_unlocked(target.parent, f".{glob.escape(target.name)}.*.part")
        with contextlib.suppress(UserError):  # a file system without locks
            place = lock_file(scratch, create=True)
    except OSError as error:
        raise _refused(path, error) from error
    try:
        with open(cast("int | Path", place), "wb", 1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # so that the renamed file is not empty after a power cut
            os.replace(scratch, target)  # under the lock: another writer removes what nobody holds
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None and (cause.errno in _DISK or cause.filename == os.fspath(scratch)):
            raise _refused(path, cause) from error
        raise
    finally:
        scratch.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file's content by `atomic_file`, with its UserError, text as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _remove_unlocked(place: Path, pattern: str) -> None:
    """Remove what killed processes, which hold no lock, have left."""
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
    """Read the arrays of an `.npz` by name, without opening a pickle in it, with the errors of `reading`."""
    import numpy as np

    with reading(path, "it is made again"), np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


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


def _refused(path: str | os.PathLike[str], error: OSError) -> UserError:
    state = "the former file is kept" if os.path.exists(path) else "nothing was written"
    return UserError(
        f"{path} cannot be written ({error.strerror or error}); {state}: make room, or choose another place"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Digests and claims
# ---------------------------------------------------------------------------------------------------------------------

CONTENT = "content of "  # begins the names of entries that are digests, which nobody can read
ADVICE = "repeat the earlier call to continue it, or give a new folder"
# A file that was written later than this before its digest may be written again without another time.
_SETTLED_NS = 2 * 10**9


def digest_of(*parts: Any) -> str:
    """Hash bytes (or arrays of numbers) and values of JSON to 32 hexadecimal digits."""
    return digest_of_all(parts)


def digest_of_all(parts: Iterable[Any]) -> str:
    """Hash as `digest_of` does, with parts that are read one by one."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, bytes | bytearray | memoryview) or hasattr(part, "tobytes"):
            plain = isinstance(part, bytes | bytearray | memoryview)
            content = memoryview(part if plain else part.tobytes())
        else:
            content = memoryview(json.dumps(part, sort_keys=True).encode())
        digest.update(f"{len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def number_of(digest: str) -> int:
    """Convert the first 64 bits of a digest to a signed number that is not 0."""
    number = int(digest[:16], 16)
    return number - (number >> 63 << 64) or 1


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Digest a file by SHA-256, read in pieces.

    Raises:
        OSError: as `regular_file`.
    """
    digest = hashlib.sha256()
    with regular_file(path) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def file_digests(files: Iterable[str | os.PathLike[str]]) -> dict[str, str | None]:
    """Digest the bytes of each file, and read a file again only after it has changed.

    The user's cache has the digests of each folder's files with their sizes, times of change and inodes. Without a cache that
    can be written each call reads all files.

    Returns:
        File -> SHA-256; None for a file that cannot be read.
    """
    by_folder: dict[str, list[str]] = defaultdict(list)
    for file in dict.fromkeys(os.fspath(file) for file in files):
        by_folder[os.path.dirname(os.path.abspath(file))].append(file)
    digests: dict[str, str | None] = {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        for folder, in_folder in by_folder.items():
            digests.update(_digests_in(folder, in_folder, pool))
    return digests


def _digests_in(folder: str, files: list[str], pool: ThreadPoolExecutor) -> dict[str, str | None]:
    """Digest files of one folder."""
    cache_file = user_cache("open_clip_zerovl") / "digests" / f"{digest_of(folder)}.json"
    known: dict[str, list[Any]] = {}
    with contextlib.suppress(OSError, ValueError):  # no cache, or a damaged one
        known = json.loads(cache_file.read_text(encoding="utf-8"))
    stamps = {file: _stamp(file) for file in files}
    digests: dict[str, str | None] = {
        file: known[os.path.basename(file)][-1]
        for file, stamp in stamps.items()
        if stamp == known.get(os.path.basename(file), [])[:-1]
    }
    changed = [file for file in files if file not in digests]
    if not changed:
        return digests
    from tqdm.auto import tqdm  # loads slowly

    settled = time.time_ns() - _SETTLED_NS
    read = pool.map(_digest_or_none, changed)
    words = f"checking {len(changed):,} files of {folder}"
    for file, new in zip(
        changed, tqdm(read, words, len(changed), delay=2, leave=False), strict=True
    ):
        digests[file] = new
        stamp = stamps[file]
        if new is not None and stamp is not None and max(stamp[1:3]) < settled:
            known[os.path.basename(file)] = [*stamp, new]
    with contextlib.suppress(UserError):  # a cache that cannot be written
        write_atomically(cache_file, json.dumps(known))
    return digests


def _stamp(file: str) -> list[int] | None:
    """Return size, times of modification and of change in ns, and inode, or None for a file that is not there."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return None
    # rsync and cp -p keep the modification time, and no program the time of change.
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _digest_or_none(file: str) -> str | None:
    try:
        return sha256_of(file)
    except (OSError, ValueError):
        return None


def claim(
    file: Path,
    request: Mapping[str, Any],
    *,
    restart: Callable[[dict[str, Any]], bool] = lambda stored: False,
) -> dict[str, Any] | None:
    """Claim a file's folder for a request.

    Args:
        file: holds the request; the folder has no others before it.
        restart: True if the stored request may be replaced, since nothing of worth was done for it.

    Returns:
        The request of the earlier call that has claimed it; None for a folder that is claimed now.

    Raises:
        UserError: a folder of other files, or begun for another request.
    """
    request = json.loads(json.dumps(request))
    stored = read_claim(file)
    if stored is None:
        # Beside the lock of this process and the leavings of a killed one.
        entries = file.parent.iterdir() if file.parent.is_dir() else ()
        others = [
            entry.name for entry in entries if entry.name != "lock" and entry.suffix != ".part"
        ]
        if others:
            raise UserError(
                f"{file.parent} holds {others[0]} and no {file.name}, so this program did not begin it; give a new folder"
            )
    elif difference(stored, request) is None:
        return stored
    elif not restart(stored):
        raise UserError(f"{file.parent} {difference(stored, request)}; {ADVICE}")
    write_atomically(file, json.dumps(request, indent=1) + "\n")
    return None


def read_claim(file: Path) -> dict[str, Any] | None:
    """Read the request in a file.

    Returns:
        None without the file.

    Raises:
        UserError: the file cannot be read.
    """
    if not file.exists():
        return None
    content = read_json(file, "remove it, or give a new folder")
    if not isinstance(content, dict):
        raise UserError(f"{file} was not written by this program; give a new folder")
    return content


def difference(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Word the first entry that differs as the rest of a sentence about what was begun.

    "was begun with --seed 1, and this call has --seed 0", "was begun before the content of --from changed"

    Returns:
        None for the same request.
    """
    for name in {**wanted, **stored}:
        old, new = stored.get(name), wanted.get(name)
        content = wanted.get(f"{CONTENT}{name}")
        copied = content is not None and content == stored.get(f"{CONTENT}{name}")
        if old == new or copied:
            continue
        if name.startswith(CONTENT):
            return f"was begun before the {name} changed"
        if isinstance(old, list) and isinstance(new, list):
            pairs = zip_longest(old, new)
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
        return f"was begun with {_shown(name, old)}, and this call has {_shown(name, new)}"
    return None


def _shown(name: str, value: Any) -> str:
    """Word an entry with its value, "no NAME" without one."""
    if value is None:
        return f"no {name}"
    text = value if isinstance(value, str) else json.dumps(value)
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return f"{name}{'=' if name.startswith('--set ') else ' '}{text}"
