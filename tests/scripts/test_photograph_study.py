"""The study of large and debiased batches on photographs: its loop is the product's step, arms are fair, calls continue."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from open_clip_zerovl.dga import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.optimizer import optimizer_step, parameter_groups, warmup_cosine
from scripts.photographs import stages, study, study_report
from scripts.photographs.heads import Heads, Pairs, Training, epoch_order, train
from scripts.photographs.mixtures import WIDTH as WIDTH_OF_STUDY
from scripts.photographs.mixtures import neighbours_mixing, principal_components, source_probe
from scripts.photographs.styles import CAPTIONS, PICTURES, flickr8k_split

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = study.read_protocol()
WIDTH, SIZES = 24, (70, 90)


def pairs(captions: int = 3) -> Pairs:
    draw = torch.Generator().manual_seed(0)
    rows = sum(SIZES)
    images = torch.randn(rows, WIDTH, generator=draw)
    return Pairs(images, torch.randn(rows, captions, WIDTH, generator=draw), SIZES)


class Model(nn.Module):
    """A seed's towers as an ordinary model, whose features the caller does not see."""

    def __init__(self, heads: Heads, number: int) -> None:
        super().__init__()
        for name, weights in heads.named_parameters():
            self.register_parameter(name, nn.Parameter(weights[number].detach().clone()))

    def tower(self, side: str, rows: torch.Tensor) -> torch.Tensor:
        straight, inner, outer = (
            getattr(self, f"{side}_{n}") for n in ("straight", "inner", "outer")
        )
        return F.normalize(rows @ straight + F.gelu(rows @ inner) @ outer, dim=-1)

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        features = {"image_features": self.tower("image", images)}
        features["text_features"] = self.tower("text", texts)
        return features | {"logit_scale": self.logit_scale.exp()}


@pytest.mark.parametrize("sampling", ["random", "debiased"])
def test_stacked_seeds_train_as_the_products_step_does(sampling, monkeypatch):
    """Each seed equals DGA over four micro-batches with the product's loss and step (fp64), its neighbour does not."""
    monkeypatch.setattr(torch, "randn", partial(torch.randn, dtype=torch.float64))
    data, seeds = pairs(), [3, 8]
    training = Training(32, sampling, 128, 2)
    start, stacked = Heads(WIDTH, seeds), Heads(WIDTH, seeds)
    steps = train(stacked, data, training, 3e-3, seeds)
    assert steps == 8
    for number, seed in enumerate(seeds):
        model = Model(start, number)
        groups = parameter_groups(model, training.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-6)
        dga = DecoupledGradientAccumulation(model, ContrastiveLoss())
        shown = _captions(data, training, seed)
        for step, (rows, texts) in enumerate(shown):
            optimizer.zero_grad()
            dga.backward(list(zip(data.images[rows].split(8), texts.split(8), strict=True)))
            for group in optimizer.param_groups:
                group["lr"] = warmup_cosine(step, steps, 3e-3, 1)
            optimizer_step(model, optimizer)
        for name, weights in stacked.named_parameters():
            expected = getattr(model, name)
            assert torch.allclose(weights[number], expected, atol=1e-9), name
            if name != "logit_scale":
                assert not torch.allclose(weights[1 - number], expected, atol=1e-3)


def _captions(data: Pairs, training: Training, seed: int) -> list[tuple[np.ndarray, torch.Tensor]]:
    """Rows and captions of each step, drawn as `train` draws them."""
    from open_clip_zerovl.core.randomness import Purpose, stream

    shift = stream(seed, Purpose.ALIGN_CAPTION).integers(0, 1 << 30, size=len(data.images))
    steps = []
    for epoch in range(training.epochs):
        for rows in epoch_order(data.sizes, training, seed, epoch):
            steps.append((rows, data.texts[rows, (shift[rows] + epoch) % data.texts.shape[1]]))
    return steps


def test_a_mixture_with_stages_is_the_one_without():
    mixtures = PROTOCOL["stages"]["debiased"]["mixtures"]
    assert all(
        given["sources"] == PROTOCOL["debiased"]["mixtures"][name]["sources"]
        for name, given in mixtures.items()
    )


