"""The flags and runs of the demo's trainings."""

import json
from pathlib import Path

import pytest

from open_clip_zerovl.core.errors import UserError
from scripts import demo
from scripts.drawn.training import TrainingRun, drawn_flags, flag_values


def test_flags_replace_those_of_the_same_name_and_keep_the_rest(tmp_path):
    def flags(*more: str) -> list[str]:
        return drawn_flags(tmp_path, sampling="random", epochs=2, seed=0, more=more)

    base, more = flags(), ["--aug-cfg", "scale=(0.6,1.0)", "--coin-flip-mixup", "--lr=2e-3"]
    changed = {
        **flag_values(base),
        "--aug-cfg": ["scale=(0.6,1.0)"],
        "--coin-flip-mixup": [],
        "--lr": ["2e-3"],
    }
    assert flag_values(flags(*more)) == changed and flags(*more)[-2:] == ["--lr", "2e-3"]
    assert len(flags(*more)) == len(set(flag_values(flags(*more)))) + sum(
        map(len, changed.values())
    )
    assert "--warmup-share" not in flags("--warmup", "5")
    # A flag that may come twice comes twice.
    assert flags("--freeze", "text", "--freeze", "image")[-4:] == [
        "--freeze",
        "text",
        "--freeze",
        "image",
    ]
    with pytest.raises(UserError, match="begin with --.*'0.2'"):
        flags("0.2")


def test_the_demo_takes_training_flags_but_not_those_that_it_compares():
    settings = demo.Settings(
        Path("data"), Path("out"), 3, 7, "val", ("--lr", "5e-4", "--epochs", "5")
    )
    demo.check_flags(settings.flags)
    for own in ("--sampling", "--train-data=x", "--name"):
        with pytest.raises(UserError, match=r"the demo sets --\S+ itself: .*; leave it out"):
            demo.check_flags(["--coin-flip-mixup", own, "x"])
    flags = flag_values(settings.run_of("random").flags)
    assert [flags[f"--{name}"] for name in ("lr", "epochs", "seed", "sampling")] == [
        ["5e-4"],
        ["5"],
        ["7"],
        ["random"],
    ]


@pytest.mark.parametrize(("scores", "at_chance"), [((19.2, 18.4), True), ((19.0, 33.0), False)])
def test_the_demo_says_when_both_models_are_at_chance(scores, at_chance):
    models = {name: {"value": score} for name, score in zip(demo.SAMPLINGS, scores, strict=True)}
    words = demo.judgement([{"kind": "within", "models": models}], 2)
    sentence = (
        "At chance: RSUM within a source is 19 (random) and 18 (debiased), a random order has 16."
    )
    assert (sentence in words) == ("At chance" in words) == at_chance


def test_a_run_of_other_flags_is_not_taken_for_finished(tmp_path):
    def of(*more: str) -> TrainingRun:
        flags = drawn_flags(tmp_path, sampling="random", epochs=2, seed=0, more=more)
        return TrainingRun(tmp_path / "runs" / "random", tuple(flags))

    done = of()
    done.checkpoint.parent.mkdir(parents=True)
    done.checkpoint.touch()
    assert not done.is_finished  # nobody knows with which flags it was trained
    done.asked.write_text(json.dumps({"flags": list(done.flags)}))
    assert done.is_finished and of().is_finished
    assert not of("--text-augment", "0.2").is_finished
