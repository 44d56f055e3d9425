"""Exact resume (invariant 4): killed at any step and resumed, a run ends with the weights of one never interrupted."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from torch import nn

from open_clip_zerovl.checkpoints.loading import MODEL_ENTRY
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.sampling.schedule import Batching
from support.programs import COMMON, flat_tensors, kill_when, launch, state_of
from support.tars import write_source
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, NUMBERED, bert_text, register, write_bert
from training import train
from training.checkpointing import (
    SETTINGS_ENTRY,
    Position,
    compared_settings,
    entry_of,
    keep_settings,
    of_this_line,
    read_position,
    require_finite,
    require_same_function,
    settings_of,
)
from training.main import main
from training.params import parse
from training.train import settle_buckets

EPOCHS = 3


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    bert = write_bert(folder / "bert", words=NUMBERED)
    config = {
        "embed_dim": 24,
        "vision_cfg": {**NATIVE_VISION, "patch_dropout": 0.25},
        "text_cfg": bert_text(bert),
    }
    (folder / "tiny.json").write_text(json.dumps(config))
    data = "::".join(
        f"{name}={write_source(folder / name, first, count, 13)}"
        for name, first, count in (("a", 0, 90), ("b", 1000, 50), ("c", 2000, 40))
    )
    return folder, data


def arguments_of(data: str, name: str, *extra: str) -> list[str]:
    words = f"""--train-data {data} --debiased-sampling --batch-size 4 --dga-steps 2 --epochs {EPOCHS} --name {name}
    --save-every-steps 2 --aug-cfg scale=(0.6,1.0) --coin-flip-mixup --mixup-alpha 1.0 --text-augment 0.2"""
    return [*COMMON, *words.split(), *extra]


def assert_same_weights(folder: Path, names: tuple[str, str]) -> None:
    first, second = (flat_tensors(state_of(folder, name, EPOCHS)) for name in names)
    first.pop("/zerovl", None)
    assert first.keys() == second.keys()
    different = [key for key in first if not torch.equal(first[key], second[key])]
    assert not different


@pytest.mark.slow(
    reason="four runs, half a minute; the fast tests resume one in the middle of an epoch (test_whole_program)"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", ["0", "2"])
def test_killed_and_resumed_equals_never_interrupted(workplace, workers):
    """One rank, with dropout, token drop, mixup, word augmentation and random crops; killed without warning in the second
    epoch, then stopped by SIGTERM in the third."""
    folder, data = workplace
    whole, broken = f"whole{workers}", f"broken{workers}"
    arguments = arguments_of(data, whole, "--workers", workers)
    launch("ours", folder / "tiny.json", arguments, cwd=folder)
    arguments = arguments_of(data, broken, "--workers", workers, "--keep-checkpoints", "3")
    kill_when(folder, broken, arguments, 1, "step_0001_*.pt", signal.SIGKILL)
    resumed = [*arguments, "--resume", "latest"]
    status = kill_when(folder, broken, resumed, 1, "step_0002_*.pt", signal.SIGTERM)
    assert status == 85 and (folder / "logs" / broken / "requeue").exists()
    assert len(list((folder / "logs" / broken / "checkpoints").glob("step_*.pt"))) <= 3
    launch("ours", folder / "tiny.json", resumed, cwd=folder)
    assert not (folder / "logs" / broken / "requeue").exists()
    assert_same_weights(folder, (whole, broken))


@pytest.mark.slow  # four two-rank runs, about two minutes on two cores
@pytest.mark.timeout(900)
def test_two_ranks_killed_and_resumed(workplace):
    folder, data = workplace
    for name in ("whole-ranks", "broken-ranks"):
        arguments = arguments_of(data, name, "--workers", "1")
        if name.startswith("broken"):
            kill_when(folder, name, arguments, 2, "step_0000_*.pt", signal.SIGKILL)
            arguments.extend(["--resume", "latest"])
            # torchrun passes SIGTERM on to the ranks, which agree on the step after which they stop
            assert kill_when(folder, name, arguments, 2, "step_0001_*.pt", signal.SIGTERM) != 0
            assert (folder / "logs" / name / "requeue").exists()
        launch("ours", folder / "tiny.json", arguments, ranks=2, cwd=folder)
    assert_same_weights(folder, ("whole-ranks", "broken-ranks"))


@pytest.mark.parametrize(
    ("step", "now", "steps", "begin"),
    [
        (10, Batching(32, 1, 2, 4), 99, 10),  # the same: nothing is said
        (10, Batching(32, 1, 1, 4), 99, 20),  # goes on at the same sample count
        (10, Batching(16, 1, 4, 4), 99, 10),
        (10, Batching(16, 2, 2, 4), 99, 10),
        (10, Batching(32, 1, 2, 2), 99, 10),  # other workers
        # Larger batches of several sources leave more over, and their epoch may be shorter than the part that is done.
        (10, Batching(64, 1, 2, 4), 4, 4),
        (0, Batching(64, 1, 2, 4), 99, 0),  # an epoch's end: nothing is approximate
    ],
)
def test_where_a_run_goes_on_and_what_it_says(step, now, steps, begin, caplog):
    taken = Batching(32, 1, 2, 4)
    assert Position(1, step, taken).start_step(now, steps) == begin
    said = step > 0 and now != taken
    assert len(caplog.messages) == said and ("approximate" in caplog.text) == said


def test_a_position_is_read_as_it_was_written_and_one_of_another_format_is_refused():
    position = Position(1, 10, Batching(16, 2, 2, 4), {"graphs": 2.0})
    entry = entry_of(position)
    assert read_position({"zerovl": entry}) == position and read_position({"epoch": 1}) is None
    for written in (1, 99, "x"):
        with pytest.raises(UserError, match=f"has format {written}, and this release reads 2"):
            read_position({"zerovl": {**entry, "format": written}})


MIDDLE, END = Position(1, 10, Batching(8)), Position(1, 0, Batching(8))
OTHER_ORDER = "the remaining batches would contain different samples"
LINE = ["--train-data", "a=/x", "--sampling", "debiased", "--lr", "1e-3"]


def settings(*words: str, batch: int = 8, name: str = "a", weight: float = 1.0) -> dict[str, str]:
    args, _ = parse([*LINE, *words])
    return settings_of(args, Batching(batch), [Source(name, ("0.tar",), (100,), weight)])


@pytest.mark.parametrize(
    ("words", "others", "middle", "end"),
    [
        ("", {}, [], []),
        ("--workers 2 --wd 0", {}, [], []),  # what the step and the optimizer say themselves
        ("--lr 5e-4 --epochs 40", {}, *2 * [["from here on: --lr 0.0005 after 0.001, --epochs 40 after 32."]]),
        ("--warmup-share 0.1", {}, *2 * [["from here on: --warmup-share 0.1 after left out."]]),
        ("--pretrained-image", {}, *2 * [["--pretrained-image: no effect, since the weights are the checkpoint's."]]),
        ("--seed 1", {}, "--seed 0, and this run has 1", ["of epoch 1 with other settings than before: --seed 1 after 0."]),
        (
            "--sampling sequential --source-order a", {}, "--sampling debiased, and this run has sequential",
            ["--sampling sequential after debiased; --source-order a after left out."],
        ),
        ("--captions all", {}, "--captions left out, and this run has all", ["--captions all after left out"]),
        ("--train-num-samples 50", {}, "--train-num-samples left out, and", ["--train-num-samples 50 after"]),
        ("--dataset-resampled", {}, "--dataset-resampled left out, and this run has given", ["--dataset-resampled given"]),
        ("", {"weight": 2.0}, "--train-data-upsampling-factors 1, and this run has 2", ["upsampling-factors 2 after 1"]),
        ("", {"batch": 16}, [], ["an effective batch of 16 after 8."]),  # `start_step` says the rest
        ("--seed 1", {"name": "b"}, ["and this run has b (100). The rest"], ["the sources b (100) after a (100); --seed 1"]),
    ],
)  # fmt: skip
def test_what_a_resume_does_with_each_setting_that_is_not_the_checkpoints(
    words, others, middle, end
):
    """Refused in the middle of an epoch, if its samples would come in another order; else named with what happens."""
    now = settings(*words.split(), **others)
    for before in ({}, {SETTINGS_ENTRY: now}):  # of open_clip, or with the same settings
        assert compared_settings(before, now, MIDDLE) == []
    checkpoint = {"epoch": 1, SETTINGS_ENTRY: settings()}
    assert compared_settings(checkpoint, {}, END) == []  # a run without flags of ours
    for position, expected in ((MIDDLE, middle), (END, end), (None, end)):
        if isinstance(expected, str):
            with pytest.raises(UserError, match=f"{expected}.*{OTHER_ORDER}"):
                compared_settings(checkpoint, now, position)
        else:
            said = compared_settings(checkpoint, now, position)
            assert len(said) == len(expected)
            assert all(part in sentence for part, sentence in zip(expected, said, strict=True))


CONFIG = {"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT}
HEADS = 2 * CLIP_TEXT["heads"]


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (
            {**CONFIG, "quick_gelu": True},
            "was trained with quick_gelu True, and this run's model has not given",
        ),
        (
            {**CONFIG, "text_cfg": {**CLIP_TEXT, "heads": HEADS}},
            f"was trained with text_cfg.heads {HEADS}, and .* has",
        ),
    ],
)
def test_a_model_of_the_same_shapes_and_another_function_is_not_resumed(saved, words):
    """With an edited --model-config, or another --model, the run went on without a word."""
    with pytest.raises(UserError, match=f"--resume a.pt {words}"):
        require_same_function({MODEL_ENTRY: saved}, CONFIG, "a.pt")
    written_out = {
        **CONFIG,
        "quick_gelu": False,
        "text_cfg": {**CLIP_TEXT, "patch_dropout": 0.5, "ls_init_value": None},
    }
    require_same_function({MODEL_ENTRY: written_out}, CONFIG, "a.pt")
    require_same_function({}, CONFIG, "of an earlier release.pt")
    require_same_function({MODEL_ENTRY: saved}, None, "a.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["0.weight", "1.running_var", "exp_avg_sq"])
def test_a_checkpoint_with_numbers_that_are_not_finite_is_refused(place, value):
    """Of a training and bare; infinite numbers have a place in a buffer, such as a mask."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state, moments = model.state_dict(), optimizer.state_dict()
    training = {"state_dict": state, "optimizer": moments}
    require_finite(training, model, "a.pt")
    holders = [training, state] if place in state else [training]
    (state if place in state else moments["state"][0])[place].view(-1)[0] = value
    for checkpoint in holders:
        if (place, value) == ("1.running_var", float("inf")):
            require_finite(checkpoint, model, "a.pt")
            continue
        with pytest.raises(UserError, match="of a.pt holds 1 numbers"):
            require_finite(checkpoint, model, "a.pt")


