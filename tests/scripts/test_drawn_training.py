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


def measured(random: float, debiased: float) -> dict:
    """A row's numbers of both models."""
    return {
        name: {"value": score}
        for name, score in zip(demo.SAMPLINGS, (random, debiased), strict=True)
    }


@pytest.mark.parametrize(("scores", "at_chance"), [((19.2, 18.4), True), ((19.0, 33.0), False)])
def test_the_demos_first_line_says_what_the_method_did_unless_both_models_are_at_chance(
    scores, at_chance
):
    rows = [
        {"kind": "within", "models": measured(*scores)},
        {"kind": "across", "models": measured(145.1, 237.1)},
        {"kind": "mixed", "models": measured(184.9, 147.5)},
    ]
    line = demo.judgement(rows, 2).strip().splitlines()[0]
    expected = (
        "At chance: RSUM within a source is 19 (random) and 18 (debiased), a random order has 16."
        if at_chance
        else "Debiased - random batches: +92 RSUM from one style to another, -37 in one pool of all styles"
    )
    assert line.startswith(expected)


def test_other_flags_of_the_demo_do_not_touch_an_earlier_call_s_runs():
    def place(*flags: str, epochs: int = demo.EPOCHS) -> Path:
        settings = demo.Settings(Path("data"), Path("out"), epochs, 0, "test", flags)
        return settings.run_of("random").folder

    assert place() == Path("out/runs/random-seed0")  # the pages name it
    folders = {place(), place("--epochs", "40", "--coin-flip-mixup"), place(epochs=3)}
    assert folders >= {Path("out/runs/random-seed0-epochs-40-coin-flip-mixup")}
    assert len(folders) == 3


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
