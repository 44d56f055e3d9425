"""Data on which open_clip's own pipeline would fail late is refused before its main starts; readable data passes."""

from __future__ import annotations

import io
import json
import pickle
import re
from argparse import Namespace
from contextlib import nullcontext

import numpy as np
import open_clip
import open_clip_train.zero_shot as zero_shot
import pytest
import torch
import webdataset as wds
from PIL import EpsImagePlugin, Image, UnidentifiedImageError
from webdataset import autodecode
from webdataset.autodecode import torch_loads

from open_clip_zerovl.core.errors import UserError
from support.tars import png, write_tar
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, bert_text, picture, register, write_bert
from training.data import UNPICKLED, check_stock_data
from training.main import main

OPEN_CLIP = {
    "dataset_type": "auto", "train_data": None, "val_data": None, "imagenet_val": None, "imagenet_v2": None,
    "train_num_samples": None, "train_data_upsampling_factors": None, "dataset_resampled": False, "workers": 0,
    "csv_img_key": "filepath", "csv_caption_key": "title", "csv_separator": "\t",
}  # fmt: skip


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Three shards of eight samples without a sizes.json, and a table, all named from the folder that holds them."""
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
    return tmp_path


def check(**given) -> None:
    check_stock_data(Namespace(**{**OPEN_CLIP, **given}), training=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_data": "s/{0..4}.tar"}, "2 of 5 shards of --train-data do not exist, first s/3.tar"),
        ({"val_data": "s/9.tar"}, "1 of 1 shards of --val-data do not exist"),
        ({"train_data": "s"}, "name it to read it as a source: --train-data NAME=s"),
        ({"train_data": "s/0.tar::s/1.tar", "train_data_upsampling_factors": "1::2", "dataset_resampled": True}, None),
        ({"train_data": "pipe:cat s/0.tar", "dataset_type": "webdataset"}, None),
        ({"train_data": "s3://bucket/{0..2}.tar"}, None),
    ],
)  # fmt: skip
def test_a_missing_shard_is_refused(data, given, words):
    """open_clip's pipeline would wait for it for ever, and name the extension of a folder after building the model."""
    with nullcontext() if words is None else pytest.raises(UserError, match=re.escape(words)):
        check(**given)


def test_imagenet_accuracy_that_numpy_refuses_gets_a_sentence(monkeypatch):
    """numpy 2.4's error, under whatever numpy this is."""

    def refused(output, target, topk=(1,)):
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    monkeypatch.setattr("training.data.accuracy", refused)
    with pytest.raises(
        UserError, match=r"--imagenet-val .* do not work with numpy .* pip install 'numpy<2.4'"
    ):
        check(imagenet_val="p")


# NumPy 2.4 ended float(array of one element), which open_clip 3.3 and CLIP_benchmark 1.6.2 use in their accuracy.
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="open_clip 3.3's accuracy needs numpy<2.4, as setup.py asks",
)
def test_imagenet_zero_shot_of_open_clip_runs_with_bert(tmp_path, monkeypatch):
    """The classifier is built with BERT's tokenizer. Twelve names and two templates stand for open_clip's 1,000 and 80."""
    names, templates = zero_shot.IMAGENET_CLASSNAMES[:12], zero_shot.OPENAI_IMAGENET_TEMPLATES[:2]
    monkeypatch.setattr(zero_shot, "IMAGENET_CLASSNAMES", names)
    monkeypatch.setattr(zero_shot, "OPENAI_IMAGENET_TEMPLATES", templates)
    register(tmp_path, "test-imagenet", NATIVE_VISION, bert_text(write_bert(tmp_path / "bert")))
    monkeypatch.chdir(tmp_path)
    for label in range(12):
        (tmp_path / "val" / f"n{label:08d}").mkdir(parents=True)
        (tmp_path / "val" / f"n{label:08d}" / "a.png").write_bytes(
            picture(np.random.default_rng(label))
        )
    build, tokenizers = zero_shot.build_zero_shot_classifier, []

    def watched(*arguments, tokenizer, **options):
        tokenizers.append(tokenizer.tokenizer.mask_token)
        return build(*arguments, tokenizer=tokenizer, **options)

    monkeypatch.setattr(zero_shot, "build_zero_shot_classifier", watched)
    words = "--model test-imagenet --device cpu --precision fp32 --workers 0 --name run --dga-steps 2 --imagenet-val val"
    assert main(words.split()) == 0
    (row,) = (tmp_path / "logs/run/checkpoints/results.jsonl").read_text().splitlines()
    assert 0 <= json.loads(row)["imagenet-zeroshot-val-top1"] <= 1 and tokenizers == ["[MASK]"]


@pytest.fixture
def run(data, capsys):
    """Run the program on the table; the exit status and its standard error."""
    config = {"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT}
    (data / "tiny.json").write_text(json.dumps(config))
    open_clip.add_model_config(str(data / "tiny.json"))

    def call(*arguments: str, name: str) -> tuple[int, str]:
        common = "--model tiny --device cpu --precision fp32 --workers 0 --epochs 1 --batch-size 4"
        status = main([*common.split(), "--csv-separator", ",", "--name", name, *arguments])
        return status, capsys.readouterr().err

    return call


def test_unnamed_tars_train(run, data):
    """The pin of webdataset: releases after 0.2.86 end open_clip's own pipeline in `KeyError: 'fname'`."""
    assert run("--train-data", "s/{0..2}.tar", "--train-num-samples", "4", name="tars")[0] == 0
    assert (data / "logs" / "tars" / "checkpoints" / "epoch_1.pt").exists()


def test_a_run_that_fails_before_its_first_step_leaves_its_name_free(run, data):
    (data / "p" / "1.png").unlink()
    status, said = run("--train-data", "here.csv", "--batch-size", "8", name="first")
    assert status == 2 and "p/1.png: No such file or directory" in said and "Traceback" not in said
    assert not (data / "logs" / "first").exists()
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
    assert Image.open(io.BytesIO(picture.getvalue())).format == "EPS"
    check(train_data="s/0.tar", train_num_samples=8)
    with pytest.raises(UnidentifiedImageError):
        Image.open(io.BytesIO(picture.getvalue()))