@pytest.mark.parametrize("taken", [True, False])
def test_a_resumed_optimizer_takes_the_settings_of_the_command_line_or_says_that_it_keeps_its_own(
    taken, caplog
):
    """torch's load_state_dict takes those of the checkpoint, and the log showed those of the command line."""

    def optimizer(decay, betas, eps, rate_scale):
        model = nn.Linear(2, 2)
        groups = [{"params": [model.bias], "weight_decay": 0.0, "rate_scale": rate_scale}]
        groups += [{"params": [model.weight], "weight_decay": decay, "rate_scale": rate_scale}]
        return torch.optim.AdamW(groups, lr=0.1, betas=betas, eps=eps)

    before, now = (0.2, (0.9, 0.98), 1e-6, 1.0), (0.0, (0.9, 0.9), 1e-4, 0.5)
    saved = optimizer(*before).state_dict()
    same = keep_settings(optimizer(*before), taken=taken)
    same.load_state_dict(saved)
    assert not caplog.messages and same.state_dict()["param_groups"] == saved["param_groups"]
    other = keep_settings(optimizer(*now), taken=taken)
    other.load_state_dict(saved)
    group = other.param_groups[1]
    held = tuple(group[name] for name in ("weight_decay", "betas", "eps", "rate_scale"))
    assert held == (now if taken else before) and other.param_groups[0]["weight_decay"] == 0.0
    (said,) = caplog.messages
    assert said == (
        "The resumed optimizer takes betas (0.9, 0.9) after (0.9, 0.98), eps 0.0001 after 1e-06, rate_scale 0.5 after 1.0, "
        "weight_decay 0.0 after 0.2."
        if taken
        else "The resumed optimizer keeps the checkpoint's betas (0.9, 0.98), and not (0.9, 0.9), eps 1e-06, and not 0.0001, "
        "rate_scale 1.0, and not 0.5, weight_decay 0.2, and not 0.0."
    )