def test_the_arms_of_a_comparison_see_the_same_samples_of_the_same_sources():
    """Each sample at most once an epoch; a debiased step is of one source and a random one of several."""
    counts = {}
    for sampling in ("random", "debiased"):
        orders = [epoch_order((320, 3000), Training(64, sampling, 3264, 1), 1, e) for e in (0, 1)]
        for order in orders:
            assert len(np.unique(order)) == order.size == 3264
            first = (order < 320).mean(axis=1)
            pure = np.isin(first, (0, 1))
            assert pure.all() if sampling == "debiased" else pure.mean() < 0.05
        counts[sampling] = sum((order < 320).sum() for order in orders)
    assert abs(counts["random"] - counts["debiased"]) <= 2 * 64


def test_the_protocols_arms_are_fair():
    """Equal samples but where the name says otherwise, common rates, all of the ladder, and no style that is not there."""
    batch, debiased = PROTOCOL["batch"], PROTOCOL["debiased"]
    ladder = PROTOCOL["ladder"]
    for arm, given in batch["arms"].items():
        assert batch["epoch_samples"] % given["batch"] == 0
        assert set(given["rates"]) <= set(ladder)
        assert given.get("longer", 1) == (1.4 if "equal time" in arm else 1)
    assert (
        set(debiased["rates"]) <= set(ladder) and debiased["epoch_samples"] % debiased["batch"] == 0
    )
    made = list(study.debiased_units(debiased, "debiased"))
    for mixture, settings in debiased["mixtures"].items():
        of_arm = {
            arm: {(unit.rate, unit.training.batch, unit.training.epochs) for unit in made
                  if (unit.data, unit.arm) == (mixture, arm)}
            for arm in ("random", "debiased")
        }  # fmt: skip
        assert of_arm["random"] == of_arm["debiased"] and len(of_arm["random"]) == 3
        styles = [style for style in settings["sources"] if style != "products"]
        assert all(look in PICTURES and words in CAPTIONS for look, words in styles)


@pytest.mark.parametrize(
    ("scores", "beyond"),
    [
        ({1e-3: 1.0, 3e-3: 2.0, 1e-2: 0.0}, None),
        ({1e-3: 3.0, 3e-3: 2.0}, 3e-4),
        ({1e-3: 1.0, 3e-3: 2.0}, 1e-2),
        ({3e-2: 1.0, 1e-1: 2.0}, None),
    ],
)
def test_a_grid_grows_at_the_edge_where_its_best_rate_lies(scores, beyond):
    assert study.next_rate(scores, PROTOCOL["ladder"]) == beyond


def test_a_call_repeats_no_unit_that_has_records(tmp_path, monkeypatch):
    class Made:
        pairs = pairs(1)

        def scores(self, heads):
            return {"clean": heads.logit_scale.tolist()}

    laboratory = study.Laboratory.__new__(study.Laboratory)
    laboratory.protocol, laboratory.folder = PROTOCOL, tmp_path
    laboratory.data = lambda name: Made()
    unit = study.Unit("debiased", "framed", "random", Training(32, "random", 128, 1), 1e-3)
    laboratory.make(unit)
    records = study.read_records("debiased", tmp_path)
    assert [run["seed"] for run in records] == PROTOCOL["seeds"]
    assert {run["samples"] for run in records} == {128}
    monkeypatch.setattr(study, "train", lambda *_: pytest.fail("made again"))
    laboratory.make(unit)
    assert study.read_records("debiased", tmp_path) == records
    assert len(study.mean_scores(records, "clean", arm="random")) == 1


def test_the_signs_tell_sources_that_differ_from_those_that_do_not():
    draw = torch.Generator().manual_seed(0)
    alike = [torch.randn(300, 8, generator=draw) for _ in range(2)]
    apart = [alike[0], alike[1] + 4]
    assert source_probe(alike, draw) < 0.6 < 0.99 < source_probe(apart, draw)
    assert neighbours_mixing(apart) == pytest.approx(
        1, abs=0.1
    )  # centred: the shift does not count
    assert neighbours_mixing([alike[0] * torch.tensor([1.0, *[0.0] * 7]),
                              alike[1] * torch.tensor([0.0, *[1.0] * 7])]) < 0.5  # fmt: skip


