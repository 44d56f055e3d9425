"""`zerovl finetune` from pairs to an exported model, on the CPU, with the demo's model and pictures drawn here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import locked, write_atomically
from open_clip_zerovl.core.processes import MemoryFull, TrainingProcess
from open_clip_zerovl.data.mixture import schedule_of
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.finetune.data import DataArguments
from open_clip_zerovl.finetune.finetuning import (
    SETTINGS,
    _facts,
    _halved,
    _training,
    starting_folder,
)
from open_clip_zerovl.finetune.proposal import Setting, choose_settings
from open_clip_zerovl.finetune.request import FinetuneRequest
from open_clip_zerovl.finetune.split import Prepared, Split, with_old_pairs
from open_clip_zerovl.models.build import with_text_model
from open_clip_zerovl.sampling.schedule import Sampling
from open_clip_zerovl.shards.files import write_source
from open_clip_zerovl.shards.tar import Sample
from support.scoring import score_checkpoint
from support.tars import encoded
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    random_model,
    register,
    write_bert,
    write_retrieval_set,
    write_run,
)
from training.params import parse
from training.stopping import sentence_of

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220)}
THINGS = ("cat", "dog", "house", "tree", "sun", "moon", "face")
ASKED = [
    "--device=cpu",
    "--set=lr=5e-4",
    "--set=epochs=3",
    "--set=text-augment=",
    "--alphas=0.5",
    "--batch-size=16",
]


def drawn(number: int) -> Sample:
    """A picture of some colours, with two captions that name them."""
    rng = np.random.default_rng(number)
    colour, thing = list(COLOURS)[number % 3], THINGS[number % 7]
    pixels = np.zeros((16, 16, 3), dtype=np.uint8) + np.array(COLOURS[colour], dtype=np.uint8)
    pixels[2 * (number % 7) : 2 * (number % 7) + 2] = 255
    pixels[rng.integers(16), rng.integers(16)] = rng.integers(0, 255, 3)
    captions = f"a {colour} {thing}\nthe {thing} with {colour}"
    files = {"png": encoded(Image.fromarray(pixels)), "txt": captions.encode()}
    return Sample(f"{number:05d}", files)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint of the demo's model, pairs, old pairs, and a set to keep."""
    folder = tmp_path_factory.mktemp("finetune")
    bert = write_bert(folder / "bert")
    name = with_text_model("zerovl-emoji", bert)
    write_run(
        folder / "start",
        random_model(name, seed=1),
        {"model": "zerovl-emoji", "text_model": str(bert)},
    )
    write_source(folder / "mine", [drawn(number) for number in range(100)], shard_size=60)
    write_source(folder / "past", [drawn(number) for number in range(200, 230)], shard_size=20)
    write_retrieval_set(folder / "old", [1] * 10)
    return folder


def prepared_for(before, train_data, new, sources, factors=None) -> Prepared:
    """Inputs of a training whose pictures were not looked at."""
    split = Split({"--data": train_data}, new, np.array([]), None, ())
    return Prepared(DataArguments({}), before, train_data, split, sources, (), factors)


def arguments(made: Path, out: Path, *more: str) -> list[str]:
    start = made / "start" / "checkpoints" / "epoch_1.pt"
    return [*f"finetune --from {start} --data {made / 'mine'} --out {out}".split(), *ASKED, *more]


@pytest.mark.parametrize("captions", ["one-per-epoch", "all", None])
def test_the_share_of_old_pairs_is_one_of_the_samples_that_training_counts(
    made, tmp_path, monkeypatch, captions
):
    """Old pictures with five captions each."""
    old = [drawn(number) for number in range(200, 208)]
    words = "\n".join(f"word {number}" for number in range(5))
    old = [replace(one, files={**one.files, "txt": words.encode()}) for one in old]
    write_source(tmp_path / "many", old, shard_size=9)
    write_source(tmp_path / "few", old[:2], shard_size=9)
    keep = f"many={tmp_path / 'many'}::few={tmp_path / 'few'}"
    start = Encoder("x", device="cpu")
    request = FinetuneRequest(
        start, f"mine={made / 'mine'}", tmp_path, given={"captions": captions}, keep_data=keep
    )
    sources, train_data, factors, (note,) = with_old_pairs(request, request.data, request.keep_data)
    trained = parse_sources(train_data, factors, captions=captions)  # as the training opens them
    new, *taken = schedule_of(trained, 1, Sampling("random"), seed=0, epoch=0).taken.tolist()
    assert new == (200 if captions == "all" else 100) and sum(taken) == pytest.approx(
        new / 4, abs=1
    )
    assert f"{new} new pairs and 20% old ones ({taken[0]} of many, {taken[1]} of few)" in note
    monkeypatch.setattr("open_clip.get_tokenizer", lambda before: None)
    monkeypatch.setattr("open_clip_zerovl.finetune.finetuning.has_logit_bias", lambda before: False)
    prepared = prepared_for("local-dir:/m", train_data, f"old={made / 'old'}", sources, factors)
    facts = _facts(request, prepared)
    assert facts.samples == new + sum(taken)  # whence epochs, batch and warm-up
    settings = choose_settings(facts, request.given)
    args, config = parse(_training(request, prepared, settings, 1).arguments)
    assert (args.train_data, args.train_data_upsampling_factors) == (train_data, factors)
    assert config.freeze_norm_statistics and request.of_training()["--keep-share"] == 0.2


