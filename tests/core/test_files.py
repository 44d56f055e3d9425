"""Files: old content or new, whatever fails, and no leftovers; locks; a folder is claimed for one request; digests."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import (
    atomic_file,
    claim,
    digest_of,
    lock_file,
    locked,
    number_of,
    save_atomically,
    scratch_folder,
    write_atomically,
)


@contextmanager
def largest_file(size_bytes):
    """Within the block, writing past this size fails with an OSError, as on a full disk."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)


def write_text(path):
    write_atomically(path, "x" * 100_000)


def save_tensor(path):
    save_atomically({"a": torch.zeros(100_000)}, path)


def save_arrays(path):
    with atomic_file(path) as file:
        np.savez(file, a=np.arange(100_000))


@pytest.mark.parametrize("write", [write_text, save_tensor, save_arrays])
def test_a_full_disk_keeps_the_former_file_and_gives_a_sentence(tmp_path, write):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with (
        largest_file(4096),
        pytest.raises(UserError, match=r"file cannot be written \(File too large\).*is kept"),
    ):
        write(target)
    assert target.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    write(target)
    assert len(target.read_bytes()) > 4096 and os.listdir(tmp_path) == ["file"]


def test_an_error_in_the_block_is_itself_and_writes_nothing(tmp_path):
    with pytest.raises(KeyError, match="mine"), atomic_file(tmp_path / "a" / "file") as file:
        file.write(b"half")
        raise KeyError("mine")
    assert os.listdir(tmp_path / "a") == []


def test_permissions_are_those_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        save_tensor(tmp_path / "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_the_next_write_removes_what_killed_processes_left_and_nothing_that_is_being_written(
    tmp_path, monkeypatch
):
    """Up to the moment in which the file gets its name."""

    def replace(scratch, target):
        monkeypatch.undo()
        write_atomically(target, "third")
        os.replace(scratch, target)

    (tmp_path / ".a.1.00000000.part").touch()
    with atomic_file(tmp_path / "a"):
        write_atomically(tmp_path / "a", "second")
        assert len(list(tmp_path.glob(".a.*.part"))) == 1
        monkeypatch.setattr(os, "replace", replace)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_scratch_folder_is_removed_by_the_next_one_once_its_process_has_ended(tmp_path):
    killed = "import os, sys; from open_clip_zerovl.core.files import scratch_folder\n"
    killed += "with scratch_folder(sys.argv[1], 'x-'): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    with scratch_folder(tmp_path, "x-") as folder:
        assert not left.exists()
        subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
        assert folder.exists() and len(list(tmp_path.iterdir())) == 2  # it is in use


# ---------------------------------------------------------------------------------------------------------------------
# Locks
# ---------------------------------------------------------------------------------------------------------------------


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


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def without_locks(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    write_atomically(tmp_path / "file", "is written all the same")
    with pytest.raises(UserError, match=f"of {tmp_path} has no locks .*--cache"), locked(tmp_path):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# Claims and digests
# ---------------------------------------------------------------------------------------------------------------------

REQUEST = {
    "--seed": 1, "--set lr": "1e-3", "--lora": None, "alphas": [0, 1], "content of x": "ab", "--data": "x=/d",
    "content of --data": "ab", "content of --from": None, "--from": "m",
}  # fmt: skip
CHANGES = [
    ({"--seed": 2}, "out was begun with --seed 1, and this call has --seed 2; repeat the"),
    ({"--set lr": None}, "with --set lr=1e-3, and this call has no --set lr"),
    ({"alphas": [0, 0.5]}, "with alphas 1, and this call has alphas 0.5"),
    ({"more": "x"}, "with no more, and this call has more x"),
    ({"content of x": "cd"}, "was begun before the content of x changed"),
    ({"content of --data": "cd", "--data": "y"}, "with --data x=/d, and this call has --data y"),
    ({"content of --data": None, "--data": "y"}, "with --data x=/d, and this call has --data y"),
    ({"--from": "n"}, "with --from m, and this call has --from n"),  # nothing is known of either
]


def test_the_same_request_goes_on_and_another_one_may_replace_nothing(tmp_path):
    """Content decides, not its path: a copy is the same request."""
    file = tmp_path / "out" / "request.json"
    assert not claim(file, REQUEST) and claim(file, dict(reversed(REQUEST.items())))
    assert claim(file, {**REQUEST, "--data": "y=/e"}) == REQUEST
    for changed, words in CHANGES:
        before = file.read_bytes()
        with pytest.raises(UserError, match=words):
            claim(file, {**REQUEST, **changed})
        assert file.read_bytes() == before
        assert not claim(file, {**REQUEST, **changed}, restart=lambda stored: stored == REQUEST)
        assert claim(file, {**REQUEST, **changed})
        assert not claim(file, REQUEST, restart=lambda stored: True)


def test_a_folder_of_other_files_is_not_claimed(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / ".request.json.1.ab.part").touch()
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="holds thesis.txt and no request.json"):
        claim(tmp_path / "request.json", REQUEST)
    (tmp_path / "thesis.txt").unlink()
    assert not claim(tmp_path / "request.json", REQUEST)


def test_a_digest_divides_its_parts_and_knows_bytes_from_text():
    parts = [("ab", "c"), ("a", "bc"), (["ab", "c"],), (b"ab", b"c"), (b"abc",), (1, 2), (12,)]
    assert len({digest_of(*one) for one in parts}) == len(parts)
    assert digest_of(np.arange(3)) == digest_of(np.arange(3).tobytes()) != digest_of(np.arange(4))
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert number_of("f" * 32) == -1 and number_of("0" * 32) == 1 and number_of("7f" + "0" * 14) > 0
