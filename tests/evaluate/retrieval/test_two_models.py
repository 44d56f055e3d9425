"""`zerovl retrieval A B`: two models on the same pairs, and the paired difference of RSUM."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from open_clip_zerovl import cli
from open_clip_zerovl.evaluate.metrics import interval, resampled
from open_clip_zerovl.evaluate.retrieval import GallerySet, _rsum_over_pictures, rsum_difference
from support.tiny_clip import write_retrieval_set


def scored(noise: float, seed: int = 0, pictures: int = 150) -> GallerySet:
    """A set of two captions a picture, by a model with some noise."""
    rng = torch.Generator().manual_seed(7)
    links = torch.arange(pictures).repeat_interleave(2)
    images = F.normalize(torch.randn(pictures, 16, generator=rng), dim=1)
    blur = torch.randn(len(links), 16, generator=torch.Generator().manual_seed(seed))
    texts = F.normalize(images[links] + noise * blur, dim=1)
    captions = [(f"a {i}", f"b {i}") for i in range(pictures)]
    return GallerySet.scored("s", captions, lambda image: None, (images, texts, links))


def test_the_difference_is_that_of_rsum_and_its_interval_is_paired():
    first, second = scored(0.5), scored(0.45)  # of one seed: nearly the same captions are found
    found = rsum_difference(first, second)
    wanted = second.metrics["rsum"] - first.metrics["rsum"]
    assert found["difference"] == pytest.approx(wanted) and found["low"] < wanted < found["high"]
    # Unpaired, by draws of their own, the interval is far wider.
    alone = [
        resampled({"m": _rsum_over_pictures(one)}, 1000, n)["m"]
        for n, one in enumerate((first, second))
    ]
    low, high = interval(alone[1] - alone[0])
    assert high - low > 1.5 * (found["high"] - found["low"])
    same = rsum_difference(first, first)
    assert same == {"difference": 0, "low": 0, "high": 0}


def test_pictures_are_drawn_with_their_captions():
    """Each picture twice is no more evidence: the spread of RSUM over pictures is that of its terms."""
    of_set = scored(0.6)
    measure = _rsum_over_pictures(of_set)
    assert measure.value == pytest.approx(of_set.metrics["rsum"])
    assert measure.counts.sum(axis=1).tolist() == [150, 300]
    assert np.ptp(measure.counts[1]) == 0


def test_the_command_shows_models_side_by_side(tmp_path, clip_runs, export, capsys):
    """Also a folder beside a checkpoint; a model against itself does not differ."""
    for name in "ab":
        write_retrieval_set(tmp_path / name, [2] * 12)
    data = f"a={tmp_path / 'a'}::b={tmp_path / 'b'}"
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "html")}
    models = [f"one={clip_runs[0]}", f"two={clip_runs[1]}", f"again={clip_runs[0]}", str(export)]
    command = ["retrieval", *models, "--data", data, "--device", "cpu"]
    command += [f"--output={files['json']}", f"--csv={files['csv']}", f"--gallery={files['html']}"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "b, two" in printed and "two - one" in printed and "Another seed of training" in printed
    report = json.loads(files["json"].read_text())
    differences = report["rsum_differences_from_the_first"]
    assert differences["a"]["again"] == {"difference": 0, "low": 0, "high": 0}
    assert list(report["models"]) == ["one", "two", "again", "export"]
    rsum = {name: model["results"]["a"]["rsum"] for name, model in report["models"].items()}
    assert differences["a"]["two"]["difference"] == pytest.approx(rsum["two"] - rsum["one"])
    rows = list(csv.DictReader(files["csv"].open()))
    assert [(row["set"], row["model"]) for row in rows[:3]] == [
        ("a", clip_runs[0]),
        ("b", clip_runs[0]),
        ("a", clip_runs[1]),
    ]
    assert "b, two" in files["html"].read_text()
    # Each model has its own scores: those of a call with it alone.
    assert (
        cli.main(
            ["retrieval", clip_runs[1], "--data", data, f"--output={files['json']}", "--device=cpu"]
        )
        == 0
    )
    assert json.loads(files["json"].read_text())["results"]["a"]["rsum"] == rsum["two"]


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ("a=ONE a=TWO", "needs a name of its own"),
        ("ONE gone.pt", "'gone.pt' is not a model"),
    ],
)
def test_refusals_before_a_model_is_loaded(models, sentence, tmp_path, clip_runs, capsys):
    write_retrieval_set(tmp_path / "s", [1] * 4)
    words = models.replace("ONE", clip_runs[0]).replace("TWO", clip_runs[1]).split()
    assert cli.main(["retrieval", *words, "--data", f"s={tmp_path / 's'}"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and "batch" not in error  # of a progress bar
