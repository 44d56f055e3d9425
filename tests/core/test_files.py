"""Atomic writes: old content or new, whatever fails; no leftovers; ordinary permissions."""

import os
import resource
import stat
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import (
    atomic_file,
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


def test_an_impossible_path_gives_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"nothing was written"):
        write_atomically(tmp_path / "file" / "below", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"folder cannot be written \(Is a directory\)"):
        write_atomically(tmp_path / "folder", "x")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_permissions_are_those_of_any_new_file(tmp_path):
    save_tensor(tmp_path / "a")
    kept = os.umask(0o027)
    try:
        save_tensor(tmp_path / "b")
    finally:
        os.umask(kept)
    (tmp_path / "c").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "abc"]
    assert modes == [modes[2], 0o640, modes[2]]


def test_scratch_of_killed_processes_is_removed_and_that_of_other_files_kept(tmp_path):
    killed = "import os, sys; from open_clip_zerovl.core.files import atomic_file\n"
    killed += "with atomic_file(sys.argv[1]): os.kill(os.getpid(), 9)"
    for name in ("a[1].json", "a1.json"):
        subprocess.run([sys.executable, "-c", killed, str(tmp_path / name)], check=False)
    assert len(list(tmp_path.glob(".*.part"))) == 2
    write_atomically(tmp_path / "a[1].json", "x")
    (left, _) = sorted(file.name for file in tmp_path.iterdir())
    assert left.startswith(".a1.json.")


def test_the_next_write_removes_what_killed_processes_left_and_nothing_that_is_being_written(
    tmp_path,
):
    (tmp_path / ".a.1.00000000.part").touch()
    with atomic_file(tmp_path / "a"):
        write_atomically(tmp_path / "a", "second")
        assert len(list(tmp_path.glob(".a.*.part"))) == 1
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
