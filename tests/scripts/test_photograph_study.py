"""Tables and sentences on photographs are those of the records (`scripts/photographs` of commit 98e0d6f5) by the protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import pytest
import yaml
from scipy.stats import spearmanr

from open_clip_zerovl.report.verdicts import Estimate, student, verdict
from scripts.tables import markdown_table
from support import ROOT

RECORDS = ROOT / "docs" / "results" / "photographs"
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
SAID = " ".join(PAGE.split())
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
PROTOCOL = yaml.safe_load((RECORDS / "study.yaml").read_text(encoding="utf-8"))
STAGES = PROTOCOL | PROTOCOL["stages"]
MARGIN = PROTOCOL["margin"]
PARTS = ("batch-random", "batch-aligned", "debiased", "stages-batch", "stages-debiased")
Record = dict[str, Any]


def read(part: str) -> list[Record]:
    """The runs of a part, a line each."""
    lines = (RECORDS / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def of(records: Sequence[Record], **facts: Any) -> list[Record]:
    """The runs whose entries are `facts`."""
    return [run for run in records if all(run[key] == value for key, value in facts.items())]


def means(records: Sequence[Record], measure: str) -> dict[float, float]:
    """Rate -> mean over seeds, ascending."""
    rates = sorted({run["rate"] for run in records})
    return {rate: fmean(run["scores"][measure] for run in of(records, rate=rate)) for rate in rates}


def best_rate(records: Sequence[Record]) -> float:
    """The rate that the validation photographs choose."""
    scores = means(records, "validation")
    return max(scores, key=scores.__getitem__)


def difference(runs: Sequence[Record], over: Sequence[Record], measure: str) -> Estimate:
    """The paired difference, seed by seed."""
    ours, theirs = ({run["seed"]: run["scores"][measure] for run in each} for each in (runs, over))
    assert ours.keys() == theirs.keys()
    return student([ours[seed] - theirs[seed] for seed in sorted(ours)])


def gain(records: Sequence[Record], measure: str, rate: float | None = None) -> Estimate:
    """Debiased minus random, at the rate that random batches prefer or at a given one."""
    rate = rate or best_rate(of(records, arm="random"))
    debiased, random = (of(records, arm=arm, rate=rate) for arm in ("debiased", "random"))
    return difference(debiased, random, measure)


def standing(estimates: Mapping[Any, Estimate]) -> set[Any]:
    """Keys that stand after Holm's correction at 5 %: the k-th smallest p counts times those that are left."""
    ascending = sorted(estimates, key=lambda key: estimates[key].p)
    fails = [estimates[key].p * (len(ascending) - k) >= 0.05 for k, key in enumerate(ascending)]
    return set(ascending[: [*fails, True].index(True)])


def shown(estimate: Estimate, bold: bool = False) -> str:
    mean, low, high, _ = estimate
    stars = "**" * bold
    return f"{stars}{mean:+.2f} ({low:+.2f} to {high:+.2f}){stars}"


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def mixtures_table(part: str, settings: dict[str, Any]) -> str:
    """Debiased minus random by mixture."""
    records, rows = read(part), []
    bold = standing(
        {
            (name, measure): gain(of(records, data=name), measure)
            for name in settings["mixtures"]
            for measure in ("clean", "pool")
        }
    )
    for name, given in settings["mixtures"].items():
        runs = of(records, data=name)
        cells = [given["says"], f"{best_rate(of(runs, arm='random')):g}"]
        for measure in ("clean", "pool"):
            estimate = gain(runs, measure)
            cells.append(
                f"{shown(estimate, (name, measure) in bold)}<br>{verdict(estimate, MARGIN)}"
            )
        has_cross = "cross" in runs[0]["scores"]
        rows.append([*cells, shown(gain(runs, "cross")) if has_cross else ""])
    return markdown_table(["two sources", "rate", "clean photographs", "one pool", "across"], rows)


def rates_table() -> str:
    """The same at each rate, beside the probes of the sources."""
    settings, records, rows = PROTOCOL["debiased"], read("debiased"), []
    signs = {sign["data"]: sign for sign in read("signs")}
    columns = [(measure, rate) for measure in ("clean", "pool") for rate in settings["rates"]]
    for name in settings["mixtures"]:
        runs = of(records, data=name)
        gains = [gain(runs, measure, rate) for measure, rate in columns] + [gain(runs, "unseen")]
        probes = [f"{signs[name][side]:.0f}" for side in ("picture", "caption")]
        rows.append([name, *(f"{estimate.mean:+.1f}" for estimate in gains), *probes])
    rates = [f"{measure}, {rate:g}" for measure, rate in columns]
    probes = ["picture probe %", "caption probe %"]
    return markdown_table(["mixture", *rates, "unseen", *probes], rows)


