"""The study on photographs: its runs, and its verdicts from records."""

from __future__ import annotations

import json

import pytest
import yaml
from scipy import stats

from scripts.photographs import forgetting
from scripts.photographs.prepare import flickr8k_split
from scripts.photographs.report import arms_table, differences_table, read_records, rows
from scripts.photographs.run import HERE, RECORDS, Run, planned
from training.params import parse

PROTOCOL = yaml.safe_load((HERE / "protocol.yaml").read_text(encoding="utf-8"))


def record(arm: str, seed: int, value: float) -> dict:
    names = ("flickr8k_mean_recall", "products_mean_recall", "noto_mean_recall", "clothing_top1")
    return {"arm": arm, "seed": seed, "cpu_seconds": 1.0, "scores": dict.fromkeys(names, value)}


def test_every_arm_trains_with_flags_that_go_together(tmp_path):
    """Equal compute: A sees as many samples more as the protocol says; seeds and sources are shared."""
    factors = {}
    for arm in PROTOCOL["arms"]:
        args, config = parse(Run(arm, 1e-3, 3, False).arguments(PROTOCOL, tmp_path, tmp_path))
        assert config.freeze_norm_statistics and config.freeze == ("text",) and args.seed == 3
        assert config.dga_steps == (1 if arm == "A" else 16)
        factors[arm] = [float(share) for share in args.train_data_upsampling_factors.split("::")]
    ratio = PROTOCOL["arms"]["A"]["compute"]
    assert factors["A"] == pytest.approx([ratio * share for share in factors["B"]])
    assert factors["B"] == factors["C"]
    assert len(planned(PROTOCOL, True)) == sum(len(a["rates"]) for a in PROTOCOL["arms"].values())


def test_verdicts_follow_the_rule_and_need_all_seeds():
    gains = [1.0, 1.4, 1.2, 0.9, 1.5] * 2
    records = [record("A", seed, 10.0) for seed in range(10)]
    records += [record("B", seed, 10.0 + gain) for seed, gain in enumerate(gains)]
    records += [record("C", seed, 10.0 + gain + 0.01) for seed, gain in enumerate(gains)]
    made = {(row["measure"], row["of"]): row for row in rows(records, PROTOCOL)}
    primary = made["mean_recall", "B"]
    low, high = stats.t.interval(0.975, 9, loc=sum(gains) / 10, scale=stats.sem(gains))
    assert primary["estimate"][1:3] == pytest.approx((low, high)) and (
        primary["verdict"] == "higher, size open"
    )
    assert made["clothing_top1", "C"]["verdict"] == "higher, below the margin"
    without = [each for each in records if (each["arm"], each["seed"]) != ("B", 9)]
    assert rows(without, PROTOCOL)[0]["verdict"] == "9 of 10 seeds"


def test_the_page_shows_the_tables_of_the_records():
    page = (HERE.parents[1] / "docs" / "results.md").read_text(encoding="utf-8")
    for table in (arms_table, differences_table):
        assert table(read_records(), PROTOCOL) in page


def test_the_page_of_fine_tuning_shows_the_table_of_forgetting():
    records = forgetting.read_records()
    page = (HERE.parents[1] / "docs" / "finetune.md").read_text(encoding="utf-8")
    assert forgetting.table(records) in page
    pilots = [run for run in records if run["seed"] == forgetting.PILOT]
    best = max(pilots, key=lambda run: run["points"][-1]["val_new"])["lr"]
    finished = {(run["arm"], run["seed"]) for run in records if run["lr"] == best}
    assert finished >= {(arm, seed) for arm in forgetting.ARMS for seed in forgetting.SEEDS}
    words = " ".join(page.split())
    means: list[float] = []
    for arm in ("kept teacher", "full"):
        middle = [
            run["points"][1]
            for run in records
            if (run["arm"], run["seed"] != forgetting.PILOT) == (arm, True)
        ]
        means += [
            sum(each[key] for each in middle) / len(middle) for key in ("test_new", "test_old")
        ]
    sentence = "at alpha 0.5 it scored {:.1f} and {:.1f}, plain fine-tuning {:.1f} and {:.1f}."
    assert sentence.format(*means) in words


@pytest.mark.parametrize(("old", "alpha"), [(24.5, 0.5), (23.0, 0.0)])
def test_a_point_of_the_curve_keeps_95_percent_of_the_old_ability(old, alpha):
    """The end forgets too much; the middle is chosen if it keeps enough."""
    points = [
        {"alpha": 0.0, "val_new": 30.0, "val_old": 25.0},
        {"alpha": 0.5, "val_new": 60.0, "val_old": old},
        {"alpha": 1.0, "val_new": 80.0, "val_old": 5.0},
    ]
    assert forgetting.on_curve(points)["alpha"] == alpha


def test_the_readme_has_the_number_of_the_row_end_to_end():
    made = {(row["measure"], row["of"], row["over"]): row for row in rows(read_records(), PROTOCOL)}
    mean, low, high, _ = made["mean_recall", "B", "A"]["estimate"]
    assert made["mean_recall", "B", "A"]["verdict"].startswith("higher")
    readme = " ".join((HERE.parents[1] / "README.md").read_text(encoding="utf-8").split())
    assert f"a fifth more samples: {mean:+.1f} ({low:+.1f} to {high:+.1f})" in readme
    assert PROTOCOL["arms"]["A"]["compute"] == 1.2


def test_the_committed_records_are_runs_of_the_protocol():
    rates = yaml.safe_load((HERE / "rates.yaml").read_text(encoding="utf-8"))
    for each in read_records():
        if each["arm"] == "start":
            continue
        assert each["rate"] == rates[each["arm"]] and not each["pilot"]
        assert PROTOCOL["arms"][each["arm"]]["flags"] in each["flags"]


def test_the_rates_are_the_best_of_the_pilots_and_inside_their_grids():
    rates = yaml.safe_load((HERE / "rates.yaml").read_text(encoding="utf-8"))
    pilots = [json.loads(file.read_text()) for file in RECORDS.glob("pilot-*.json")]
    for arm in ("A", "B"):
        scores = {
            pilot["rate"]: pilot["scores"]["flickr8k_rsum"]
            for pilot in pilots
            if pilot["arm"] == arm
        }
        assert sorted(scores) == PROTOCOL["arms"][arm]["rates"]
        assert max(scores, key=lambda rate: scores[rate]) == rates[arm]
        assert min(scores) < rates[arm] < max(scores)
    assert rates["C"] == rates["B"]


def test_the_split_does_not_depend_on_the_order_of_the_names():
    names = [f"{number}.jpg" for number in range(2500)]
    parts = flickr8k_split(names)
    assert parts == flickr8k_split(names[::-1])
    assert [len(part) for part in parts.values()] == [1000, 1000, 500]
    assert len(set().union(*parts.values())) == 2500
