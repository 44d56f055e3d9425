"""The table of a trial: paired differences, the margin, chance, and the winner."""

from __future__ import annotations

import pytest

from open_clip_zerovl.report.verdicts import student
from open_clip_zerovl.trial.result import MEAN_RECALL, Row, TrialResult


def records(**arms: list[float]) -> list[dict]:
    return [
        {"arm": arm, "rate": 1e-3, "seed": seed, "samples": 10, "scores": {MEAN_RECALL: value}}
        for arm, values in arms.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("values", "word", "more"),
    [
        ([23.0, 24.0, 25.5], "gain", ""),
        ([18.0, 19.0, 20.5], "loss", ""),
        ([21.0, 22.0, 23.1], "no use", "within the margin of 1"),
        # Mean 0.67, deviation 2.11: (2.02 * 2.11 / 0.67) squared is 40.8.
        ([21.0, 25.0, 22.0], "undecided", "at this scatter 41 seeds would decide"),
    ],
)
def test_the_verdict_of_paired_differences(values, word, more):
    made = records(plain=[20.9, 22.0, 23.1], other=values)
    row = Row.from_records(made, MEAN_RECALL, "other", "plain", margin=1.0)
    assert row.sentence.startswith(f"other over plain: {word}.") and more in row.sentence


def test_seeds_that_one_arm_lacks_are_left_out():
    row = Row.from_records(
        records(plain=[1.0, 2.0, 3.0], dga=[2.0, 4.0]), MEAN_RECALL, "dga", "plain", 0.0
    )
    assert row.differences == {0: 1.0, 1: 2.0}


def test_arms_near_chance_decide_nothing():
    made = records(plain=[5.0, 5.0, 5.0], dga=[5.0, 5.1, 5.0])
    assert Row.from_records(made, MEAN_RECALL, "dga", "plain", 1.0).verdict == "no difference"
    made[0]["chance_upper"] = {MEAN_RECALL: 6.0}
    assert "near chance" in Row.from_records(made, MEAN_RECALL, "dga", "plain", 1.0).sentence


def test_the_winner_gains_most_and_all_arms_hold_together_at_95_percent():
    made = records(plain=[20.0, 21.0, 22.0], dga=[22.0, 23.1, 24.0], recipe=[25.0, 26.1, 27.0])
    (start,) = records(start=[19.0])
    result = TrialResult(made, ("plain", "dga", "recipe"), (MEAN_RECALL,), 1.0, start)
    assert result.winner == "recipe"
    estimate = result.deciding[0].estimate
    assert estimate == pytest.approx(student([2.0, 2.1, 2.0], 0.975))
    nothing = TrialResult(
        records(plain=[20.0, 21.0], dga=[10.0, 31.0]), ("plain", "dga"), (MEAN_RECALL,), 1.0, start
    )
    assert nothing.winner == "plain"


@pytest.mark.parametrize(("before", "word"), [(15.0, "gain"), (20.6, "no use"), (25.0, "loss")])
def test_the_winner_is_compared_with_the_model_before_training(before, word):
    made = records(plain=[20.5, 20.6, 20.7], dga=[20.5, 20.7, 20.6])
    (start,) = records(start=[before])
    result = TrialResult(made, ("plain", "dga"), (MEAN_RECALL,), 1.0, start)
    assert result.gain.sentence.startswith(f"plain over start model: {word}.")
    assert result.means()[0] == ["start model", "-", "0", f"{before:.1f}"]