def test_the_last_stages_on_stored_maps_are_the_whole_tower_and_are_trained():
    """The maps of the first stages give the tower's features; a training moves the stages below the heads."""
    torch.manual_seed(0)
    tower = timm.create_model("efficientnet_lite0", num_classes=0).eval()
    first, rest = stages.divided(tower)
    pictures = torch.randn(8, 3, 96, 96)
    with torch.no_grad():
        maps, features = first(pictures), tower(pictures)
    assert maps.shape == (8, 112, 6, 6)
    of_images = principal_components(torch.randn(400, features.shape[1]))
    heads = Heads(WIDTH_OF_STUDY, [0])
    expected = heads.encode("image", of_images(features)).detach()
    towers = stages.Stages(rest, heads, of_images)
    torch.testing.assert_close(towers.encode("image", maps).detach(), expected)
    before = rest[1].weight.detach().clone()
    data = Pairs(maps.half(), torch.randn(8, 2, WIDTH_OF_STUDY), (8,))
    assert train(towers, data, Training(4, "random", 8, 2), 1e-3, [0]) == 4
    assert not torch.equal(rest[1].weight, before)


# ---------------------------------------------------------------------------------------------------------------------
# Records and pages
# ---------------------------------------------------------------------------------------------------------------------


def made_up(arm: str, rate: float, gain: float, data: str = "framed") -> list[study.Record]:
    """A unit's records: seeds differ by 5 points, arms by `gain`."""
    facts = {"data": data, "arm": arm, "rate": rate, "samples": 1000, "cpu_seconds": 1.0}
    return [
        facts
        | {
            "seed": seed,
            "scores": dict.fromkeys(
                ("validation", "clean", "pool", "cross", "unseen"), 5 * seed + gain + 0.01 * seed
            ),
        }
        for seed in range(10)
    ]


def test_a_mixtures_row_is_paired_at_the_rate_that_random_batches_prefer():
    """Debiased gains 2 points at that rate, and 9 at one where it is best itself; a mixture without all rates is no row."""
    records = []
    for rate, random, debiased in ((1e-3, 0, 1), (3e-3, 5, 7), (1e-2, 1, 10)):
        records += made_up("random", rate, random) + made_up("debiased", rate, debiased)
    rows = study_report.mixture_rows(records, PROTOCOL)
    assert [row.name for row in rows] == ["framed"] and rows[0].rate == 3e-3
    assert rows[0].estimate("clean").mean == pytest.approx(2)
    assert "**+2.00 (+2.00 to +2.00)**<br>higher, above the margin" in study_report.mixtures_table(
        rows, PROTOCOL
    )
    assert study_report.mixture_rows(records[:-10], PROTOCOL) == []


def test_a_batch_is_compared_with_16_at_each_ones_best_rate():
    records = []
    for arm, rate, gain in (("16", 1e-4, 0), ("16", 3e-4, 3), ("16", 1e-3, 1)):
        records += made_up(arm, rate, gain, "")
    records += made_up("256", 3e-4, 9, "")  # at the edge of its grid: no row yet
    for rate, gain in ((3e-4, 1), (1e-3, 3.2), (3e-3, 2)):
        records += made_up("64", rate, gain, "")
    table = study_report.batch_table(records, PROTOCOL)
    assert "| 256" not in table
    row = next(line for line in table.splitlines() if line.startswith("| 64"))
    assert (
        "0.001 | 23.5 | 25.7 | 24.5 | **+0.20 (+0.20 to +0.20)**, higher, below the margin" in row
    )


def test_a_common_rate_end_to_end_has_a_verdict_with_all_seeds():
    """At 3e-4 a seed of C is not there: nine pairs, no verdict."""
    pilot = {"arm": "C", "rate": 1e-3, "pilot": True, "scores": {"flickr8k_mean_recall": 7.0}}
    records = [pilot] + [
        {"arm": arm, "rate": rate, "seed": seed, "pilot": False}
        | {"scores": {"flickr8k_mean_recall": 5 * seed + gain + 0.01 * seed * (arm == "C")}}
        for arm, gain in (("B", 0), ("C", -2))
        for rate in (3e-4, 1e-3)
        for seed in range(10)
        if (arm, rate, seed) != ("C", 3e-4, 9)
    ]
    first, second, third = study_report.common_rates_table(records).splitlines()[2:]
    assert first.startswith("| 0.0003 | - / - | 9 | 20.0 | 18.0 | -1.96 (") and first.endswith(
        ") |"
    )
    assert second.startswith("| 0.001 | - / 7.0 | 10 | 22.5 | 20.5 | -1.96 (")
    assert second.endswith("), lower, above the margin |")
    assert third == "| 0.003 | - / - | 0 |  |  |  |"


