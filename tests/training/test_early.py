"""What is told before torch is loaded, and what a run is told of its own settings: device, precision, warm-up, sources."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from support.tars import write_source
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION
from training import data as training_data
from training.model import check_device, settle_device
from training.params import parse

HEAVY = ("torch", "timm", "transformers", "open_clip", "pandas", "numpy")

# `python -m training.main ARGUMENTS` in this process, then what it has imported.
PROGRAM = f"""
import runpy, sys
try:
    runpy.run_module("training.main", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    print("status", stop.code)
print("imported", [name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--help"], 0, "micro-batches of --batch-size per rank make one exact effective batch"),
        (["--dga-stepps", "4"], 2, "there is no flag --dga-stepps; did you mean --dga-steps?"),
        (["--", "--train-data", "a=/x", "--lr-min", "1"], 2, "--lr-min 1.0 is out of range; give 0 to --lr 0.0005"),
        (["--train-data", "a=/x", "--name", "taken"], 2, "a run called 'taken' exists"),
        (["--train-data", "a=/x", "--logs", "file"], 2, "--logs file is a file"),
        ([], 2, "there is nothing to do"),
        (["--train-data", "a=/x", "--logs", "/proc/x"], 2, "/proc/x cannot be written"),
        (["--train-data", "a=/nowhere/a"], 2, "source 'a': /nowhere/a does not exist"),
        (["--train-data", "a=file:b=file"], 2, "write a=file::b=..."),
        (["--train-data", "a=file", "--resume", "epoch_9.pt"], 2, "--resume epoch_9.pt does not exist"),
        (["--train-data", "a=file", "--init-from", "file"], 2, "--init-from file is no checkpoint: it is empty"),
    ],
)
def test_help_and_refusals_need_no_torch(tmp_path, arguments, status, words):
    (tmp_path / "logs" / "taken").mkdir(parents=True)
    (tmp_path / "logs" / "taken" / "out.log").write_text("")
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert f"status {status}" in done.stdout and "imported []" in done.stdout, done.stdout + done.stderr
    assert words in " ".join((done.stdout + done.stderr).split())


def device_args(device: str, precision: str) -> Namespace:
    return Namespace(device=device, precision=precision)


def test_a_device_that_torch_does_not_know_is_refused():
    check_device(device_args("cuda:1", "amp"))
    with pytest.raises(UserError, match="torch knows no --device foo; give cpu"):
        check_device(device_args("foo", "amp"))


def test_a_missing_gpu_and_amp_on_a_cpu_are_told(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = device_args("cuda", "amp")
    settle_device(args, recipe=True)
    assert args.precision == "fp32"
    assert "no cuda device here: this run trains on the CPU" in caplog.text and "fp32 is taken" in caplog.text
    caplog.clear()
    args = device_args("cpu", "amp")
    settle_device(args, recipe=False)  # a run of open_clip's own keeps what it was given
    assert args.precision == "amp" and "give --precision fp32" in caplog.text
    caplog.clear()
    for precision in ("fp32", "amp_bf16"):
        args = device_args("cpu", precision)
        settle_device(args, recipe=True)
        assert args.precision == precision and not caplog.records
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = device_args("cuda:0", "amp")
    settle_device(args, recipe=True)
    assert args.precision == "amp" and not caplog.records


@pytest.fixture
def sources(tmp_path):
    return f"a={write_source(tmp_path / 'a', 0, 40, 10)}"


def test_debiased_sampling_of_one_source_is_told(sources, tmp_path, caplog):
    def told(train_data: str) -> bool:
        caplog.clear()
        args, config = parse(["--train-data", train_data, "--debiased-sampling", "--batch-size", "4"])
        training_data.open_inputs(config, args)
        return "Debiased sampling has one source only, a; name several" in caplog.text

    assert told(sources)
    assert not told(f"{sources}::b={write_source(tmp_path / 'b', 100, 40, 10)}")


def test_a_retrieval_set_in_the_files_of_a_source_is_told(sources, tmp_path, caplog):
    other = write_source(tmp_path / "b", 100, 40, 10)
    folder, table = tmp_path / "pictures", tmp_path / "pictures" / "pairs.csv"
    folder.mkdir()
    rows = ["filepath,title"]
    for i in range(4):
        Image.new("RGB", (8, 8), (9 * i, 0, 0)).save(folder / f"{i}.png")
        rows.append(f"{i}.png,picture {i}")
    table.write_text("\n".join(rows) + "\n")

    def told(train_data: str, retrieval: str) -> list[str]:
        caplog.clear()
        args, config = parse(
            ["--train-data", train_data, "--debiased-sampling", "--batch-size", "4", "--retrieval-data", retrieval]
        )
        training_data.open_inputs(config, args)
        return [
            record.getMessage().partition(" lie in files")[0] for record in caplog.records if "memor" in record.message
        ]

    both = f"{sources}::b={other}"
    assert told(both, f"held={tmp_path / 'a'}") == ["40 of the 40 pictures of the retrieval set held"]
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert told(both, f"held={next((tmp_path / 'link').glob('*.tar'))}") == [
        "10 of the 10 pictures of the retrieval set held"
    ]
    assert told(f"{sources}::t={table}", f"held={table}") == ["4 of the 4 pictures of the retrieval set held"]
    assert not told(sources, f"held={table}") and not told(f"b={other}::t={table}", f"held={tmp_path / 'a'}")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--warmup", "100"], True),
        ([], True),  # open_clip's default is 10,000 steps
        (["--warmup", "20"], False),
        (["--warmup-share", "0.1"], False),
        (["--skip-scheduler"], False),
    ],
)
def test_a_warmup_longer_than_the_run_is_told(sources, monkeypatch, caplog, given, told):
    loader = SimpleNamespace(num_batches=10)
    monkeypatch.setattr(training_data, "_mixture_data", lambda *_: SimpleNamespace(dataloader=loader))
    args, config = parse(["--train-data", sources, "--epochs", "3", "--lr", "1e-3", *given])
    args.world_size = args.rank = 0
    args.local_rank = 0
    training_data.get_data(config, training_data.Inputs(), lambda _: {}, args, (None, None))
    assert ("is longer than the run's 30 steps: the learning rate ends at" in caplog.text) == told


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--skip-scheduler --lr-min 1e-6", "--skip-scheduler does not work with --lr-min"),
        ("--skip-scheduler --warmup-share 0.1", "--skip-scheduler does not work with --warmup-share"),
        ("--warmup 50 --warmup-share 0.1", "--warmup 50 does not work with --warmup-share"),
    ],
)
def test_a_flag_that_would_lose_in_silence_is_refused(line, words):
    with pytest.raises(UserError, match=words):
        parse(["--train-data", "a=/x", *line.split()])


def test_one_process_end_to_end_says_what_it_takes(sources, tmp_path, capsys, monkeypatch):
    """`--precision amp` on the CPU through the whole program: params.txt and the log have fp32."""
    import open_clip

    from training.main import main

    config = {"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT}
    (tmp_path / "early-tiny.json").write_text(json.dumps(config))
    open_clip.add_model_config(str(tmp_path / "early-tiny.json"))
    monkeypatch.chdir(tmp_path)
    line = [
        "--model",
        "early-tiny",
        "--device",
        "cpu",
        "--precision",
        "amp",
        "--batch-size",
        "8",
        "--epochs",
        "1",
        "--workers",
        "0",
        "--name",
        "fp32",
    ]
    assert main(["--train-data", sources, *line]) == 0
    params = (tmp_path / "logs" / "fp32" / "params.txt").read_text()
    assert "\nprecision: fp32\n" in params