def batch_table(part: str, settings: dict[str, Any]) -> str:
    """Each batch at its best rate, beside the neighbours of the grid, against 16."""
    records, rows = read(part), []
    given = settings["arms"]
    arms = sorted(given, key=lambda arm: (given[arm].get("longer", 1), given[arm]["batch"]))
    best = {arm: of(of(records, arm=arm), rate=best_rate(of(records, arm=arm))) for arm in arms}
    against = {arm: difference(best[arm], best["16"], "clean") for arm in arms if arm != "16"}
    bold = standing(against)
    for arm, runs in best.items():
        scores = means(of(records, arm=arm), "clean")
        place = list(scores).index(runs[0]["rate"])
        around = ["", *(f"{score:.1f}" for score in scores.values()), ""][place : place + 3]
        assert "" not in around or runs[0]["rate"] == PROTOCOL["ladder"][0]  # inside of its grid
        said = ""
        if arm != "16":
            said = f"{shown(against[arm], arm in bold)}, {verdict(against[arm], MARGIN)}"
        seconds = fmean(run["cpu_seconds"] for run in runs)
        facts = [f"{runs[0]['samples']:,}", f"{seconds:.1f}", f"{runs[0]['rate']:g}"]
        rows.append([arm, *facts, *around, said])
    header = ["batch", "samples", "CPU s", "best rate", "a step lower", "mean recall"]
    return markdown_table([*header, "a step higher", "minus 16"], rows)


def accumulation_table() -> str:
    """open_clip's `--accum-freq` against DGA, at the rate that DGA prefers."""
    whole, records = {}, read("accumulation")
    for setting in PROTOCOL["accumulation"]["settings"]:
        clip = "" if setting["clip"] is None else f", clip {setting['clip']:g}"
        optimizer = {"adamw": "AdamW", "lars": "LARS"}[setting["optimizer"]]
        whole[f"{optimizer}, K = {setting['K']}{clip}"] = of(records, **setting)
    rates = {name: best_rate(of(runs, arm="dga")) for name, runs in whole.items()}
    estimates = {}
    for name, runs in whole.items():
        theirs, ours = (of(runs, arm=arm, rate=rates[name]) for arm in ("accum-freq", "dga"))
        estimates[name] = difference(theirs, ours, "clean")
    bold, rows = standing(estimates), []
    for name, runs in whole.items():
        cells = [name, f"{rates[name]:g}"]
        for arm in ("dga", "accum-freq"):
            of_arm = of(runs, arm=arm)
            cells.append(" / ".join(f"{score:.1f}" for score in means(of_arm, "clean").values()))
            cells.append(f"{fmean(run['cpu_seconds'] for run in of_arm):.0f}")
        said = f"{shown(estimates[name], name in bold)}, {verdict(estimates[name], MARGIN)}"
        rows.append([*cells, said])
    header = ["setting", "rate", "DGA, by rate", "CPU s", "--accum-freq, by rate", "CPU s"]
    return markdown_table([*header, "--accum-freq - DGA"], rows)


def common_rates_table() -> str:
    """Debiased (C) against random batches (B) end to end."""
    protocol = yaml.safe_load((RECORDS / "protocol.yaml").read_text(encoding="utf-8"))
    settings, rows = protocol["common_rates"], []
    files = [*RECORDS.glob("pilot-*.json"), *RECORDS.glob("run-*.json")]
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for rate in settings["grid"]:
        random, debiased = (
            {
                "pilot" if run["pilot"] else run["seed"]: run["scores"]["flickr8k_mean_recall"]
                for run in of(records, arm=arm, rate=rate)
            }
            for arm in "BC"
        )
        pilots = f"{random.pop('pilot'):.1f} / {debiased.pop('pilot'):.1f}"
        cells = ["", "", ""]
        if debiased:
            assert random.keys() == debiased.keys() == {*protocol["runs"]["seeds"]}
            gains = [debiased[seed] - random[seed] for seed in sorted(random)]
            estimate = student(gains, settings["confidence"])
            cells = [f"{fmean(arm.values()):.1f}" for arm in (random, debiased)]
            cells.append(f"{shown(estimate)}, {verdict(estimate, settings['margin'])}")
        rows.append([f"{rate:g}", pilots, str(len(debiased)), *cells])
    return markdown_table(["rate", "pilots, B / C", "seeds", "B", "C", "C - B"], rows)


