"""Data on which open_clip's own pipeline would fail late is refused before its main starts; readable data passes."""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import webdataset as wds
from PIL import EpsImagePlugin, Image, UnidentifiedImageError
from webdataset import autodecode
from webdataset.autodecode import torch_loads

from open_clip_zerovl.checkpoints.weights import read_state_dict
from open_clip_zerovl.core.errors import UserError
from support.tars import png, write_tar
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION
from training.data import UNPICKLED, check_stock_data
from training.main import main

OPEN_CLIP = {
    "dataset_type": "auto", "train_data": None, "val_data": None, "imagenet_val": None, "imagenet_v2": None,
    "train_num_samples": None, "train_data_upsampling_factors": None, "dataset_resampled": False, "workers": 0,
    "csv_img_key": "filepath", "csv_caption_key": "title", "csv_separator": "\t",
}  # fmt: skip


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Three shards of eight samples without a sizes.json, and two tables, all named from the folder that holds them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for shard in range(3):
        pictures = {f"{shard}{number}": png((30 * number, 9, 80 * shard)) for number in range(8)}
        members = [(f"{key}.png", picture) for key, picture in pictures.items()]
        members += [(f"{key}.txt", b"a red cat") for key in pictures]
        write_tar(tmp_path / "s" / f"{shard}.tar", sorted(members))
    (tmp_path / "p").mkdir()
    for number in range(8):
        (tmp_path / "p" / f"{number}.png").write_bytes(png((9 * number, 0, 0)))
    (tmp_path / "here.csv").write_text(
        "filepath,title\n" + "".join(f"p/{n}.png,a cat {n}\n" for n in range(8))
    )
    (tmp_path / "p" / "beside.tsv").write_text("filepath\ttitle\n" + "0.png\ta cat\n" * 8)
    (tmp_path / "empty.tsv").write_text("filepath\ttitle\n")
    return tmp_path


def check(**given) -> None:
    check_stock_data(Namespace(**{**OPEN_CLIP, **given}), training=True)


