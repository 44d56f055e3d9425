"""Exact resume (invariant 4): killed at any step and resumed, a run ends with the weights of one never interrupted."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.schedule import Batching
from support.programs import COMMON, flat_tensors, kill_when, launch, state_of
from support.tars import write_source
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, WORDS, bert_text, write_bert
from training.checkpointing import newest_whole
from training.resume import Position, entry_of, load_checkpoint, of_this_line, read_position
from training.run import OTHER_GROUPS
from training.stopping import Preemption

EPOCHS = 3


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    bert = write_bert(
        folder / "bert", words=[*WORDS, "sample", *"0123456789", *(f"##{digit}" for digit in "0123456789")]
    )
    config = {"embed_dim": 24, "vision_cfg": {**NATIVE_VISION, "patch_dropout": 0.25}, "text_cfg": bert_text(bert)}
    (folder / "tiny.json").write_text(json.dumps(config))
    data = "::".join(
        f"{name}={write_source(folder / name, first, count, 13)}"
        for name, first, count in (("a", 0, 90), ("b", 1000, 50), ("c", 2000, 40))
    )
    return folder, data


def arguments_of(data: str, name: str, *extra: str) -> list[str]:
    return [
        *COMMON, "--train-data", data, "--debiased-sampling", "--batch-size", "4", "--dga-steps", "2", "--epochs",
        str(EPOCHS), "--name", name, "--save-every-steps", "2", "--aug-cfg", "scale=(0.6,1.0)", "--coin-flip-mixup",
        "--mixup-alpha", "1.0", "--text-augment", "0.2", "--ablate", "temperature-parameter", *extra,
    ]  # fmt: skip


def assert_same_weights(folder: Path, names: tuple[str, str]) -> None:
    first, second = (flat_tensors(state_of(folder, name, EPOCHS)) for name in names)
    first.pop("/zerovl", None)
    assert first.keys() == second.keys()
    different = [key for key in first if not torch.equal(first[key], second[key])]
    assert not different


@pytest.mark.slow(
    reason="four runs, half a minute; test_teacher resumes one in the middle of an epoch in the fast tests"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", ["0", "2"])
def test_killed_and_resumed_equals_never_interrupted(workplace, workers):
    """One rank, with dropout, token drop, mixup, word augmentation and random crops; killed without warning in the second
    epoch, then stopped by SIGTERM in the third."""
    folder, data = workplace
    whole, broken = f"whole{workers}", f"broken{workers}"
    arguments = arguments_of(data, whole, "--workers", workers)
    done = launch("ours", folder / "tiny.json", arguments, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    arguments = arguments_of(data, broken, "--workers", workers, "--keep-checkpoints", "3")
    kill_when(folder, broken, arguments, 1, "step_0001_*.pt", signal.SIGKILL)
    resumed = [*arguments, "--resume", "latest"]
    status = kill_when(folder, broken, resumed, 1, "step_0002_*.pt", signal.SIGTERM)
    assert status == 85 and (folder / "logs" / broken / "requeue").exists()
    assert len(list((folder / "logs" / broken / "checkpoints").glob("step_*.pt"))) <= 3
    done = launch("ours", folder / "tiny.json", resumed, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
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
        done = launch("ours", folder / "tiny.json", arguments, ranks=2, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
    assert_same_weights(folder, ("whole-ranks", "broken-ranks"))


def test_newest_whole_skips_cut_off_files_and_leftovers(tmp_path, caplog):
    """open_clip takes the last name: a leftover tmp.pt, or a file that was cut off."""
    for name in (
        "epoch_1.pt",
        "epoch_2.pt",
        "step_0001_00000005.pt",
        "step_0002_00000007.pt",
        "tmp.pt",
        "epoch_latest.pt",
    ):
        torch.save({"a": torch.zeros(100)}, tmp_path / name)
    cut = tmp_path / "step_0002_00000007.pt"
    cut.write_bytes(cut.read_bytes()[:-50])
    with caplog.at_level(logging.WARNING):
        assert newest_whole(str(tmp_path)) == str(tmp_path / "epoch_2.pt")
    assert "step_0002_00000007.pt" in caplog.text and "cut off" in caplog.text
    assert newest_whole(str(tmp_path / "nothing")) is None


def test_another_world_size_goes_on_at_the_same_sample_count(caplog):
    taken = Position(1, 10, Batching(32, 1, 2, 4))
    assert taken.start_step(taken) == 10 and not caplog.text
    with caplog.at_level(logging.WARNING):
        assert taken.start_step(Position(1, 0, Batching(32, 1, 1, 4))) == 20
        assert taken.start_step(Position(1, 0, Batching(16, 1, 4, 4))) == 10
    assert "approximate" in caplog.text
    # Larger batches of several sources leave more over, and their epoch may be shorter than what was done of it.
    assert taken.start_step(Position(1, 0, Batching(64, 1, 2, 4)), steps=4) == 4
    assert taken.start_step(replace(taken, step=0), steps=9) == 9


def test_going_on_in_the_middle_of_an_epoch_on_other_sources_is_said(caplog):
    taken = Position(1, 10, Batching(32, 1, 2, 4), sources="a (100)")
    with caplog.at_level(logging.WARNING):
        assert taken.start_step(replace(taken, step=0)) == 10
        assert not caplog.text
        assert taken.start_step(replace(taken, step=0, sources="a (100), b (9)")) == 10
    assert "on others: a (100), b (9)" in caplog.text


def test_a_new_epoch_with_other_settings_is_allowed_and_said(caplog):
    """At an epoch's end nothing is in the middle; but who gives another batch by mistake has to hear of it."""
    taken = Position(2, 0, Batching(32, 1, 2, 4), "a (100)", {"--seed": 1, "--sampling": "debiased"})
    with caplog.at_level(logging.WARNING):
        assert taken.start_step(taken) == taken.start_step(replace(taken, batching=Batching(32, 1, 2, 8))) == 0
        assert not caplog.text
        now = Position(2, 0, Batching(64, 1, 2, 4), "b (9)", {"--seed": 2, "--sampling": "debiased"})
        assert taken.start_step(now) == 0
    (message,) = caplog.messages
    assert "an effective batch of 128 after 64; the sources b (9) after a (100); --seed 2 after 1." in message


