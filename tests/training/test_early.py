"""Messages before torch is loaded, and warnings of a run's settings: device, precision, warm-up, sources."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from open_clip_zerovl.data.sources import parse_sources
from support.tars import png, write_source
from training import data as training_data
from training.model import settle_device
from training.params import parse

HEAVY = ("torch", "timm", "transformers", "open_clip", "pandas", "numpy")

# `python -m training.main ARGUMENTS` in this process, then its imports.
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
        (["--train-data", "a=/x", "--name", "taken"], 2, "a run called 'taken' exists"),
        ([], 2, "there is nothing to do"),
        (["--", "--train-data", "a=/nowhere/a"], 2, "source 'a': /nowhere/a does not exist"),
        (["--train-data", "a=/x:b=/y"], 2, "source 'a': /x:b=/y does not exist"),
    ],
)
def test_help_and_refusals_need_no_torch(tmp_path, arguments, status, words):
    (tmp_path / "logs" / "taken").mkdir(parents=True)
    (tmp_path / "logs" / "taken" / "out.log").write_text("")
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert f"status {status}" in done.stdout and "imported []" in done.stdout, (
        done.stdout + done.stderr
    )
    assert words in " ".join((done.stdout + done.stderr).split())
    assert [path.name for path in (tmp_path / "logs").rglob("*")] == ["taken", "out.log"]


@pytest.mark.parametrize(
    ("device", "precision", "recipe", "gpu", "taken", "told"),
    [
        (
            "cuda",
            "amp",
            True,
            False,
            "fp32",
            ["no cuda device here: this run trains on the CPU", "fp32 is used"],
        ),
        (
            "cpu",
            "amp",
            False,
            False,
            "amp",
            ["give --precision fp32"],
        ),  # open_clip's own run keeps its precision
        ("cpu", "fp32", True, False, "fp32", []),
        ("cpu", "amp_bf16", True, False, "amp_bf16", []),
        ("cuda:0", "amp", True, True, "amp", []),
    ],
)
def test_a_missing_gpu_and_amp_on_a_cpu_give_a_warning(
    device, precision, recipe, gpu, taken, told, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    args = Namespace(device=device, precision=precision)
    settle_device(args, recipe=recipe)
    assert args.precision == taken and len(caplog.messages) == len(told)
    assert all(words in message for words, message in zip(told, caplog.messages, strict=True))


@pytest.fixture
def told(caplog):
    """Opens the data of some flags; the log's messages then."""

    def open_data(*words: str) -> list[str]:
        caplog.clear()
        args, config = parse(["--debiased-sampling", "--batch-size", "4", *words])
        training_data.open_inputs(config, args)
        return [record.getMessage() for record in caplog.records]

    return open_data


@pytest.fixture
def sources(tmp_path):
    return f"a={write_source(tmp_path / 'a', 0, 40, 10)}"


def test_debiased_sampling_of_one_source_gives_a_warning(sources, tmp_path, told):
    words = "Debiased sampling has one source only, a; name several"
    assert any(words in message for message in told("--train-data", sources))
    assert not told("--train-data", f"{sources}::b={write_source(tmp_path / 'b', 100, 40, 10)}")


def test_classes_take_their_captions_as_positives(sources, tmp_path, caplog):
    """A flag that was given wins; one that does not work with it is named; other data changes nothing."""

    def settled(*words: str) -> tuple[str | None, bool]:
        caplog.clear()
        args, config = parse(["--train-data", sources, "--batch-size", "4", *words])
        found = training_data.with_positives(config, parse_sources(args.train_data))
        assert (found is config) or found != config
        return found.positives, "Pictures of a class share its captions (source a)" in caplog.text

    assert settled() == (None, False)
    (tmp_path / "classnames.txt").write_text("hat\nshoe\n")
    caplog.set_level("INFO")
    assert settled() == ("caption", True)
    assert settled("--positives", "pair") == (None, False) and settled("--positives", "image") == (
        "image",
        False,
    )
    assert settled("--positives", "pair", "--coin-flip-mixup")[0] is None
    assert (
        settled("--coin-flip-mixup") == (None, True)
        and "does not work with --positives" in caplog.text
    )


def test_a_retrieval_set_in_the_files_of_a_source_gives_a_warning(sources, tmp_path, told):
    other = write_source(tmp_path / "b", 100, 40, 10)
    table = tmp_path / "pairs.csv"
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(png((9 * i, 0, 0), 16))
    table.write_text("filepath,title\n" + "".join(f"{i}.png,picture {i}\n" for i in range(4)))
    (tmp_path / "link").symlink_to(tmp_path / "a")

    def shared(train_data: str, retrieval: object) -> list[str]:
        messages = told("--train-data", train_data, "--retrieval-data", f"held={retrieval}")
        return [message.partition(" pictures of the retrieval set held lie in files")[0] for message in messages
                if "memor" in message]  # fmt: skip

    both = f"{sources}::b={other}"
    assert shared(both, tmp_path / "a") == ["40 of the 40"]
    assert shared(both, next((tmp_path / "link").glob("*.tar"))) == ["10 of the 10"]
    assert shared(f"{sources}::t={table}", table) == ["4 of the 4"]
    assert not shared(sources, table) and not shared(f"b={other}::t={table}", tmp_path / "a")


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
def test_a_warmup_longer_than_the_run_gives_a_warning(sources, monkeypatch, caplog, given, told):
    loader = SimpleNamespace(num_batches=10)
    monkeypatch.setattr(
        training_data, "_mixture_data", lambda *_: SimpleNamespace(dataloader=loader)
    )
    args, config = parse(["--train-data", sources, "--epochs", "3", "--lr", "1e-3", *given])
    args.world_size = args.rank = 0
    args.local_rank = 0
    training_data.get_data(config, training_data.TrainingInputs(), lambda _: {}, args, None, None)
    assert ("is longer than the run's 30 steps: the learning rate ends at" in caplog.text) == told