REFUSED = {
    "missing shards": (
        {"train_data": "s/{0..4}.tar"},
        "2 of 5 shards of --train-data do not exist, first s/3.tar",
    ),
    "missing shard to evaluate on": (
        {"val_data": "s/9.tar"},
        "1 of 1 shards of --val-data do not exist",
    ),
    "folder": ({"train_data": "s"}, "name it to read it as a source: --train-data NAME=s"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_fail_late_is_refused(data, kind):
    given, words = REFUSED[kind]
    with pytest.raises(UserError, match=re.escape(words)):
        check(**given)


def test_what_open_clip_can_read_passes(data):
    check(train_data="s/{0..2}.tar", train_num_samples=24, workers=3)
    weighted = {"train_data_upsampling_factors": "1::2", "dataset_resampled": True}
    check(train_data="s/0.tar::s/1.tar", train_num_samples=8, **weighted)
    check(train_data="here.csv", val_data="here.csv", csv_separator=",")
    check(train_data="pipe:cat s/0.tar", dataset_type="webdataset", train_num_samples=8)
    check(train_data="s3://bucket/{0..2}.tar")
    check(dataset_type="synthetic")
    if np.lib.NumpyVersion(np.__version__) < "2.4.0":
        check(imagenet_val="p")
    check_stock_data(
        Namespace(**{**OPEN_CLIP, "train_data": "a=s"}), training=False
    )  # our mixture's business


def test_imagenet_accuracy_that_numpy_refuses_gets_a_sentence(monkeypatch):
    """numpy 2.4's error, under whatever numpy this is."""

    def refused(output, target, topk=(1,)):
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    monkeypatch.setattr("training.data.accuracy", refused)
    with pytest.raises(
        UserError, match=r"--imagenet-val .* do not work with numpy .* pip install 'numpy<2.4'"
    ):
        check(imagenet_val="p")
    check(train_data="here.csv", dataset_type="synthetic")


@pytest.fixture
def run(data, capsys):
    """Run the program on the table; the exit status and its standard error."""
    for name, width in (("tiny", 24), ("teacher", 40)):
        config = {"embed_dim": width, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT}
        (data / f"{name}.json").write_text(json.dumps(config))
        open_clip.add_model_config(str(data / f"{name}.json"))

    def call(*arguments: str, name: str) -> tuple[int, str]:
        common = [
            "--model",
            "tiny",
            "--device",
            "cpu",
            "--precision",
            "fp32",
            "--workers",
            "0",
            "--epochs",
            "1",
        ]
        status = main(
            [*common, "--batch-size", "4", "--csv-separator", ",", "--name", name, *arguments]
        )
        return status, capsys.readouterr().err

    return call


def test_unnamed_tars_train(run, data):
    """The pin of webdataset: releases after 0.2.86 end open_clip's own pipeline in `KeyError: 'fname'`."""
    assert run("--train-data", "s/{0..2}.tar", "--train-num-samples", "4", name="tars")[0] == 0
    assert (data / "logs" / "tars" / "checkpoints" / "epoch_1.pt").exists()


def test_the_teacher_of_a_distillation_is_the_model_that_was_named(run, data):
    torch.manual_seed(0)
    teacher = open_clip.create_model("teacher")
    torch.save(teacher.state_dict(), data / "teacher.pt")
    distill = ["--distill-model", "teacher", "--distill-pretrained", "teacher.pt"]
    assert run("--train-data", "here.csv", *distill, name="distilled")[0] == 0
    student = read_state_dict("logs/distilled/checkpoints/epoch_1.pt")
    assert student["text_projection"].shape[1] == 24  # the teacher's is 40
    assert "Distill_loss" in (data / "logs" / "distilled" / "out.log").read_text()


# The words are open_clip's and torch's own; one of each kind of error that is shown: of Python's RuntimeError, AssertionError,
# ValueError and TypeError, of torch's sampler, and of a file that is missing before and in a step.
IN_ITS_WORDS = {
    "--train-data s/{0..2}.tar": "the number of dataset samples must be specified",
    "--train-data s/{0..2}.tar --train-num-samples 24 --workers 4": "number of shards must be >= total workers",
    "--train-data nowhere": "failed for extension nowhere",
    "--train-data here.csv --aug-cfg scal=(0.6,1.0)": "keyword argument 'scal'",
    "--train-data empty.tsv --csv-separator \t": "torch: num_samples should be a positive integer",
    "--train-data there.csv": "there.csv: No such file or directory",
    "--train-data here.csv --csv-img-key picture": "pandas: KeyError: it lacks 'picture'",
    "--train-data p/beside.tsv --csv-separator \t": "0.png: No such file or directory",
}


@pytest.mark.parametrize("words", IN_ITS_WORDS)
def test_what_open_clip_refuses_in_a_sentence_is_shown_as_one(run, data, words):
    status, said = run(*words.split(" "), name="refused")
    assert status == 2 and IN_ITS_WORDS[words] in said.splitlines()[-1], said[-300:]
    assert "Traceback" not in said
    assert not (data / "logs" / "refused").exists()


def test_a_run_that_fails_before_its_first_step_leaves_its_name_free(run, data):
    (data / "p" / "1.png").unlink()
    status, said = run("--train-data", "here.csv", "--batch-size", "8", name="first")
    assert status == 2 and "p/1.png: No such file or directory" in said
    assert not (data / "logs" / "first").exists()
    logs = [
        handler.baseFilename
        for handler in logging.root.handlers
        if hasattr(handler, "baseFilename")
    ]
    assert all(Path(log).exists() for log in logs)  # a run of another name would open it again
    rows = (data / "here.csv").read_text().splitlines()
    (data / "here.csv").write_text(
        "\n".join([rows[0], *(row for row in rows[1:] if "/1.png" not in row)])
    )
    assert run("--train-data", "here.csv", name="first")[0] == 0
    assert (data / "logs" / "first" / "checkpoints" / "epoch_1.pt").exists()


class RunsWhenUnpickled(str):
    """Makes the file of this name."""

    def __reduce__(self):
        return open, (str(self), "w")


@pytest.mark.parametrize("extension", ["pyd", "pickle", "pkl", "pth", "x.PYD"])
def test_no_shard_runs_what_it_holds(data, monkeypatch, caplog, extension):
    """webdataset unpickles such members of unnamed data; without the guard the marker appears."""
    marker = data / "ran"
    content = io.BytesIO()
    evil = RunsWhenUnpickled(str(marker))
    torch.save(evil, content) if extension == "pth" else content.write(pickle.dumps(evil))
    members = [
        ("0.png", png((1, 2, 3))),
        ("0.txt", b"a cat"),
        (f"0.{extension}", content.getvalue()),
    ]
    shard = str(write_tar(data / "evil" / "0.tar", members))

    def decode() -> dict:
        return next(iter(wds.WebDataset(shard, shardshuffle=False).decode("pilrgb")))

    for name in UNPICKLED:  # webdataset's own, which an earlier test may have replaced
        monkeypatch.setitem(
            autodecode.decoders, name, torch_loads if name == "pth" else pickle.loads
        )
    if extension != "pth":  # whose loader takes weights only in today's torch
        decode()
        assert marker.exists()
        marker.unlink()
    check(train_data=shard, train_num_samples=1)
    sample = decode()
    assert not marker.exists() and sample["txt"] == "a cat" and sample["png"].size == (8, 8)
    assert sample[extension.lower()] == content.getvalue()


def test_unnamed_data_opens_no_other_formats(data, monkeypatch):
    """webdataset's decoder and open_clip's tables name no formats to Pillow, which would start Ghostscript for EPS."""
    Image.init()
    for name in ("ID", "OPEN"):
        monkeypatch.setattr(Image, name, getattr(Image, name).copy())
    # as Pillow has it; an earlier test may have taken it away
    Image.register_open("EPS", EpsImagePlugin.EpsImageFile, EpsImagePlugin._accept)
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "EPS")
    members = [
        ("0.jpg", picture.getvalue()),
        ("0.txt", b"x"),
        ("1.jpg", png((1, 2, 3))),
        ("1.txt", b"y"),
    ]
    shard = str(write_tar(data / "eps" / "0.tar", members))

    def texts() -> list[str]:
        pipeline = wds.WebDataset(shard, shardshuffle=False).decode(
            "pilrgb", handler=wds.ignore_and_continue
        )
        return [sample["txt"] for sample in pipeline]

    opened = Image.open(io.BytesIO(picture.getvalue()))
    assert opened.format == "EPS"
    check(train_data=shard, train_num_samples=2)
    assert texts() == ["y"]
    with pytest.raises(UnidentifiedImageError):
        Image.open(io.BytesIO(picture.getvalue()))