def test_a_position_is_read_as_it_was_written_and_one_of_another_format_is_refused():
    position = Position(1, 10, Batching(16, 2, 2, 4), "a (100)", {"--seed": 0}, read_as=Batching(32, 1, 2, 1))
    entry = entry_of(position)
    assert read_position({"zerovl": entry}) == position and read_position({"epoch": 1}) is None
    assert read_position({"zerovl": {**entry, "effective_batch": 64}}) == position  # which was written once
    for written in (1, 99, "x"):
        with pytest.raises(UserError, match=f"has format {written}, and this release reads 2"):
            read_position({"zerovl": {**entry, "format": written}})


@pytest.mark.parametrize(
    "entry",
    [
        True, [1], {}, {"epoch": "1"}, {"step": -1}, {"workers": 0}, {"micro_batch": 10**30}, {"order": 3},
        {"sources": None},
        {"read_as": (1, 2)}, {"read_as": "abc"}, {"retained": {"graphs": 1}}, {"what": 1},
        {"world_size": True},
        {"retained": {"graphs": 2, "graph_bytes": float("nan"), "other_bytes": 1.0}},
    ],
)  # fmt: skip
def test_a_checkpoint_that_says_nonsense_about_where_it_was_taken_is_refused(entry):
    whole = entry_of(Position(1, 10, Batching(32, 1, 2, 4), sources="a (100)"))
    changed = {**whole, **entry} if isinstance(entry, dict) and entry else entry or {"format": 2}
    with pytest.raises(UserError, match="the checkpoint does not say where"):
        read_position({"zerovl": changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"epoch": "1"}, "epoch"),
        ({"epoch": -1}, "epoch"),
        ({"optimizer": 3}, "optimizer"),
        ({"optimizer": {}}, "optimizer"),
        ({"optimizer": None}, "optimizer"),
    ],
)
def test_a_checkpoint_with_a_foreign_optimizer_or_epoch_is_refused(tmp_path, changed, words):
    model = torch.nn.Linear(2, 2)
    content = {
        "epoch": 1,
        "state_dict": model.state_dict(),
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
    }
    torch.save(content, tmp_path / "a.pt")
    assert load_checkpoint(model, argparse.Namespace(model="m"), str(tmp_path / "a.pt"))["epoch"] == 1
    torch.save({**content, **changed}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=f"has no '{words}'.*give a checkpoint that training wrote"):
        load_checkpoint(model, argparse.Namespace(model="m"), str(tmp_path / "a.pt"))


def test_a_checkpoint_of_several_ranks_has_the_names_of_one(tmp_path):
    """DDP puts `module.` before every name; a run of one process goes on from it, and one of several from one without."""
    model = torch.nn.Linear(2, 2)
    for prefix in ("", "module."):
        state = {prefix + name: value for name, value in model.state_dict().items()}
        torch.save({"epoch": 1, "state_dict": state}, tmp_path / "a.pt")
        loaded = load_checkpoint(model, argparse.Namespace(model="m", train_data=None), str(tmp_path / "a.pt"))
        assert loaded["state_dict"].keys() == model.state_dict().keys()


def test_preemption_is_only_heard_within_its_block():
    before = signal.getsignal(signal.SIGUSR1)
    with Preemption() as preemption:
        assert not preemption.agreed(distributed=False)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.agreed(distributed=False)
    assert signal.getsignal(signal.SIGUSR1) is before


def clip_and_optimizer(divide):
    """A small CLIP after two steps of AdamW on its parameters divided in two groups: spared from weight decay, decayed."""
    torch.manual_seed(0)
    model = CLIP(8, CLIPVisionCfg(**NATIVE_VISION), CLIPTextCfg(**{**CLIP_TEXT, "vocab_size": 64}))
    spared = [p for name, p in model.named_parameters() if divide(name, p)]
    decayed = [p for name, p in model.named_parameters() if not divide(name, p)]
    optimizer = torch.optim.AdamW([{"params": spared, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.2}])
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
    with pytest.raises(ValueError, match=f"^{OTHER_GROUPS}"):
        optimizer.load_state_dict(old.state_dict())  # a negative control, and how torch says it
    optimizer.load_state_dict(of_this_line(old.state_dict(), model, optimizer))
    for (name, before), after in zip(old_model.named_parameters(), model.parameters(), strict=True):
        assert old.state[before].keys() == optimizer.state[after].keys(), name
        assert all(torch.equal(old.state[before][key], optimizer.state[after][key]) for key in old.state[before]), name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.2]
    for state in (optimizer.state_dict(), {"state": {}, "param_groups": [{"params": [0, 1]}]}):
        assert of_this_line(state, model, optimizer) is state
