"""One process at a time writes into a run's folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from open_clip_zerovl.errors import UserError

LOCK = ".lock"
WAIT_SECONDS = 15.0  # for a run that is just ending, when a launcher starts it again


class RunLock:
    """A lock on a run's folder; the system gives it back when the process that holds it ends, however it ends.

    Loader workers, which are forks, do not hold it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / LOCK
        self._file: int | None = None

    def acquire(self, wait_seconds: float = WAIT_SECONDS) -> None:
        """Take the lock; on a file system that knows none, say so and go on without.

        Raises:
            UserError: another process has it and keeps it, or the folder cannot be written.
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
                        f"{self.path} cannot be locked ({error.strerror}); make sure that this run is alone."
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
        """Give the lock back before the process ends."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