@pytest.mark.parametrize("part", list(study.units(PROTOCOL)))
def test_the_committed_records_are_fair_runs_of_the_protocol(part):
    """Each unit has all seeds once, a rate of the ladder, and its arm's samples; arms that are compared have the same."""
    records = study.read_records(part)
    by_unit: dict[tuple, list] = {}
    for run in records:
        by_unit.setdefault((run["data"], run["arm"], run["rate"]), []).append(run)
    samples: dict[str, set] = {}
    for (data, arm, rate), runs in by_unit.items():
        assert sorted(run["seed"] for run in runs) == study.seeds_of(PROTOCOL, part)
        assert rate in PROTOCOL["ladder"] and all(run["cpu_seconds"] > 0 for run in runs)
        samples.setdefault(data + arm * ("equal time" in arm), set()).update(
            run["samples"] for run in runs
        )
    assert all(len(each) == 1 for each in samples.values())
    if part == "debiased":
        page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
        assert {f"{count:,} samples a run" for each in samples.values() for count in each} == {
            "56,320 samples a run"
        } and "56,320 samples a run" in page
        assert {data for data, *_ in by_unit} <= PROTOCOL["debiased"]["mixtures"].keys()


def test_the_page_shows_the_tables_and_the_figure_of_the_records():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for table in study_report.tables(PROTOCOL).values():
        assert table in page


def test_the_readme_and_the_first_screen_say_what_the_rows_decide():
    """Whoever changes a sentence changes its row here; the rows must decide it, and stand after Holm's correction."""
    rows = {
        row.name: row for row in study_report.mixture_rows(study.read_records("debiased"), PROTOCOL)
    }
    batches = study.read_records("batch-random")
    arms = [
        study_report.of_arm(batches, arm=arm, rate=study_report.best_rate(batches, arm))
        for arm in ("256", "16")
    ]
    larger = study_report.difference(*arms, "clean")
    clean = rows["framed"].estimate("clean")
    readme, page = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("README.md", "docs/results.md")
    )
    for estimate, sentence in (
        (
            larger,
            "batch 256 over 16, same samples, each at its best rate | {:+.1f} ({:+.1f} to {:+.1f}) |",
        ),
        (clean, "the paper's mixture, clean photographs | {:+.1f} ({:+.1f} to {:+.1f}) |"),
    ):
        assert sentence.format(*estimate[:3]) in readme
        assert estimate.low > PROTOCOL["margin"]
    assert f"batch 256 scored {larger.mean:.1f} points of mean recall above batch 16" in readme
    styles = [row for row in rows.values() if "cross" in row.measures]
    assert len(styles) == 5 and "captions, five mixtures" in readme
    gains = {m: [row.estimate(m) for row in styles] for m in ("cross", "pool", "clean")}
    between = {m: sorted(estimate.mean for estimate in all_) for m, all_ in gains.items()}
    assert all(each.low > PROTOCOL["margin"] for each in gains["cross"])
    assert all(each.high < -PROTOCOL["margin"] for each in gains["pool"])
    assert all(each.low > 0 for each in gains["clean"])
    low, *_, high = between["cross"]
    assert f"five mixtures | {low:+.1f} to {high:+.1f} |" in readme
    assert f"across the styles they gain {low:.1f} to {high:.1f} points" in page
    low, *_, high = between["pool"]
    assert f"both styles searched together | {low:.1f} to {high:.1f} |" in readme
    assert f"as one pool: no, they lose {-high:.1f} to {-low:.1f}" in page
    low, *_, high, first = between["clean"]
    assert first == clean.mean and f"and {low:.1f} to {high:.1f} in others, where higher" in page
    others = [row for row in styles if not row.name.startswith("framed")]
    assert all(row.estimate("clean", 1e-2).mean < 0 for row in others)
    for name in ("grey pictures", "long captions"):  # "no effect"
        for estimate in map(rows[name].estimate, ("clean", "pool")):
            assert -PROTOCOL["margin"] < estimate.low < 0 < estimate.high < PROTOCOL["margin"]
    assert arms[0][0]["samples"] == arms[1][0]["samples"]
    assert arms[0][0]["rate"] == 3 * arms[1][0]["rate"]
    rates = [study_report.best_rate(batches, arm) for arm in ("16", "256", "1024")]
    grown = "{:g} for 16, {:g} for 256, {:g} for 1,024".format(*rates)
    assert f"The best rate grows with the batch: {grown}" in page and rates == sorted(rates)
    longer = study_report.of_arm(batches, arm="16, equal time", rate=rates[0])
    at_equal_time = study_report.difference(arms[0], longer, "clean")
    stays = "256 stays {:.1f} points above ({:+.1f} to {:+.1f})".format(*at_equal_time[:3])
    assert stays in page and longer[0]["samples"] == 1.4 * arms[1][0]["samples"]
    assert f"batch 256 scores {larger.mean:.1f} points of mean recall above 16" in page
    assert (
        f"On clean photographs they gain {clean.mean:.1f} points in the paper's own mixture" in page
    )
    content = [rows["products"].estimate("clean", rate) for rate in PROTOCOL["debiased"]["rates"]]
    assert sum(estimate.high < 0 for estimate in content) == 2
    null = [rows["split"].estimate(measure) for measure in ("clean", "pool")]
    assert all(abs(edge) < PROTOCOL["margin"] for each in null for edge in each[1:3])