@pytest.mark.parametrize(
    ("flags", "words", "exported"),
    [
        (["--out={tmp}/full"], "holds thesis.txt and no request.json, so this program did not begin it", False),
        (["--out={tmp}/busy"], "another process is fine-tuning in {tmp}/busy", False),
        (["--set", "effective-batch=512"], "batch of 512 is larger than the 85 samples to train on", True),
        (["--retrieval-data=x={made}/mine"], "all pictures of source 'mine' are held out", False),
        (["--zero-shot-data=new={tmp}/flowers"], "{tmp}/flowers does not exist", False),
        (["--rule=mean"], "--rule mean needs retrieval sets of the ability to keep; give --kept, or --rule new", False),
        (["--keep-share=0.3"], "--keep-share 0.3 needs --keep-data NAME=SHARDS", False),
        (["--keep-share=1"], "--keep-share 1.0 is out of range; give a share between 0 and 1", False),
        (
            ["--keep-data=mine={made}/mine", "--set=train-data-upsampling-factors=2"],
            "both decide the weights of the sources", False,
        ),
        (["--keep-data=mine={made}/past"], "two sources are called 'mine'", False),
        (["--kept=held-out={made}/old"], "the set held-out is both new and kept", False),
    ],
)  # fmt: skip
def test_refusals_come_before_the_training(made, tmp_path, capsys, flags, words, exported):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    given = [flag.format(tmp=tmp_path, made=made) for flag in flags]
    with locked(tmp_path / "busy"):
        assert main(arguments(made, tmp_path / "ft", *given)) == 2
    assert words.format(tmp=tmp_path) in capsys.readouterr().err
    assert not [*tmp_path.glob("*/run")] and bool([*tmp_path.glob("*/before")]) == exported


def test_for_want_of_memory_the_micro_batch_is_halved(tmp_path):
    """The effective batch stays, also in the settings that a later call reads; a batch that was given stays."""
    stored = [Setting("batch-size", "4", ""), Setting("dga-steps", "8", "")]
    write_atomically(
        tmp_path / SETTINGS, json.dumps({"ranks": 1, "settings": [asdict(each) for each in stored]})
    )
    request = FinetuneRequest(Encoder("m"), "mine=x", tmp_path)
    said: list[str] = []
    halved = _halved(request, stored, said.append)
    assert [each.value for each in halved] == ["2", "16"] and "micro-batches of 2" in said[0]
    again = json.loads((tmp_path / SETTINGS).read_text())
    assert again["ranks"] == 1 and [each["value"] for each in again["settings"]] == ["2", "16"]
    odd = [replace(each, value={"4": "9", "8": "2"}[each.value]) for each in stored]
    assert [each.value for each in _halved(request, odd, said.append)] == ["3", "6"]
    halved = _halved(request, halved, said.append)
    with pytest.raises(MemoryFull, match="with micro-batches of 1"):
        _halved(request, halved, said.append)
    with pytest.raises(MemoryFull, match="a smaller --set batch-size"):
        _halved(replace(request, given={"batch-size": "4"}), stored, said.append)


def test_a_full_memory_is_known_by_the_trainings_own_sentence(tmp_path):
    """`sentence_of` of the training, and the class that finetune catches."""
    sentence = sentence_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    for words, kind in ((sentence, MemoryFull), ("the data is gone", UserError)):
        (tmp_path / "log").write_text(f"training.main: error: {words}\n")
        child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
        with pytest.raises(UserError) as caught:
            TrainingProcess(child, tmp_path / "log").check()
        assert type(caught.value) is kind


