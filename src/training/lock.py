"""A lock on a run's folder, so that one process at a time writes into it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from open_clip_zerovl.core.errors import UserError

LOCK = ".lock"
WAIT_SECONDS = 15.0  # for the earlier process to end when a launcher starts a run again


class RunLock:
    """A lock on a run's folder. The system releases it when the process ends, in whatever way.

    Loader workers, which are forks of the process, do not hold it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / LOCK
        self._file: int | None = None

    def acquire(self, wait_seconds: float = WAIT_SECONDS) -> None:
        """Take the lock. On a file system without locks this is logged, and the run goes on without.

        Raises:
            UserError: another process holds it for longer than `wait_seconds`, or the folder cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"the run's folder {self.path.parent} cannot be written ({error.strerror})") from error
        deadline, said = time.monotonic() + wait_seconds, False
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    logging.warning(
                        f"{self.path} cannot be locked ({error.strerror}); make sure that no other process trains this run."
                    )
                    break
                holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "unknown"
                if time.monotonic() > deadline:
                    os.close(file)
                    raise UserError(
                        f"another process ({holder}) is training the run in {self.path.parent}; wait for it, stop it, or "
                        "choose another --name"
                    ) from error
                if not said:
                    logging.warning(f"Waiting for the process that trains in {self.path.parent} ({holder}) to end.")
                    said = True
                time.sleep(0.2)
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._file = file

    def release(self) -> None:
        """Release the lock before the process ends."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
