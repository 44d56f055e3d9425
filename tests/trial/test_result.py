"""The tables of a trial: paired differences, the margin, chance, looks, and the winner."""

from __future__ import annotations

import pytest

from open_clip_zerovl.report.verdicts import student
from open_clip_zerovl.trial.result import Row, TrialResult

MEASURE = "mean recall"


def records(above: bool = True, seconds: float = 10.0, **arms: list[float]) -> list[dict]:
    return [
        {
            "arm": arm,
            "rate": 1e-3,
            "seed": seed,
            "samples": 1024,
            "seconds": seconds,
            "scores": {MEASURE: value},
            "chance": {MEASURE: 5.0},
            "above_chance": {MEASURE: above},
            "commonest": {},
        }
        for arm, values in arms.items()
        for seed, value in enumerate(values)
    ]


def result(made: list[dict], arms: tuple[str, ...] = ("plain", "dga"), **more) -> TrialResult:
    (start,) = records(start=[more.pop("start", 19.0)])
    return TrialResult(made, arms, 1.0, start, **more)


@pytest.mark.parametrize(
    ("values", "words", "more"),
    [
        ([23.0, 24.0, 25.5], "higher, above the margin of 1", ""),
        ([21.3, 22.4, 23.6], "higher, below the margin of 1", ""),
        ([22.0, 23.0, 24.3], "higher, size open", ""),
        ([18.0, 19.0, 20.5], "lower, above the margin of 1", ""),
        ([21.0, 22.0, 23.0], "sign open, below the margin of 1", ""),
        # Mean 0.67, deviation 2.11: (2.02 * 2.11 / 0.67) squared is 40.8.
        ([21.0, 25.0, 22.0], "open", "At this scatter 41 seeds would decide"),
    ],
)
def test_the_verdict_of_paired_differences(values, words, more):
    made = records(plain=[20.9, 22.0, 23.1], other=values)
    row = Row.from_records(made, MEASURE, "other", "plain", margin=1.0)
    said = row.sentence(0.95)
    assert said.startswith(f"other over plain: {words}.") and more in said


def test_seeds_that_one_arm_lacks_are_left_out():
    row = Row.from_records(
        records(plain=[1.0, 2.0, 3.0], dga=[2.0, 4.0]), MEASURE, "dga", "plain", 0.0
    )
    assert row.differences == {0: 1.0, 1: 2.0}


def test_without_an_arm_above_chance_there_is_one_sentence_and_no_verdict():
    values = {"plain": [5.0, 5.0], "dga": [5.0, 6.1]}
    nothing = result(records(False, **values))
    assert nothing.sentences == ["No arm learned anything in 1,024 samples: give more --minutes."]
    assert nothing.differences() == [] and "seeds would" not in nothing.table()
    assert nothing.means()[-1] == [MEASURE, "5.0", "19.0", "5.0", "5.5"]
    # One run of two above chance is not enough; a third arm that learned gives the others' row no verdict.
    assert not result(
        [*records(False, plain=[5.0]), *records(plain=[5.0, 5.0])[1:], *records(False, dga=[5.0])]
    ).learned
    some = result(
        [*records(False, **values), *records(recipe=[30.0, 31.0])], ("plain", "dga", "recipe")
    )
    assert some.sentences[0].startswith("dga over plain: both near chance")
    assert "seeds would" not in some.sentences[0] and some.deciding[1].verdict != ("open", "open")


def test_the_winner_gains_most_and_all_arms_hold_together_at_95_percent():
    made = records(plain=[20.0, 21.0, 22.0], dga=[22.0, 23.1, 24.0], recipe=[25.0, 26.1, 27.0])
    three = result(made, ("plain", "dga", "recipe"))
    assert three.winner == "recipe"
    assert three.deciding[0].estimate == pytest.approx(student([2.0, 2.1, 2.0], 0.975))
    assert result(records(plain=[20.0, 21.0], dga=[10.0, 31.0])).winner == "plain"


def test_each_further_look_halves_the_error_of_its_intervals():
    made = records(plain=[20.0, 21.0, 22.0], dga=[21.0, 25.0, 22.0])
    first, second = result(made), result(made, looks=2)
    assert first.deciding[0].confidence == 0.95 and second.deciding[0].confidence == 0.975
    counts = [int(each.sentences[0].split("scatter ")[1].split()[0]) for each in (first, second)]
    # What the first table advises is counted at the confidence of the second, not at its own.
    assert counts[0] < counts[1] and f"scatter {counts[0]}" in first.deciding[0].sentence(0.975)
    assert f"scatter {counts[0]}" not in first.deciding[0].sentence(0.95)


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (15.0, "higher, above the margin of 1"),
        (20.6, "sign open, below the margin of 1"),
        (25.0, "lower, above the margin of 1"),
    ],
)
def test_the_winner_is_compared_with_the_model_before_training(before, words):
    made = records(plain=[20.5, 20.6, 20.7], dga=[20.5, 20.7, 20.6])
    said = result(made, start=before).sentences[1]
    assert said.startswith(f"plain over start model: {words}.")


@pytest.mark.parametrize(
    ("seconds", "equal", "said"),
    [
        (10.5, "time", "All arms took equal time, within 5 %."),
        (13.0, "time", "The arms did not take the same time: dga took 30 % more than plain."),
        (13.0, "samples", "All arms saw the same number of samples."),
    ],
)
def test_equal_is_said_of_times_within_ten_percent(seconds, equal, said):
    made = [*records(plain=[20.0, 21.0]), *records(seconds=seconds, dga=[20.0, 21.0])]
    compared = result(made, equal=equal)
    assert compared.sentences[-1] == said
    assert compared.means()[2] == ["seconds of a run", "", "", "10", f"{seconds:,.0f}"]