def clip_and_optimizer(divide):
    """A small CLIP after two steps of AdamW on its parameters divided in two groups: spared from weight decay, decayed."""
    torch.manual_seed(0)
    model = CLIP(8, CLIPVisionCfg(**NATIVE_VISION), CLIPTextCfg(**{**CLIP_TEXT, "vocab_size": 64}))
    spared = [p for name, p in model.named_parameters() if divide(name, p)]
    decayed = [p for name, p in model.named_parameters() if not divide(name, p)]
    optimizer = torch.optim.AdamW(
        [{"params": spared, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.2}]
    )
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def by_open_clip_3(name, parameter):
    return parameter.ndim < 2


def by_open_clip_4(name, parameter):
    return parameter.ndim < 2 or "positional_embedding" in name


def test_an_optimizers_state_of_open_clip_3_goes_on_in_the_groups_of_4():
    """Each parameter keeps its own moments, and the groups their own decay; what already fits is left as it is."""
    old_model, old = clip_and_optimizer(by_open_clip_3)
    model, optimizer = clip_and_optimizer(by_open_clip_4)
    for parameter in old_model.parameters():
        parameter.grad = torch.ones_like(parameter)
    old.step()  # now the moments differ from those of `optimizer`
    with pytest.raises(ValueError, match="^loaded state dict"):
        optimizer.load_state_dict(old.state_dict())  # a negative control, with torch's message
    optimizer.load_state_dict(of_this_line(old.state_dict(), model, optimizer))
    for (name, before), after in zip(old_model.named_parameters(), model.parameters(), strict=True):
        assert old.state[before].keys() == optimizer.state[after].keys(), name
        assert all(
            torch.equal(old.state[before][key], optimizer.state[after][key])
            for key in old.state[before]
        ), name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.2]
    for state in (optimizer.state_dict(), {"state": {}, "param_groups": [{"params": [0, 1]}]}):
        assert of_this_line(state, model, optimizer) is state


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        return {
            "image_features": self.norm(self.image(image)),
            "text_features": self.text(text),
            "logit_scale": self.logit_scale.exp(),
        }


