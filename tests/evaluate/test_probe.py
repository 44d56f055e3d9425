"""The linear probe: features before the projection, logistic regression, and the sets it reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from open_clip_zerovl import cli
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.metrics import (
    accuracies,
)
from open_clip_zerovl.evaluate.probe import (
    fit_logistic,
    middle_of_best,
    stratified_fifth,
)
from support.colours import colour_set, write_folder


def test_quick_way_agrees_with_scikit_learn_on_the_same_features():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 12))
    targets = rng.integers(4, size=400)
    features = (
        torch.tensor(centres[targets] + 1.5 * rng.normal(size=(400, 12)), dtype=torch.float32) * 7
        + 3
    )
    features[:, 5] = 1.25  # a feature that never changes
    fit = fit_logistic(features[:300], torch.tensor(targets[:300]))
    own = make_pipeline(StandardScaler(), LogisticRegression(C=fit.chosen_c, max_iter=1000))
    own.fit(features[:300].double().numpy(), targets[:300])
    scores = fit.scores(features[300:])
    np.testing.assert_allclose(
        scores.exp(), own.predict_proba(features[300:].double().numpy()), atol=1e-6
    )
    assert fit.converged and 0.6 < accuracies(scores, torch.tensor(targets[300:]))["top1"] < 1
    held, rest = stratified_fifth(targets[:300], 0)
    own.fit(features[rest].double().numpy(), targets[rest])
    wanted = own.score(features[held].double().numpy(), targets[held])
    assert fit.split_accuracy[fit.chosen_c] == max(fit.split_accuracy.values())
    assert fit.split_accuracy[fit.chosen_c] == pytest.approx(wanted, abs=0.02) and wanted < 1


def test_the_fifth_that_chooses_c_holds_a_fifth_of_each_class():
    targets = np.repeat([0, 1, 2], [50, 20, 5])
    held, rest = stratified_fifth(targets, 0)
    assert np.bincount(targets[held]).tolist() == [10, 4, 1]
    assert sorted([*held, *rest]) == list(range(75))
    held, rest = stratified_fifth(np.arange(20) // 2, 0)  # ten classes of two: each keeps one
    assert len(held) == 4 and len(np.unique((np.arange(20) // 2)[rest])) == 10
    with pytest.raises(UserError, match="leave none to choose C"):
        stratified_fifth(np.arange(8), 0)


def test_the_middle_of_equally_good_cs_is_taken():
    """Any C separates the classes; with the smallest the fit itself is next to nothing."""
    assert middle_of_best({1e-5: 1.0, 1.0: 1.0}) == 1e-5
    targets = torch.arange(40) % 2
    features = torch.stack([10.0 * targets, torch.arange(40) % 7], 1)
    fit = fit_logistic(features, targets)
    assert set(fit.split_accuracy.values()) == {1.0} and 1e-3 < fit.chosen_c < 10


def test_the_command(tmp_path: Path, clip_runs, capsys: pytest.CaptureFixture[str]):
    train, test = (
        write_folder(tmp_path / f"set{seed}", colour_set(n, seed=seed))
        for seed, n in enumerate((30, 12))
    )
    words = f"--train {train} --test {test} --out {tmp_path / 'out'} --device cpu".split()
    results = []
    for _ in range(2):  # again: the features are there, with the same result
        assert cli.main(["linear-probe", clip_runs[0], *words]) == 0
        results.append(json.loads((tmp_path / "out" / "linear_probe.json").read_text()))
    result, again = results
    assert result == again and result["feature_width"] == 32 and result["test"]["images"] == 12
    assert result["top1"] == 1.0 and result["converged"]
    assert (
        "linear probe, 3 classes, 12 test images: top-1 100.0 [75.7 to 100.0] %, mean per class 100.0 %, chance 33.3 %"
        in capsys.readouterr().out
    )
