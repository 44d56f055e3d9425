"""A temporary folder of a process with children, below TMPDIR; those of processes that were killed are removed by the next one.

Python's multiprocessing and torchrun keep sockets and files in the temporary folder, which they remove when they end by
themselves. torch's cache of compiled code stays where it is.
"""

from __future__ import annotations

import atexit
import contextlib
import getpass
import os
import re
import shutil
import tempfile
from pathlib import Path

from open_clip_zerovl.core.files import SCRATCH_LOCK, lock_file, remove_scratch_folders

PREFIX = "zerovl-run-"
LONGEST = 55  # bytes of TMPDIR: the path of a socket has at most 107, of which 52 follow (multiprocessing's listeners)


def use_scratch_folder() -> None:
    """Make this process and those that it starts use a temporary folder of their own, which is removed at exit."""
    place = Path(tempfile.gettempdir())
    # made by the process that started this one
    if place.name.startswith(PREFIX) or len(os.fsencode(place)) > LONGEST:
        return
    remove_scratch_folders(place, PREFIX)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock_file(folder / SCRATCH_LOCK, create=True, forked=False)
    except OSError:  # a full disk, a file system without locks
        return
    # a user without a name; as torch itself names its cache
    with contextlib.suppress(OSError, KeyError):
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place / f"torchinductor_{user}"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    atexit.register(_remove, folder, os.getpid())


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
