"""Any end of a training process comes soon, with its reason, and leaves no process behind: at 1 and at 2 ranks."""

from __future__ import annotations

import atexit
import errno
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.report.run import read_record
from support.programs import COMMON, ForkedTrainings
from support.tars import write_source
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, write_retrieval_set
from training import main as training_main
from training import stopping
from training.params import require_new_name
from training.stopping import new_cpu_group

# Seconds that a whole run may take, start of the model included, on a machine that is busy with other things.
LIMIT_SECONDS = 90
# Seconds that the other ranks may need after the first has ended.
AFTER_SECONDS = 20
STEPS = 7  # of an epoch: 60 samples in effective batches of 8


class Trainings:
    """Trains in a folder; each run has a name and a file of output."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.program = ForkedTrainings()

    def arguments(self, name: str, *extra: str, every: int | None = 2) -> list[str]:
        words = f"--train-data a={self.folder}/a --batch-size 4 --dga-steps 2 --workers 1 --epochs 2 --name {name}"
        return [
            *COMMON,
            *words.split(),
            *([f"--save-every-steps={every}"] if every is not None else []),
            *extra,
        ]

    def __call__(
        self,
        fault: str | None,
        *extra: str,
        name: str | None = None,
        every: int | None = 2,
        status=None,
        **request,
    ) -> tuple[dict, str, Path]:
        """The end of a run, its output and its folder; `status` is that of its one rank."""
        self.count += 1
        name = name or f"run{self.count}"
        request = {
            "model_config": str(self.folder / "tiny.json"), "fault": fault, "cwd": str(self.folder),
            "limit": LIMIT_SECONDS, "after": AFTER_SECONDS, **request,
        }  # fmt: skip
        output = self.folder / f"output{self.count}"
        done, printed = self.program(self.arguments(name, *extra, every=every), output, **request)
        assert status is None or done == {"statuses": [status], "seconds": 0.0, "left": 0}, printed[
            -3000:
        ]
        return done, printed, self.folder / "logs" / name


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ending")
    config = {"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT}
    (folder / "tiny.json").write_text(json.dumps(config))
    write_source(folder / "a", 0, 60, 13)
    trainings = Trainings(folder)
    yield trainings
    trainings.program.close()


# fault -> exit status, and words that the process prints
CAUSES = {
    "defect in the step": (1, "ZeroDivisionError: a defect in the step"),
    "defect in a loader worker": (1, "LookupError: a defect in the transform"),
    "out of memory": (2, "training.main: error: the device's memory is full (CUDA out of memory. Tried"),
    "exit in the step": (3, ""),
    "ctrl-c": (130, "training.main: stopped; step 2 of epoch 0 is saved. The same command goes on from there with --name"),
    "ctrl-c twice": (130, "training.main: interrupted"),
    "sigterm": (85, "for the launcher"),
    "sighup": (85, "for the launcher"),
    "weights not finite": (2, "after step 2 of epoch 0 the weights are not finite numbers; no checkpoint of them"),
    "loader worker killed at a save": (2, "loader worker 0 of rank 0 was lost"),
    "full disk": (2, "cannot be written"),
}  # fmt: skip


def no_memory(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


# One of each way out in the fast tests: an exception, a status, both signals, a lost child, an error of the system.
QUICK = (
    "defect in the step",
    "ctrl-c",
    "sigterm",
    "sighup",
    "weights not finite",
    "loader worker killed at a save",
    "full disk",
)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "fault",
    [cause if cause in QUICK else pytest.param(cause, marks=pytest.mark.slow) for cause in CAUSES],
)
def test_one_rank_ends(train, fault):
    status, words = CAUSES[fault]
    _, printed, folder = train(fault, status=status)
    assert words in printed and "Traceback" not in printed
    assert fault.startswith("defect") == (folder / "traceback-rank0.txt").exists()
    assert (folder / "requeue").exists() == (fault in ("sigterm", "sighup"))
    assert fault != "weights not finite" or not list((folder / "checkpoints").glob("*.pt"))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("program", "status"),
    [
        (lambda: 1 // 0, 1),
        (lambda: training_main.main(["--dga-steps", "0"]), 2),
        (lambda: setattr(threading.Thread, "start", no_memory) or 0, 0),
    ],
)
def test_a_process_ends_where_nothing_can_be_printed_and_no_thread_started(program, status):
    """Standard error may be a file on the disk that is full."""

    class Full:
        def write(self, words: str = "") -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        flush = write

    child = os.fork()
    if child == 0:
        atexit._clear()
        sys.stderr = Full()
        try:
            stopping.run(program)
        finally:
            os._exit(77)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "fault_rank", "statuses", "words"),
    [
        ("defect in the step", 1, [2, 1], "[rank 0] training.main: error: another rank has ended"),
        ("killed", 1, [2, -9], "[rank 0] training.main: error: another rank has ended"),
        pytest.param(
            "killed",
            0,
            [-9, 2],
            "[rank 1] training.main: error: another rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "killed after the first step",
            1,
            [2, -9],
            "another rank has ended",
            marks=pytest.mark.slow,
        ),
        ("full disk", 0, [2, 2], "cannot be written"),
        ("ctrl-c", 1, [130, 130], "is saved. The same command goes on"),
    ],
)
def test_two_ranks_end(train, fault, fault_rank, statuses, words):
    """Without torchrun, which would end the other rank after a while: each sees by itself that it is alone."""
    done, printed, _ = train(fault, ranks=2, fault_rank=fault_rank)
    assert done["statuses"] == statuses and done["left"] == 0, printed[-3000:]
    assert done["seconds"] < AFTER_SECONDS and words in printed


def rank_of_two(rank: int, place: str, told: multiprocessing.Queue) -> None:
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    group = new_cpu_group(1.0)
    time.sleep(2.5 * rank)
    torch.distributed.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        time.sleep(60)
    begin = time.monotonic()
    try:
        new_cpu_group(1.0)
    except RuntimeError as error:
        told.put((stopping.sentence_of(error), time.monotonic() - begin))


@pytest.mark.skipif(
    not hasattr(torch.distributed.ProcessGroup, "set_timeout"),
    reason="torch before 2.9 waits 30 minutes",
)
def test_a_rank_that_never_comes_is_not_waited_for_longer_than_asked():
    """A group of ranks beside NCCL's is made in a store, where nobody hears that a rank has ended. Its collectives may last."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"tcp://localhost:{free.getsockname()[1]}"
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    ranks = [fork.Process(target=rank_of_two, args=(rank, place, told)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        sentence, seconds = told.get(timeout=30)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert sentence.startswith("another rank has ended") and seconds < 10


def test_a_rank_ends_with_its_torchrun(monkeypatch):
    """It would train on, and write into the folder in which a restart writes; tests/core kills a supervisor."""
    asked: list[int] = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert torch.distributed.is_torchelastic_launched()  # by the name that this torch gives
    monkeypatch.setattr(stopping, "end_with_parent", asked.append)
    monkeypatch.setattr(stopping, "end", lambda status: None)
    stopping.run(lambda: 0)
    assert asked == [signal.SIGKILL]


def test_a_run_without_that_checkpoint_does_not_begin_anew_with_the_flag(tmp_path):
    """It wrote over epoch_1.pt, and the log of the run was the one place that had a word about it."""
    args = SimpleNamespace(
        name="run", logs=str(tmp_path), resume="latest", save_most_recent=True, log_local=False
    )
    require_new_name(args)  # nothing is saved
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (saved := tmp_path / "run/checkpoints/epoch_1.pt").touch()
    with pytest.raises(
        UserError, match=r"which is not beside .*epoch_1\.pt: .*leave --save-most-recent out"
    ):
        require_new_name(args)
    saved.with_name("epoch_latest.pt").touch()
    require_new_name(args)


def test_without_logs_no_message_claims_a_checkpoint(train):
    _, printed, _ = train("sigterm", "--logs", "none", name="unlogged", status=143)
    assert "nothing is saved: --logs none" in printed
    assert not (train.folder / "none" / "unlogged" / "requeue").exists()


@pytest.mark.slow(reason="two trainings of a rare flag")
def test_remote_sync_ends_and_has_the_last_checkpoint(train):
    remote = train.folder / "remote"
    extra = (
        f"--remote-sync {remote} --remote-sync-protocol fsspec --remote-sync-frequency 1000".split()
    )
    train(None, *extra, "--epochs", "1", name="synced", status=0)
    assert (remote / "synced" / "checkpoints" / "epoch_1.pt").exists()
    train("sigterm", *extra, name="stopped-sync", status=85)
    assert (remote / "stopped-sync" / "checkpoints" / "step_0000_00000002.pt").exists()


def test_a_failed_sync_leaves_the_name_free(train):
    (train.folder / "a-file").touch()
    extra = [
        "--remote-sync",
        str(train.folder / "a-file" / "x"),
        "--remote-sync-protocol",
        "fsspec",
    ]
    _, printed, folder = train(None, *extra, status=2)
    assert "gave up with status -1" in printed and not folder.exists()


def test_a_resumed_run_takes_the_settings_of_its_command_line_and_names_them(train):
    """From an epoch's end, of whose checkpoint open_clip knows no batch and no seed."""
    train(None, "--epochs=1", "--wd", "0.2", name="settings", status=0)
    changes = ["--wd", "0", "--beta2", "0.9", "--eps", "1e-4", "--epochs", "2", "--lr", "1e-2"]
    changes += ["--dga-steps", "3", "--seed", "9"]
    same = ["--resume", "latest"]
    _, printed, folder = train(None, *changes, *same, name="settings", status=0)
    assert "The resumed optimizer takes betas (" in printed
    assert "than before: an effective batch of 12 after 8; --seed 9 after 0." in printed
    groups = torch.load(folder / "checkpoints" / "epoch_2.pt", weights_only=True)["optimizer"]
    for group in groups["param_groups"]:
        assert (group["weight_decay"], group["betas"][1], group["eps"]) == (0.0, 0.9, 1e-4)


def assert_same_from(train, whole: Path, begin: str, *extra: str, fault=None, **request) -> str:
    """Resume from a checkpoint of a whole run of two epochs, and compare the weights. The output of the resumed run."""
    name = f"{whole.name}-{begin[:-3]}"
    (train.folder / "logs" / name / "checkpoints").mkdir(parents=True)
    shutil.copy(whole / "checkpoints" / begin, train.folder / "logs" / name / "checkpoints")
    done, printed, resumed = train(
        fault, *extra, "--resume", "latest", name=name, every=1, **request
    )
    assert set(done["statuses"]) == {0}, printed[-3000:]
    wanted, found = (
        torch.load(folder / "checkpoints" / "epoch_2.pt", weights_only=True)["state_dict"]
        for folder in (whole, resumed)
    )
    assert all(torch.equal(wanted[key], found[key]) for key in wanted), begin
    return printed


KEEP = ["--batch-size", "2", "--keep-checkpoints", "99"]


@pytest.mark.slow(
    reason="four trainings; the adopted decision is tested in tests/dga and test_checkpointing"
)
def test_what_auto_decided_holds_after_a_resume(train):
    """With another number of retained graphs, gradients are added up in another order, and the last bits differ."""
    extra = [*KEEP, "--dga-retain", "auto", "--dga-steps", "4"]
    *_, whole = train("auto keeps 3 graphs", *extra, name="auto-whole", every=1, status=0)
    for begin in ("step_0000_00000001.pt", "step_0000_00000004.pt", "epoch_1.pt"):
        printed = assert_same_from(train, whole, begin, *extra, fault="auto keeps 1 graph")
        assert printed.count("Graphs kept a step, as before this run was resumed: 3") == 1


@pytest.mark.slow(reason="three trainings over three ranks; test_resume has the cause in one")
def test_three_ranks_go_on_from_an_epochs_last_step(train):
    """A process that took its first step in a later epoch than its first had DDP's first layout there, and other last bits."""
    *_, whole = train(None, *KEEP, name="three-ranks", every=1, ranks=3)
    for begin in ("step_0000_00000002.pt", "step_0000_00000005.pt"):
        assert_same_from(train, whole, begin, *KEEP, ranks=3)


def test_a_run_shows_what_it_will_do_and_where_it_is(train):
    """Some lines and not hundreds; the log file has the rest. At its end it lists the results and the next command."""
    pairs = train.folder / "shown"
    write_retrieval_set(pairs, [1, 2, 1, 1])
    _, printed, folder = train(
        None, "--epochs", "1", "--retrieval-data", f"r={pairs}", "--image-mean", "0.5", "0.5", "0.4",
        name="shown", status=0,
    )  # fmt: skip
    assert "4 x 2 x 1 = 8 pairs a step" in printed and "ETA: " in printed
    # the messages of open_clip are in its log, its warnings here, too, and each comes once
    assert "Params:" not in printed and "Params:" in (folder / "out.log").read_text()
    assert printed.count("Opening a=") == printed.count("No pretrained weights loaded") == 1
    last = printed.splitlines()[-1]
    assert last.endswith(
        "Next: zerovl export logs/shown/checkpoints/epoch_1.pt logs/shown/exported"
    )
    assert "Best RSUM: r " in (folder / "run.html").read_text()
    record = read_record(folder)
    assert [line["at"] for line in record["step"]] == pytest.approx(
        [(i + 1) / STEPS for i in range(STEPS)]
    )
    assert record["lost"][0]["delivered"] == {"a": 56} and record["end"][0]["how"] == "done"
    settings = record["start"][0]["settings"]
    assert settings["dga_steps"] == "2" and settings["image_mean"] == "0.5 0.5 0.4"
    _, printed, _ = train(None, "--epochs", "1", "--resume", "latest", name="shown", status=0)
    assert "Nothing is left to train: " in printed and "epoch_1.pt has all 1 epochs" in printed


@pytest.mark.parametrize(
    ("fault", "how", "every", "extra", "done"),
    [
        ("sigterm", "stopped", None, ["--save-most-recent", "--save-frequency", "0"], 5),
        pytest.param("defect in the step", "failed", 2, [], 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_ends_early_leaves_its_page_and_a_resumed_one_each_step_once(
    train, fault, how, every, extra, done
):
    """With --save-most-recent open_clip looks for epoch_latest.pt alone, and passes over a step checkpoint of another name."""
    name = f"page-{how}"
    ended, printed, folder = train(fault, *extra, name=name, every=every, fault_step=5)
    assert ended["statuses"] != [0] and (folder / "run.html").exists(), printed[-3000:]
    assert bool(extra) == (folder / "checkpoints" / "epoch_latest.pt").exists()
    assert read_record(folder)["end"][-1]["how"] == how
    begun = (folder / "record.jsonl").read_text()
    (folder / "record.jsonl").write_text(
        begun + '{"kind": "step", "at": 0.9'
    )  # as a killed process may leave it
    (folder / "checkpoints" / ".epoch_1.pt.99.00.part").touch()
    _, printed, _ = train(None, *extra, "--resume", "latest", name=name, every=every, status=0)
    epochs = (printed.count(f"Train Epoch: {epoch} [") for epoch in (0, 1))
    assert tuple(epochs) == (STEPS - done, STEPS)
    record = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    at = [line["at"] for line in record if line["kind"] == "step"]
    assert at == pytest.approx([epoch + (i + 1) / STEPS for epoch in (0, 1) for i in range(STEPS)])
    assert [line["how"] for line in record if line["kind"] == "end"] == ["done"]
    assert "goes on after step" in printed and sum(line["kind"] == "start" for line in record) == 2
    assert not list((folder / "checkpoints").glob(".*"))
