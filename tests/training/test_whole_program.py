"""The whole program: the gradient of a step is that of the dense loss, a resumed run ends with the same weights."""

from __future__ import annotations

import json
import re

import open_clip
import pytest
import torch

from support.dense_loss import DenseLoss
from support.programs import COMMON, flat_tensors, launch, state_of
from support.replayed import gradient_errors
from support.tars import noise_jpeg, write_tar
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two sources whose captions and pictures repeat, and the config of a model that drops patches."""
    folder = tmp_path_factory.mktemp("whole")
    for name, first in (("a", 0), ("b", 100)):
        members = []
        for number in range(first, first + 32):
            members.append((f"{number:04d}.jpg", noise_jpeg(number % 8, 50, 44)))
            members.append((f"{number:04d}.txt", f"{name} picture {number % 5}".encode()))
        write_tar(folder / name / "00000.tar", members)
    vision = {**NATIVE_VISION, "patch_dropout": 0.25}
    (folder / "tiny.json").write_text(
        json.dumps({"embed_dim": 24, "vision_cfg": vision, "text_cfg": CLIP_TEXT})
    )
    return folder, f"a={folder}/a::b={folder}/b"


def arguments_of(data, name, *extra):
    words = f"""--train-data {data} --debiased-sampling --aug-cfg scale=(0.3,1.0) --batch-size 4
    --dga-steps 2 --epochs 1 --name {name} --force-custom-text"""
    return [*COMMON, *words.split(), *extra]


def test_gradient_on_two_ranks_is_that_of_the_dense_loss(place):
    """Two ranks, two micro-batches, row chunks, patch dropout, shared positives; without them (control) it is another."""
    folder, data = place
    extra = ["--positives", "both", "--loss-chunk", "3", "--workers", "1"]
    arguments = arguments_of(data, "gradient", *extra)
    launch(
        "ours", folder / "tiny.json", arguments, ranks=2, gradient=folder / "gradient", cwd=folder
    )
    open_clip.add_model_config(str(folder / "tiny.json"))
    model = open_clip.create_model("tiny", output_dict=True, force_custom_text=True).train()
    of_ranks = (torch.load(f"{folder}/gradient.{rank}", weights_only=True) for rank in range(2))
    steps = list(zip(*of_ranks, strict=True))
    assert steps
    for entries in steps:
        model.load_state_dict(entries[0]["weights"])
        parts = [entry["loss_inputs"]["ids"] for entry in entries]
        ids = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        assert len(ids["image"]) == 16 > len(ids["image"].unique())
        value, errors = gradient_errors(model, entries, DenseLoss(positives="both"), ids=ids)
        assert all(float(entry["loss"]) == pytest.approx(value, rel=1e-5) for entry in entries)
        assert max(errors) <= 5e-5
        assert min(gradient_errors(model, entries, DenseLoss(), ids=ids)[1]) >= 0.05


def test_resumed_in_the_middle_of_an_epoch_ends_with_the_same_weights(place):
    """As after a kill: from the step checkpoint of a run's second step, in two loader workers."""
    folder, data = place
    extra = ["--workers=2", "--save-every-steps=2", "--keep-checkpoints=9"]
    extra += ["--siglip", "--loss-chunk=3"]
    done = launch("ours", folder / "tiny.json", arguments_of(data, "whole", *extra), cwd=folder)
    assert re.search(r"By source: .*[ab] \S+", done.stderr)
    checkpoint = sorted((folder / "logs" / "whole" / "checkpoints").glob("step_0000_*.pt"))[0]
    resumed = [*arguments_of(data, "resumed", *extra), "--resume", str(checkpoint)]
    launch("ours", folder / "tiny.json", resumed, cwd=folder)
    first, second = (flat_tensors(state_of(folder, name)) for name in ("whole", "resumed"))
    assert first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
    resumed[resumed.index("--name") + 1] = "other"
    done = launch("ours", folder / "tiny.json", [*resumed, "--seed", "9"], cwd=folder, status=2)
    assert "was taken in the middle of epoch 0 with --seed" in done.stderr
