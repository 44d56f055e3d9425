"""The demo's two trainings: their flags and places, and its first sentence."""

from pathlib import Path

import pytest

from open_clip_zerovl.core.errors import UserError
from scripts import demo
from training.params import parse


def run(*flags: str, epochs: int = demo.EPOCHS) -> demo.Run:
    return demo.run_of("random", Path("data"), Path("out"), epochs=epochs, seed=7, flags=flags)


def test_flags_behind_the_demos_own_replace_them():
    """As training reads them; the run's checkpoint is that of its last --epochs."""
    more = ["--lr=5e-4", "--epochs", "5", "--aug-cfg", "scale=(0.6,1.0)", "--warmup", "5"]
    args, _ = parse(run(*more).flags)
    assert (args.lr, args.epochs, args.seed, args.warmup) == (5e-4, 5, 7, 5)
    assert args.aug_cfg == {"scale": (0.6, 1.0)}
    assert run(*more).checkpoint.name == "epoch_5.pt"
    for own in ("--sampling", "--train-data=x", "--name"):
        with pytest.raises(UserError, match=r"the demo sets --\S+ itself: .*; leave it out"):
            demo.demo(("--coin-flip-mixup", own, "x"))


def test_other_flags_of_the_demo_do_not_touch_an_earlier_call_s_runs():
    assert run().folder == Path("out/runs/random-seed7")  # the pages name it
    folders = {
        run().folder,
        run("--epochs", "40", "--coin-flip-mixup").folder,
        run(epochs=3).folder,
    }
    assert Path("out/runs/random-seed7-epochs-40-coin-flip-mixup") in folders and len(folders) == 3


def measured(random: float, debiased: float) -> dict:
    """A row's numbers of both models."""
    scores = zip(demo.SAMPLINGS, (random, debiased), strict=True)
    return {name: {"value": score} for name, score in scores}


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
