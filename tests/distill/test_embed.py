"""`zerovl teacher`: a killed call goes on to the same bits; folders of something else, cut short or with NaN get a sentence."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import open_clip
import pytest
import torch
from torch.nn.functional import normalize

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.cli.program import main as zerovl
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.reading import RawSample
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.distill.embed import TeacherSettings, embed_sources
from open_clip_zerovl.distill.rows import TeacherRows, open_teacher_folder
from open_clip_zerovl.embeddings import reading as reading_module
from open_clip_zerovl.embeddings import store as store_module
from open_clip_zerovl.embeddings.encoder import FrozenModel
from open_clip_zerovl.embeddings.sources import augmentation_of
from support.hash_teacher import HashEncoder
from support.tars import noise_jpeg, write_tar
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, random_model, register, write_run

SETTINGS = TeacherSettings(views=2, image_size=16, aug_cfg={"scale": (0.3, 1.0)})


def write_data(folder, *, first=0, bad=()):
    for shard in range(3):
        members = []
        for number in range(first + 5 * shard, first + 5 * shard + 5):
            image = (
                (b"no picture", b"")[number % 2] if number in bad else noise_jpeg(number, 40, 40)
            )
            members += [
                (f"{number:04d}.jpg", image),
                (f"{number:04d}.txt", f"caption {number}".encode()),
            ]
        write_tar(folder / f"{shard:05d}.tar", members)
    return folder


@pytest.fixture
def data(tmp_path):
    return f"a={write_data(tmp_path / 'a')}"


@pytest.fixture
def stored(tmp_path, data):
    embed_sources(data, [HashEncoder()], tmp_path / "out", SETTINGS)
    return tmp_path / "out"


def rows_of(stored, data, settings=SETTINGS, **differing):
    transform = replace(settings, **differing).transform()
    sources = parse_sources(data, captions=settings.captions)
    path = differing.get("pixel_path", settings.pixel_path)
    return TeacherRows(
        open_teacher_folder(stored),
        sources,
        augmentation=augmentation_of(transform, path),
        captions=settings.captions,
    )


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_real_model_is_embedded_as_by_hand(tmp_path, data):
    """Views and captions through a training checkpoint, normalised, in both dtypes; against open_clip called directly."""
    register(tmp_path / "configs", "teach", {**NATIVE_VISION, "image_size": 24}, CLIP_TEXT)
    model = random_model("teach")
    checkpoint = write_run(tmp_path / "run", model, {"model": "teach"})
    for dtype, tolerance in (("float16", 1e-3), ("bfloat16", 8e-3)):
        settings = replace(SETTINGS, dtype=dtype)
        store = embed_sources(data, [Encoder(str(checkpoint))], tmp_path / dtype, settings)
        store = open_teacher_folder(store.folder)
        images, texts = (store.rows[f"0.{kind}"][:].float() for kind in ("images", "texts"))
        assert images.shape == (15, 2, 24) and texts.shape == (15, 24)
        assert torch.allclose(images.norm(dim=-1), torch.ones(15, 2), atol=2 * tolerance)
        with torch.no_grad():
            wanted = normalize(
                model.encode_text(
                    open_clip.get_tokenizer("teach")([f"caption {number}" for number in range(15)])
                ),
                dim=-1,
            )
        assert (texts - wanted).abs().max() < tolerance
        assert (images[:, 0] - images[:, 1]).abs().amax(dim=1).min() > tolerance  # views differ


def test_killed_and_called_again_ends_with_the_same_bits(tmp_path, data, monkeypatch):
    """In units of five samples, ended without warning in the third; done units are not embedded again."""
    monkeypatch.setattr(reading_module, "UNIT_SAMPLES", 5)
    monkeypatch.setattr(store_module, "_FLUSH_SECONDS", 0.0)
    whole = embed_sources(data, [HashEncoder()], tmp_path / "whole", SETTINGS)
    calls, stock, parent = [], FrozenModel.images, os.getpid()

    def images(self, pixels):
        calls.append(len(pixels))
        if (
            len(calls) == 8 and os.getpid() != parent
        ):  # a unit takes three: 8 pictures four at a time, and 2
            os._exit(9)
        return stock(self, pixels)

    monkeypatch.setattr(FrozenModel, "images", images)
    if (child := os.fork()) == 0:
        embed_sources(data, [HashEncoder()], tmp_path / "broken", SETTINGS)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with pytest.raises(
        UserError, match=r"not finished: (5|10) of 15 samples of source 'a' are missing"
    ):
        open_teacher_folder(tmp_path / "broken")
    embed_sources(data, [HashEncoder()], tmp_path / "broken", SETTINGS)
    assert 0 < sum(calls) < 30
    assert files_of(tmp_path / "broken") == files_of(whole.folder)
    after = sum(calls)
    embed_sources(data, [HashEncoder()], tmp_path / "broken", SETTINGS)
    assert sum(calls) == after  # nothing is left to do


def test_calls_that_share_the_work_end_with_the_same_bits(tmp_path, data, stored, monkeypatch):
    monkeypatch.setattr(reading_module, "UNIT_SAMPLES", 5)
    for part in ((1, 2), (0, 2)):
        embed_sources(data, [HashEncoder()], tmp_path / "parts", replace(SETTINGS, part=part))
    parts, whole = files_of(tmp_path / "parts"), files_of(stored)
    assert parts == whole
    open_teacher_folder(tmp_path / "parts")


def test_samples_that_cannot_be_shown_are_counted_and_have_no_embeddings(tmp_path, capsys):
    data = f"a={write_data(tmp_path / 'a', bad=(3, 8))}"  # 3 is empty
    store = embed_sources(data, [HashEncoder()], tmp_path / "out", SETTINGS)
    images, texts = store.rows["0.images"].array, store.rows["0.texts"].array
    empty = [row for row in range(15) if not images[row].any()]
    assert empty == [3, 8] == [row for row in range(15) if not texts[row].any()]
    assert "Source a: 2 samples cannot be shown (2 undecodable image)" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"sample '0003'.*source 'a'"):
        embed_sources(
            data, [HashEncoder()], tmp_path / "strict", replace(SETTINGS, on_bad_sample="fail")
        )


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "encoders", "sentence"),
    [
        ({"views": 3}, [HashEncoder()], "was begun with views 2, and this call has views 3"),
        ({"seed": 1}, [HashEncoder()], "seed 0, and this call has seed 1"),
        ({"dtype": "bfloat16"}, [HashEncoder()], "dtype float16, and this call has dtype bfloat16"),
        ({"image_size": 20}, [HashEncoder()], "with augmentation RandomResizedCrop"),
        (
            {"auto_augment": "imagenet"},
            [HashEncoder()],
            "no augmentation, and this call has augmentation AutoAugment",
        ),
        ({}, [HashEncoder("other")], "model hash, and this call has model other"),
        ({}, [HashEncoder(), HashEncoder("two")], "no model, and this call has model two"),
        ({}, [HashEncoder(salt=7)], "was begun before the content of models changed"),
        (
            {},
            [HashEncoder(size_px=24)],
            "was begun before the content of models changed",
        ),
    ],
)
def test_a_folder_of_other_embeddings_is_refused_by_name(
    stored, data, settings, encoders, sentence
):
    before = files_of(stored)
    with pytest.raises(UserError, match=sentence):
        embed_sources(data, encoders, stored, replace(SETTINGS, **settings))
    assert files_of(stored) == before


def test_a_folder_of_other_data_is_refused_by_name(tmp_path, stored, data):
    other = write_data(tmp_path / "b", first=100)
    with pytest.raises(UserError, match="sources a, and this call has sources b"):
        embed_sources(f"b={other}", [HashEncoder()], stored, SETTINGS)
    with pytest.raises(UserError, match=r"other data: .*shard 00000\.tar of 'a' differs"):
        embed_sources(f"a={other}", [HashEncoder()], stored, SETTINGS)
    with pytest.raises(
        UserError, match=r"do not fit source 'a': they are of other data: shard 00000\.tar"
    ):
        rows_of(stored, f"a={other}")
    with pytest.raises(UserError, match="have not seen source 'c', only a"):
        rows_of(stored, f"a={tmp_path / 'a'}::c={other}")
    (tmp_path / "a" / "00002.tar").unlink()
    with pytest.raises(UserError, match="they are of 15 samples of 'a', and it holds 10"):
        rows_of(stored, data)


@pytest.mark.parametrize(
    ("differing", "sentence"),
    [
        (
            {"image_size": 24},
            r"was begun with augmentation RandomResizedCrop\(size=\(16, 16\)",
        ),
        (
            {"aug_cfg": {"scale": (0.5, 1.0)}},
            r"RandomResizedCrop\(.*scale=\(0.3, 1.0\).* this call has .*\(0.5, 1.0\)",
        ),
        ({"pixel_path": "pil"}, "pixel path arrays, and this call has augmentation pixel path pil"),
    ],
)
def test_training_with_another_augmentation_is_refused_by_name(stored, data, differing, sentence):
    if "pixel_path" in differing:
        pytest.importorskip("simplejpeg")
    with pytest.raises(UserError, match=sentence):
        rows_of(stored, data, **differing)


def test_training_with_other_captions_is_refused_by_name(stored, data):
    sources = parse_sources(data, captions="all")
    augmentation = augmentation_of(SETTINGS.transform(), SETTINGS.pixel_path)
    with pytest.raises(
        UserError, match="read captions with --captions left out, and this run has all"
    ):
        TeacherRows(open_teacher_folder(stored), sources, augmentation=augmentation, captions="all")


def test_a_folder_without_a_manifest_or_with_a_broken_one_gets_a_sentence(stored):
    (stored / "embeddings.json").write_text("{")
    with pytest.raises(UserError, match=r"embeddings\.json cannot be read"):
        open_teacher_folder(stored)
    (stored / "embeddings.json").unlink()
    with pytest.raises(UserError, match=r"holds no embeddings\.json; make a folder"):
        open_teacher_folder(stored)


def test_a_sample_that_the_teachers_could_not_be_shown_is_named_when_training_reads_it(
    stored, data
):
    for name in ("0.texts.npy", "0.texts.sums.npy"):  # as of a row that was never written
        rows = np.load(stored / name, mmap_mode="r+")
        rows[7] = 0
        rows.flush()
    with pytest.raises(UserError, match=r"has no embedding of sample '0007' of source 'a'"):
        rows_of(stored, data).show(
            RawSample(b"", ((0, ""),), 0, 7, "0007", ""),
            None,
            lambda image: torch.zeros(3, 16, 16, dtype=torch.uint8),
            0,
        )


def test_too_little_room_is_refused_before_the_work(tmp_path, data, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 100))
    with pytest.raises(UserError, match=r"the embeddings take 0\.0 MiB, and .* has 0\.0 MiB free"):
        embed_sources(data, [HashEncoder()], tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out").exists()


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_tells_time_and_size_and_goes_on_when_called_again(tmp_path, data, capsys):
    register(tmp_path / "configs", "teach2", NATIVE_VISION, CLIP_TEXT)
    checkpoint = write_run(tmp_path / "run", random_model("teach2"), {"model": "teach2"})
    words = f"teacher {checkpoint} --train-data {data} --out {tmp_path / 'out'} --views 3".split()
    words += ["--image-size", "32", "--aug-cfg", "scale=(0.6,1.0)", "--device", "cpu"]
    assert zerovl(words) == 0
    said = capsys.readouterr().out
    assert f"15 samples are left to embed, 3 views each, 0.0 MiB in {tmp_path / 'out'}" in said
    assert f"Train with --teacher {tmp_path / 'out'}" in said
    manifest = json.loads((tmp_path / "out" / "embeddings.json").read_text())
    assert manifest["arrays"]["0.texts"][1] == [15, 24] and "scale=(0.6, 1.0)" in str(
        manifest["facts"]["augmentation"]
    )
    assert zerovl(words) == 0 and "0 samples" in capsys.readouterr().out
    assert zerovl([*words[:-2], "--device", "cpu", "--seed", "4"]) == 2
    assert "seed 0, and this call has seed 4" in capsys.readouterr().err
