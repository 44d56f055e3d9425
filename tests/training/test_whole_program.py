"""The whole program: gradients of two ranks are those of one graph, and a resumed run ends with the same weights."""

from __future__ import annotations

import json
import re

import open_clip
import pytest
import torch

from open_clip_zerovl.losses import ContrastiveLoss, reversed_partner
from open_clip_zerovl.recipe.mixup import CoinFlipMixup, Mix
from support.dense_loss import DenseLoss
from support.dga_reference import errors as relative_errors
from support.programs import COMMON, flat_tensors, launch, state_of
from support.replayed import features_of, gradient_errors
from support.tars import noise_jpeg, write_source, write_tar
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, NUMBERED, bert_text, write_bert


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two sources whose captions and pictures repeat, two with longer captions, and two models: CLIP's text tower, or BERT."""
    folder = tmp_path_factory.mktemp("whole")
    for name, first in (("a", 0), ("b", 100)):
        members = []
        for number in range(first, first + 32):
            members.append((f"{number:04d}.jpg", noise_jpeg(number % 8, 50, 44)))
            members.append((f"{number:04d}.txt", f"{name} picture {number % 5}".encode()))
        write_tar(folder / name / "00000.tar", members)
    caption = "a big cat with the red house of"
    for name, first in (("c", 0), ("d", 1000)):
        write_source(folder / name, first, 100, 30, px=40, caption=caption)
    texts = {"clip": CLIP_TEXT, "bert": bert_text(write_bert(folder / "words", words=NUMBERED))}
    for name, text in texts.items():
        config = {"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": text}
        (folder / name).mkdir()
        (folder / name / "tiny.json").write_text(json.dumps(config))
    return folder


def recorded(folder, model: str, name: str, words: str) -> list:
    """The records of two real ranks of their first steps: inputs, random state, weights, gradients."""
    config, record = folder / model / "tiny.json", folder / name
    arguments = [*COMMON[: COMMON.index("--warmup")], *words.split(), "--name", name]
    launch("ours", config, arguments, ranks=2, gradient=record, cwd=folder)
    open_clip.add_model_config(str(config))
    ranks = (torch.load(f"{record}.{rank}", weights_only=True) for rank in range(2))
    return list(zip(*ranks, strict=True))


SHARED = """--train-data a={0}/a::b={0}/b --debiased-sampling --aug-cfg scale=(0.3,1.0) --batch-size 4 --dga-steps 2 --epochs 1
    --force-custom-text --warmup 2 --token-drop 0.25"""


def test_gradient_on_two_ranks_is_that_of_the_dense_loss(place):
    """Two ranks, two micro-batches, row chunks, patch dropout, shared positives; without them (control) it is another."""
    words = f"{SHARED.format(place)} --positives both --loss-chunk 3 --workers 1"
    steps = recorded(place, "clip", "dense", words)
    model = open_clip.create_model(
        "tiny", output_dict=True, force_custom_text=True, force_patch_dropout=0.25
    ).train()
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


METHODS = """--train-data c={0}/c::d={0}/d --debiased-sampling --coin-flip-mixup --mixup-alpha 1.0 --text-augment 0.2
    --token-drop 0.25 --auto-augment imagenet --aug-cfg scale=(0.6,1.0) --dga-steps 4 --batch-size 3 --no-embedding-decay
    --warmup-share 0.1 --lr-min 1e-5 --train-num-samples 48 --seed 3 --workers 1 --epochs 1"""


def one_graph(entries, mix: Mix, *, replay_masks: bool = True) -> tuple[dict, float]:
    """The gradient of all ranks' and micro-batches' rows in one graph, under the masks that the ranks drew."""
    model = open_clip.create_model(
        "tiny", pretrained_text=False, output_dict=True, force_patch_dropout=0.25
    ).train()
    model.load_state_dict(entries[0]["weights"])
    mixup = CoinFlipMixup(1.0)
    mixup.attach(model)
    assert all(entry["loss_inputs"]["mixup_lambda"] == mix.weight for entry in entries)
    sizes = [len(images) for entry in entries for images, _ in entry["prepared"]]
    with mixup.applied(mix):
        features = features_of(model, entries, replay_masks=replay_masks)
        partner = reversed_partner(sizes)
        loss = ContrastiveLoss()(**features, mixup_lambda=mix.weight, partner=partner)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, float(loss.detach())


def test_gradient_of_all_methods_on_two_ranks_is_that_of_one_graph(place):
    """fp32, 5e-5 as in invariant 1; other masks (negative control) miss it by far."""
    coins = set()
    mixup = CoinFlipMixup(1.0, seed=3)  # the draws of each rank
    for entries in recorded(place, "bert", "methods", METHODS.format(place)):
        # each rank draws masks of its own
        assert not torch.equal(entries[0]["rng"], entries[1]["rng"])
        mix = mixup.draw()
        coins.add(mix.mixes_images)
        reference, loss = one_graph(entries, mix)
        first, second = (entry["gradients"] for entry in entries)
        for entry in entries:
            assert float(entry["loss"]) == pytest.approx(loss, rel=1e-5)
            found = relative_errors(entry["gradients"], reference)
            assert max(found.values()) <= 5e-5, max(found, key=found.get)
        assert all(torch.equal(first[name], second[name]) for name in reference)
        wrong, _ = one_graph(entries, mix, replay_masks=False)
        assert max(relative_errors(first, wrong).values()) > 0.05
    assert coins == {True, False}  # both sides of the coin came up


@pytest.mark.parametrize(
    "words",
    [
        "--siglip --loss-chunk=3",
        pytest.param(
            "--lora=3 --lr=1e-3 --lr-head=1e-4 --layer-decay=0.8",
            marks=pytest.mark.slow(reason="a second pair of runs, of adapters and rates by layer"),
        ),
    ],
)
def test_resumed_in_the_middle_of_an_epoch_ends_with_the_same_weights(place, words):
    """As after a kill: from the step checkpoint of a run's second step, in two loader workers."""
    name = f"whole{len(words)}"
    words = f"{SHARED.format(place)} --workers=2 --save-every-steps=2 --keep-checkpoints=9 {words}"
    arguments, config = [*COMMON, *words.split(), "--name"], place / "clip" / "tiny.json"
    done = launch("ours", config, [*arguments, name], cwd=place)
    assert re.search(r"By source: .*[ab] \S+", done.stderr)
    checkpoint = min((place / "logs" / name / "checkpoints").glob("step_0000_*.pt"))
    resumed = [f"{name}-resumed", "--resume", str(checkpoint)]
    launch("ours", config, [*arguments, *resumed], cwd=place)
    first, second = (flat_tensors(state_of(place, each)) for each in (name, resumed[0]))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
