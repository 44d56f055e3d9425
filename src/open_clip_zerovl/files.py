"""Files written whole or not at all: under another name first, then renamed."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from open_clip_zerovl.errors import UserError


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """An open binary file that takes the name `path` when the block ends without an error.

    A reader sees the old content or the new one, never a part, also when the process is killed or the machine loses power.
    The content is written beside its destination, as `.NAME.PROCESS.RANDOM.part`; folders are made as needed. The file gets
    the permissions of any new file (0666 less the umask).

        with atomic_file("a/b.npz") as file:
            np.savez(file, x=x)

    Raises:
        UserError: the file cannot be written, because the disk is full or the folder is read-only, for instance. What was
            there before is kept.
    """
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        raw = _Scratch(scratch, "xb")
    except OSError as error:
        raise _refused(target, error) from error
    try:
        with io.BufferedWriter(raw, 1 << 20) as file:
            yield cast(BinaryIO, file)
            file.flush()
            raw.sync()
        with raw.noting_failure():
            os.replace(scratch, target)
    except BaseException as error:
        # A writer in between may have made something else of the failure: torch says RuntimeError on a full disk.
        if raw.failure is not None and isinstance(error, Exception):
            raise _refused(target, raw.failure) from error
        raise
    finally:
        scratch.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file's whole content, see `atomic_file`. Text is UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def save_atomically(content: Any, path: str | os.PathLike[str], **options: Any) -> None:
    """`torch.save(content, path, **options)`, see `atomic_file`."""
    # Not torch.save: while open_clip's main runs, that name leads here (training/seams.py).
    from torch.serialization import save

    with atomic_file(path) as file:
        save(content, file, **options)


class _Scratch(io.FileIO):
    """A file that remembers why writing to it failed."""

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
        """Bring the content to the disk, so that a renamed file is not empty after a power cut."""
        with self.noting_failure():
            os.fsync(self.fileno())


def _refused(target: Path, error: OSError) -> UserError:
    kept = "what was there before is kept" if target.exists() else "nothing was written"
    return UserError(
        f"{target} cannot be written ({error.strerror or error}); {kept}: make room, or choose another place"
    )