TABLES = {
    "mixtures": lambda: mixtures_table("debiased", PROTOCOL["debiased"]),
    "mixtures by rate": rates_table,
    "batch-random": lambda: batch_table("batch-random", PROTOCOL["batch"]),
    "batch-aligned": lambda: batch_table("batch-aligned", PROTOCOL["batch"]),
    "stages, mixtures": lambda: mixtures_table("stages-debiased", STAGES["debiased"]),
    "stages, batch": lambda: batch_table("stages-batch", STAGES["batch"]),
    "accumulation": accumulation_table,
    "common rates": common_rates_table,
}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_the_table_of_the_records(name):
    assert f"<!-- {name} -->\n\n{TABLES[name]()}\n\n<!-- /{name} -->" in PAGE


@pytest.mark.parametrize("part", PARTS)
def test_the_records_are_fair_runs_of_the_protocol(part):
    """All seeds of a unit, rates of the ladder; arms that are compared have the same samples, and mixtures the same rates."""
    settings = STAGES if part.startswith("stages") else PROTOCOL
    samples: dict[str, set] = {}
    units: dict[tuple, list] = {}
    for run in read(part):
        units.setdefault((run["data"], run["arm"], run["rate"]), []).append(run)
    for (data, arm, rate), runs in units.items():
        assert sorted(run["seed"] for run in runs) == settings["seeds"]
        assert rate in PROTOCOL["ladder"] and all(run["cpu_seconds"] > 0 for run in runs)
        unit = samples.setdefault(data + arm * ("equal time" in arm), set())
        unit.update(run["samples"] for run in runs)
    assert all(len(each) == 1 for each in samples.values())
    if part.endswith("debiased"):
        given = settings["debiased"]
        arms = [(arm, rate) for arm in ("random", "debiased") for rate in given["rates"]]
        assert units.keys() == {(name, *arm) for name in given["mixtures"] for arm in arms}
        whole = PROTOCOL["debiased"]["mixtures"]
        assert all(
            whole[name]["sources"] == each["sources"] for name, each in given["mixtures"].items()
        )
    if part == "debiased":
        assert set.union(*samples.values()) == {56_320} and "56,320 samples a run" in SAID


# ---------------------------------------------------------------------------------------------------------------------
# Sentences
# ---------------------------------------------------------------------------------------------------------------------


def best_runs(part: str, *arms: str) -> list[list[Record]]:
    """The runs of each arm at its best rate."""
    records = read(part)
    runs = [of(records, arm=arm) for arm in arms]
    return [of(of_arm, rate=best_rate(of_arm)) for of_arm in runs]