def test_what_the_last_stages_decide_is_said():
    """Batches against 16 in few steps, and A.5's mixture at each rate of its grid."""
    settings = PROTOCOL | PROTOCOL["stages"]
    (row,) = study_report.mixture_rows(study.read_records("stages-debiased"), settings)
    batches = study.read_records("stages-batch")
    best = {
        arm: study_report.of_arm(batches, arm=arm, rate=study_report.best_rate(batches, arm))
        for arm in ("16", "64", "256")
    }
    smaller, larger = (
        study_report.difference(best[arm], best["16"], "clean") for arm in ("64", "256")
    )
    readme, page = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("README.md", "docs/results.md")
    )
    steps = best["256"][0]["steps"]
    assert smaller.low > PROTOCOL["margin"] and larger.high < 0
    said = f"In {steps} steps from pretrained weights 256 loses {-larger.mean:.1f}, and 64 gains {smaller.mean:.1f}."
    assert said in page
    shown = "last stages, {} steps, five seeds | {:+.1f} ({:+.1f} to {:+.1f}) |"
    assert shown.format(steps, *larger[:3]) in readme
    at = "At {:g} the differences are {:+.1f} and {:+.1f} points, at {:g} {:+.1f} and {:+.1f}."
    first, _, last = row.rates
    numbers = [
        (rate, *(row.estimate(measure, rate).mean for measure in ("clean", "pool")))
        for rate in (first, last)
    ]
    assert at.format(*numbers[0], *numbers[1]) in page
    clean = row.estimate("clean")
    assert clean.low > 0 and f"{clean.mean:.1f} with the image tower's last stages" in page


def test_the_split_does_not_depend_on_the_order_of_the_names():
    names = [f"{number}.jpg" for number in range(2500)]
    parts = flickr8k_split(names)
    assert parts == flickr8k_split(names[::-1])
    assert [len(part) for part in parts.values()] == [1000, 1000, 500]
    assert len(set().union(*parts.values())) == 2500


def test_holms_correction_stops_at_the_first_row_that_fails():
    """Four p at 5 %: 0.012 against 0.0125, 0.013 against 0.0167, 0.03 against 0.025; later ones are not compared."""
    assert study_report.holm({"a": 0.03, "b": 0.012, "c": 0.04, "d": 0.013}) == {"b", "d"}
    assert (
        study_report.holm({"a": 0.0126, "b": 0.013, "c": 0.013, "d": 0.013})
        == set()
        == study_report.holm({})
    )