@pytest.mark.slow  # two trainings in processes of their own: 40 s
@pytest.mark.timeout(600)
def test_a_whole_fine_tuning_and_later_calls(made, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(arguments(made, out)) == 0
    said = capsys.readouterr()
    result = json.loads((out / "finetune.json").read_text())

    # The table equals the output of `zerovl retrieval`.
    held_out = f"held-out={out / 'data' / 'held-out'}"
    points = {point["alpha"]: point["results"]["held-out"] for point in result["curve"]["points"]}
    alpha = result["curve"]["chosen"]["alpha"]
    for model, point in ((out / "before", 0), (result["checkpoint"], 1), (out / "model", alpha)):
        by_hand = score_checkpoint(str(model), held_out)["held-out"]
        assert {key: points[point][key] for key in by_hand} == pytest.approx(by_hand, abs=1e-9)
        assert f"{by_hand['rsum']:.1f} " in said.out
    assert points[1]["rsum"] > points[0]["rsum"]
    assert by_hand["images"] == 15 and "No --kept set was given" in said.out

    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{out / 'model'}")
    assert model.encode_text(
        open_clip.get_tokenizer(f"local-dir:{out / 'model'}")(["a red cat"])
    ).shape == (1, 128)
    assert len(list((out / "run" / "checkpoints").glob("epoch_*.pt"))) <= 2

    # The same call has nothing to do; another training is refused; a set to keep needs no new training.
    log = (out / "training.log").read_bytes()
    assert main(arguments(made, out)) == 0
    again = capsys.readouterr()
    assert "finished before" in again.err and again.out.endswith(said.out)
    assert main(arguments(made, out, "--set", "lr=1e-3")) == 2
    assert (
        "was begun with --set lr=5e-4, and this call has --set lr=1e-3; repeat"
        in capsys.readouterr().err
    )
    for number in range(12):
        place = tmp_path / "things" / THINGS[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(drawn(300 + number).files["png"])
    table = tmp_path / "old.csv"  # packed at the door, as each data argument is
    lines = ["image,caption"]
    for number in range(400, 412):
        (tmp_path / f"{number}.png").write_bytes(drawn(number).files["png"])
        lines.append(f"{number}.png,picture number {number}")
    table.write_text("\n".join(lines))
    more = [
        f"--kept=old={table}",
        "--keep=0",
        f"--zero-shot-data=things={tmp_path / 'things'}",
    ]
    assert main(arguments(made, out, *more)) == 0
    kept = capsys.readouterr().out
    shares = json.loads((out / "finetune.json").read_text())["zero_shot"]["things"]
    assert len(shares) == 3 and all(own["images"] == 12 for own in shares.values())
    assert "old (kept): 12 pictures" in kept and "No --kept set" not in kept
    assert (out / "training.log").read_bytes() == log


@pytest.mark.slow  # three trainings: 60 s
@pytest.mark.timeout(600)
def test_a_killed_call_goes_on_and_ends_as_one_that_was_not(made, tmp_path):
    """Beside old pairs."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = [
        f"--keep-data=past={made / 'past'}",
        f"--kept=old={made / 'old'}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(out: Path) -> subprocess.Popen:
        line = [sys.executable, "-m", "open_clip_zerovl.cli", *arguments(made, out, *more)]
        return subprocess.Popen(
            line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    first = start(killed)
    while first.poll() is None and not (killed / "run" / "checkpoints" / "epoch_1.pt").is_file():
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not (killed / "finetune.json").exists()
    for out in (killed, whole):
        process = start(out)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    results = [json.loads((out / "finetune.json").read_text()) for out in (killed, whole)]
    assert (
        results[0]["epochs"] == results[1]["epochs"]
        and results[0]["best epoch"] == results[1]["best epoch"]
    )
    models = [
        open_clip.create_model_and_transforms(f"local-dir:{out / 'model'}")[0]
        for out in (killed, whole)
    ]
    for key, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[key]), key


def test_a_tag_of_open_clip_becomes_a_folder_to_start_from(tmp_path, monkeypatch):
    name = register(
        tmp_path,
        "finetuned-tiny",
        NATIVE_VISION,
        {**CLIP_TEXT, "context_length": 32},
        quick_gelu=True,
    )
    model = random_model(name, seed=5)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    tags = {"mine": {"url": "", "mean": (0.5,) * 3, "std": (0.25,) * 3, "quick_gelu": True}}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, name, tags)
    monkeypatch.setattr(
        "open_clip.factory.download_pretrained", lambda *_, **__: str(tmp_path / "weights.pt")
    )
    start = Encoder(f"{name}/mine", device="cpu"), tmp_path / "before"
    said: list[str] = []
    folder = starting_folder(*start, said.append)
    assert (
        starting_folder(*start, said.append) == folder and len(said) == 1
    )  # a second call finds it
    found, _, _ = open_clip.create_model_and_transforms(folder)
    assert tuple(found.visual.preprocess_cfg["mean"]) == (0.5,) * 3
    picture, text = torch.randn(1, 3, 32, 32), torch.arange(32)[None]
    for own, theirs in zip(found(picture, text), model(picture, text), strict=True):
        assert torch.equal(own, theirs)