def test_the_readme_and_the_first_screen_say_what_the_rows_decide():
    """Whoever changes a sentence changes its row here; the rows must decide it, and stand after Holm's correction."""
    records = read("debiased")
    rows = {name: of(records, data=name) for name in PROTOCOL["debiased"]["mixtures"]}
    small, large, largest = best_runs("batch-random", "16", "256", "1024")
    larger, clean = difference(large, small, "clean"), gain(rows["framed"], "clean")
    for estimate, sentence in (
        (larger, "batch 256 over 16, same samples, each at its best rate | {:+.1f} ({:+.1f} to {:+.1f}) |"),
        (clean, "the paper's mixture, clean photographs | {:+.1f} ({:+.1f} to {:+.1f}) |"),
    ):  # fmt: skip
        assert sentence.format(*estimate[:3]) in README
        assert estimate.low > MARGIN
    assert f"batch 256 scored {larger.mean:.1f} points of mean recall above batch 16" in README
    assert f"batch 256 scores {larger.mean:.1f} points of mean recall above 16" in SAID
    assert f"On clean photographs they gain {clean.mean:.1f} points in the paper's own" in SAID
    styles = {name: runs for name, runs in rows.items() if "cross" in runs[0]["scores"]}
    assert len(styles) == 5 and "captions, five mixtures" in README
    gains = {m: [gain(runs, m) for runs in styles.values()] for m in ("cross", "pool", "clean")}
    between = {m: sorted(estimate.mean for estimate in all_) for m, all_ in gains.items()}
    assert all(each.low > MARGIN for each in gains["cross"])
    assert all(each.high < -MARGIN for each in gains["pool"])
    assert all(each.low > 0 for each in gains["clean"])
    low, *_, high = between["cross"]
    assert f"five mixtures | {low:+.1f} to {high:+.1f} |" in README
    assert f"across the styles they gain {low:.1f} to {high:.1f} points" in SAID
    low, *_, high = between["pool"]
    assert f"both styles searched together | {low:.1f} to {high:.1f} |" in README
    assert f"as one pool: no, they lose {-high:.1f} to {-low:.1f}" in SAID
    low, *_, high, first = between["clean"]
    assert first == clean.mean and f"and {low:.1f} to {high:.1f} in others, where higher" in SAID
    others = [runs for name, runs in styles.items() if not name.startswith("framed")]
    assert all(gain(runs, "clean", 1e-2).mean < 0 for runs in others)
    for name in ("grey pictures", "long captions"):  # "no effect"
        for estimate in (gain(rows[name], measure) for measure in ("clean", "pool")):
            assert -MARGIN < estimate.low < 0 < estimate.high < MARGIN
    content = [gain(rows["products"], "clean", rate) for rate in PROTOCOL["debiased"]["rates"]]
    assert sum(estimate.high < 0 for estimate in content) == 2
    null = [gain(rows["split"], measure) for measure in ("clean", "pool")]
    assert all(abs(edge) < MARGIN for each in null for edge in each[1:3])
    rates = [runs[0]["rate"] for runs in (small, large, largest)]
    grown = "{:g} for 16, {:g} for 256, {:g} for 1,024".format(*rates)
    assert f"The best rate grows with the batch: {grown}" in SAID and rates == sorted(rates)
    assert rates[1] == 3 * rates[0] and "a learning rate three times higher" in SAID
    longer = of(of(read("batch-random"), arm="16, equal time"), rate=rates[0])
    stays = "256 stays {:.1f} points above ({:+.1f} to {:+.1f})"
    assert stays.format(*difference(large, longer, "clean")[:3]) in SAID
    assert longer[0]["samples"] == 1.4 * small[0]["samples"]


@pytest.mark.parametrize(
    ("measure", "sentence"),
    [
        ("pool", "in one pool (rank correlation {:.2f})"),
        ("cross", "across styles ({:.2f}, where 0.9"),
    ],
)
def test_what_the_sign_of_the_protocol_orders_is_said(measure, sentence):
    records, signs, gains = read("debiased"), [], []
    for sign in read("signs"):
        runs = of(records, data=sign["data"])
        if measure in runs[0]["scores"]:
            signs.append(sign["sign"])
            gains.append(gain(runs, measure).mean)
    assert sentence.format(spearmanr(signs, gains).statistic) in SAID


def test_what_the_last_stages_decide_is_said():
    """Batches against 16 in few steps, and A.5's mixture at each rate of its grid."""
    records = read("stages-debiased")
    base, *others = best_runs("stages-batch", "16", "64", "256")
    smaller, larger = (difference(runs, base, "clean") for runs in others)
    steps = others[1][0]["steps"]
    assert smaller.low > MARGIN and larger.high < 0
    said = f"In {steps} steps from pretrained weights 256 loses {-larger.mean:.1f}, and 64 gains {smaller.mean:.1f}."
    assert said in SAID
    row = "last stages, {} steps, five seeds | {:+.1f} ({:+.1f} to {:+.1f}) |"
    assert row.format(steps, *larger[:3]) in README
    at = "At {:g} the differences are {:+.1f} and {:+.1f} points, at {:g} {:+.1f} and {:+.1f}."
    numbers = []
    for rate in (STAGES["debiased"]["rates"][0], STAGES["debiased"]["rates"][-1]):
        numbers += [rate, gain(records, "clean", rate).mean, gain(records, "pool", rate).mean]
    assert at.format(*numbers) in SAID
    clean = gain(records, "clean")
    assert clean.low > 0 and f"{clean.mean:.1f} with the image tower's last stages" in SAID
