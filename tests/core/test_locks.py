"""Locks on files, and calls with a time limit."""

import os
import threading
import time

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import lock_file, locked


def test_an_exclusive_lock_excludes_and_a_shared_one_shares(tmp_path):
    path = tmp_path / "file"
    assert lock_file(path, shared=True) is None and not path.exists()
    held = lock_file(path, create=True)
    assert lock_file(path, wait=False) is None and lock_file(path, shared=True, wait=False) is None
    os.close(held)
    both = [lock_file(path, shared=True, wait=False) for _ in range(2)]
    assert None not in both and lock_file(path, wait=False) is None
    for descriptor in both:
        os.close(descriptor)
    with pytest.raises(OSError, match="absent"):
        lock_file(tmp_path / "absent" / "file", create=True)


def test_a_file_that_was_replaced_while_waiting_is_locked_anew(tmp_path):
    path = tmp_path / "file"
    held = lock_file(path, create=True)
    found = []
    waiting = threading.Thread(target=lambda: found.append(lock_file(path)))
    waiting.start()
    time.sleep(0.2)
    (tmp_path / "new").touch()
    os.replace(tmp_path / "new", path)
    os.close(held)
    waiting.join(timeout=30)
    assert os.path.samestat(os.fstat(found[0]), os.stat(path))
    os.close(found[0])


def test_a_folder_is_locked_within_the_block(tmp_path):
    with (
        locked(tmp_path / "made"),
        pytest.raises(UserError, match="busy"),
        locked(tmp_path / "made", busy="busy"),
    ):
        pass
    with locked(tmp_path / "made", busy="busy"):
        pass
