"""Step checkpoints: which are deleted, which is found again, refusals; and that one process writes at a time."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import stat
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from open_clip_zerovl.checkpoints.loading import MODEL_ENTRY
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.retain import Decision
from open_clip_zerovl.sampling.schedule import Batching
from training.checkpointing import (
    LOCK,
    Position,
    lock_folder,
    newest_whole,
    remove_leftovers,
    require_room,
    save_step,
)
from training.params import parse
from training.run import TrainingRun
from training.train import require_finite


def write(folder: Path, name: str, *, cut: bool = False, flipped: bool = False) -> Path:
    path = folder / name
    torch.save({"epoch": 0, "state_dict": {"a": torch.arange(1000.0)}}, path)
    content = bytearray(path.read_bytes())
    if cut:
        content = content[:-50]
    if flipped:
        content[content.index(torch.arange(1000.0).numpy().tobytes()) + 2002] ^= 16
    path.write_bytes(content)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save(folder: Path, epoch: int, step: int, keep: int) -> None:
    args = argparse.Namespace(
        save_logs=True, checkpoint_path=str(folder), name="run", save_most_recent=False
    )
    model = torch.nn.Linear(2, 2)
    position = Position(epoch, step, Batching(8))
    save_step(args, model, torch.optim.AdamW(model.parameters()), None, position, {}, keep=keep)


@pytest.mark.parametrize(
    ("before", "saved", "keep", "after"),
    [
        # Step 20 of batches of 8 is step 10 of batches of 16: the checkpoint of step 12 is newer than that of step 20.
        (["epoch_1", "1:18", "1:20"], 12, 2, ["epoch_1", "1:12"]),
        (
            ["1:2", "1:8 cut"],
            4,
            1,
            ["1:4"],
        ),  # a cut file does not count, whether it is newer or older
        (["1:2", "1:8 cut"], 4, 2, ["1:2", "1:4"]),
        (["1:2", "1:4", "1:6 cut"], 8, 2, ["1:4", "1:6", "1:8"]),
    ],
)
def test_which_checkpoints_stay(tmp_path, before, saved, keep, after):
    def name(short: str) -> str:
        return f"step_0001_{int(short[2:]):08d}.pt" if short[:2] == "1:" else f"{short}.pt"

    for short in before:
        write(tmp_path, name(short.removesuffix(" cut")), cut=short.endswith(" cut"))
    save(tmp_path, 1, saved, keep)
    assert names(tmp_path) == sorted(map(name, after))
    assert newest_whole(str(tmp_path)) == str(tmp_path / name(f"1:{saved}"))


@pytest.mark.parametrize(
    "content", [None, b"", b"PK", b"PK\x03\x04" + bytes(500), b"text", "cut", "flipped"]
)
def test_the_newest_checkpoint_that_is_whole_is_found(tmp_path, caplog, content):
    """torch loads a flipped bit without a word. open_clip takes the last name, and so a leftover tmp.pt."""
    for name in ("epoch_1.pt", "tmp.pt", "epoch_latest.pt"):
        write(tmp_path, name)
    if isinstance(content, bytes):
        (tmp_path / "epoch_2.pt").write_bytes(content)
    elif content is not None:
        write(tmp_path, "epoch_2.pt", **{content: True})
    if content == "flipped":
        assert "a" in torch.load(tmp_path / "epoch_2.pt", weights_only=True)["state_dict"]
    assert newest_whole(str(tmp_path)) == str(tmp_path / "epoch_1.pt")
    assert ("epoch_2.pt: the file " in caplog.text) == (content is not None)
    assert newest_whole(str(tmp_path / "no")) is None


def test_half_written_files_are_removed_and_no_others(tmp_path):
    kept = ["epoch_1.pt", "epoch_latest.pt", "results.jsonl", "mine.part"]
    for name in (*kept, ".epoch_1.pt.77.tmp", ".step_0001_00000002.pt.77.0a1b.part", "tmp.pt"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted(kept)
    remove_leftovers(tmp_path / "nothing")


def test_on_a_remote_store_a_later_epoch_wins_over_an_earlier_step(tmp_path, monkeypatch):
    """open_clip sorts names, and "step" comes after "epoch"."""
    program, there = (
        tmp_path / "aws",
        "epoch_2.pt epoch_10.pt step_0009_00000100.pt tmp.pt results.jsonl",
    )
    listing = "".join(f"2026-01-01 00:00:00      100 {name}\n" for name in there.split())
    asked = "s3 ls s3://bucket/run/checkpoints/"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = '{asked}' ] || exit 1\ncat <<'END'\n{listing}END\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert (
        newest_whole("s3://bucket/run/checkpoints", remote=True)
        == "s3://bucket/run/checkpoints/epoch_10.pt"
    )
    assert newest_whole("s3://bucket/other", remote=True) is None


def test_kept_graphs_are_taken_over_by_the_same_split_only():
    """Another number of ranks may need a replay where the run had none before."""
    decision, batching = Decision(2, 100.0, 50.0), Batching(8, 3, 1, 2)
    taken = Position(1, 10, batching, asdict(decision))
    assert taken.graphs_for(replace(batching, workers=1)) == decision
    assert Position(1, 10, batching).graphs_for(batching) is None
    for other in ({"world_size": 2}, {"micro_batch": 4}, {"dga_steps": 6}):
        assert taken.graphs_for(replace(batching, **other)) is None


@pytest.fixture
def held(tmp_path):
    """A run's folder that another process has locked, until it is killed by the function that comes with it."""
    folder, (ready, done) = tmp_path / "run", os.pipe()
    holder = os.fork()
    if holder == 0:
        lock_folder(folder)
        (folder / LOCK).read_bytes()  # as open_clip's remote sync does, with fsspec
        os.write(done, b"x")
        os.read(os.pipe()[0], 1)  # waits for ever

    def kill() -> None:
        os.kill(holder, 9)
        os.waitpid(holder, 0)

    assert os.read(ready, 1) == b"x"
    yield folder, kill
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        kill()