@pytest.mark.parametrize("compiled", [False, True])
def test_the_layout_is_ready_before_the_first_step(compiled, one_rank):
    model = nn.parallel.DistributedDataParallel(Towers())
    statistics = model.module.norm.running_mean.clone()
    called = torch.compile(model, backend="eager") if compiled else model
    assert not model.reducer._rebuild_buckets()  # no backward pass has shown the order of gradients
    settle_buckets(
        called, (torch.randn(2, 4), torch.randn(2, 4)), lambda *inputs: inputs, torch.enable_grad
    )
    assert model.reducer._rebuild_buckets()  # in the next forward pass, the first that counts
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model.module.norm.running_mean, statistics)


def test_a_run_that_goes_on_from_an_epochs_last_step_settles_and_keeps_what_auto_decided(
    tmp_path, monkeypatch
):
    """Nothing of the epoch is left, and its checkpoint comes before any step."""
    settled = []
    monkeypatch.setattr(train, "settle_buckets", lambda *_: settled.append(1))
    monkeypatch.chdir(tmp_path)
    register(tmp_path / "configs", "tiny", NATIVE_VISION, CLIP_TEXT)
    words = f"""--train-data a={write_source(tmp_path / "a", 0, 16, 16)} --batch-size 2 --dga-steps 4 --dga-retain auto --name x
    --workers 0 --save-every-steps 1 --keep-checkpoints 9"""
    assert main([*COMMON, *words.split(), "--epochs", "1"]) == 0
    saved = tmp_path / "logs" / "x" / "checkpoints"
    before = torch.load(saved / "epoch_1.pt", weights_only=True)["zerovl"]
    (saved / "epoch_1.pt").unlink()
    assert main([*COMMON, *words.split(), "--epochs", "2", "--resume", "latest"]) == 0
    assert len(settled) == 2 and before["retained"]
    assert torch.load(saved / "epoch_1.pt", weights_only=True)["zerovl"] == before