def test_one_process_at_a_time(held, caplog):
    folder, kill = held
    with pytest.raises(UserError, match="another process is training the run in"):
        lock_folder(folder, wait_seconds=0.3)
    assert "Waiting for the process" in caplog.text
    kill()
    os.close(lock_folder(folder, wait_seconds=5))  # the system has given it back


def test_two_runs_with_one_made_up_name(held, monkeypatch):
    """Without --name, open_clip's main names a run by the second in which it starts, after our checks."""
    monkeypatch.setattr(lock_folder, "__defaults__", (0.2,))
    folder, _ = held
    args, config = parse(
        ["--model", "ViT-B-32", "--logs", str(folder.parent), "--dataset-type", "synthetic"]
    )
    run = TrainingRun(args, config, None)
    args.name, args.rank = folder.name, 0
    with pytest.raises(UserError, match="is training the run in"):
        run.create_model("ViT-B-32")


@pytest.mark.parametrize(("words", "expected"), [("--force-quick-gelu", True), ("", None)])
def test_the_config_of_a_checkpoint_has_a_forced_quickgelu(words, expected, monkeypatch):
    """Without it, a resume without the flag trained on as another function."""
    line = f"--model ViT-B-32 --dataset-type synthetic --dga-steps 2 --logs none {words}"
    args, config = parse(line.split())
    monkeypatch.setattr(
        "training.model.create_model", lambda *given: (torch.nn.Linear(1, 1), None, None, None)
    )
    monkeypatch.setattr("training.stopping.end_by_signals", lambda: None)
    run = TrainingRun(args, config, None)
    args.rank = 0
    run.create_model("ViT-B-32")
    assert run.entries[MODEL_ENTRY].get("quick_gelu") is expected


def test_a_disk_without_room_for_a_checkpoint_is_reported_before_the_first_step(
    tmp_path, monkeypatch
):
    model = torch.nn.Linear(1 << 10, 1 << 10)  # 4 MiB of weights, 8 MiB of moments
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=11 * 2**20))
    with pytest.raises(
        UserError, match="has 11 MiB free, and a checkpoint of this run takes about 12 MiB"
    ):
        require_room(tmp_path, model)
    model.requires_grad_(False)  # no moments
    require_room(tmp_path, model)


def test_statistics_with_nan_are_not_saved_and_masks_with_infinite_numbers_are():
    """An overflow whose step a GradScaler leaves out stays in batch norm, and every score of the model is NaN."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.full((2, 2), -torch.inf))
    model.register_buffer(
        "scratch", torch.full((2,), torch.nan), persistent=False
    )  # no checkpoint holds it
    require_finite(model, "after epoch 1")
    model(torch.full((3, 2), torch.inf))
    with pytest.raises(
        UserError,
        match="after epoch 1 the weights are not finite numbers; no checkpoint of them is written",
    ):
        require_finite(model, "after epoch 1")
