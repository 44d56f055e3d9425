"""Metrics: hand-computed matrices, properties, ties, parity with CLIP_benchmark, chance, and intervals by resampling."""

from __future__ import annotations

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from clip_benchmark.datasets.builder import build_wds_dataset
from clip_benchmark.metrics import zeroshot_retrieval
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate import metrics as metrics_module
from open_clip_zerovl.evaluate.metrics import (
    mean_over,
    recall_bounds,
    resampled,
    retrieval_metrics,
)
from support.scoring import score_checkpoint
from support.tiny_clip import write_retrieval_set


def random_features(
    images: int, counts: list[int], width: int = 16, noise: float = 1.0, seed: int = 0
):
    """Normalised features where a caption is its picture plus noise, in shuffled order."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(images, width, generator=generator)
    links = torch.arange(images).repeat_interleave(torch.tensor(counts))
    links = links[torch.randperm(len(links), generator=generator)]
    text = image[links] + noise * torch.randn(len(links), width, generator=generator)
    return F.normalize(image, dim=-1), F.normalize(text, dim=-1), links


def metrics_of_scores(scores, links, **options):
    """The metrics of features with these scores: texts are unit vectors."""
    return retrieval_metrics(
        scores, torch.eye(scores.shape[1], dtype=scores.dtype), links, **options
    )


def test_hand_computed_matrix_with_several_captions_per_image():
    # Captions:            0    1    2    3    4    5   (of images 0, 1, 2, 0, 1, 1)
    scores = torch.tensor(
        [
            [0.3, 0.9, 0.1, 0.8, 0.2, 0.0],  # best own caption (3) is second
            [0.7, 0.5, 0.6, 0.4, 0.3, 0.2],  # best own (1) is third
            [0.1, 0.2, 0.9, 0.3, 0.4, 0.5],  # own (2) is first
        ]
    )
    found = metrics_of_scores(scores, [0, 1, 2, 0, 1, 1], ks=(1, 2, 3))
    # Columns: the own image's rank is 2, 2, 1, 1, 2, 2.
    wanted = {"image_to_text": (1 / 3, 2 / 3, 1), "text_to_image": (2 / 6, 1, 1)}
    rows = {
        f"{way}_R@{k}": share for way, shares in wanted.items() for k, share in enumerate(shares, 1)
    }
    assert found == pytest.approx(rows, abs=1e-12)  # and no RSUM


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 10_000])
def test_a_collapsed_model_scores_chance_and_not_its_place_in_the_file(chunk_size):
    """Negative control: a sort that keeps equal items in file order would give the first picture a hit."""
    images, captions = 40, 3
    feature = F.normalize(torch.randn(1, 50, generator=torch.Generator().manual_seed(1)), dim=-1)
    links = torch.arange(images).repeat_interleave(captions)
    features = feature.repeat(images, 1), feature.repeat(images * captions, 1)
    metrics = retrieval_metrics(*features, links, chunk_size=chunk_size)
    for k in (1, 5, 10):
        assert metrics[f"text_to_image_R@{k}"] == pytest.approx(k / images, abs=1e-9)
        # 1 - C(117, k) / C(120, k): no own caption among k drawn of 120.
        miss = np.prod([(117 - j) / (120 - j) for j in range(k)])
        assert metrics[f"image_to_text_R@{k}"] == pytest.approx(1 - miss, abs=1e-9)


def test_ties_equal_the_mean_over_all_orders():
    """Against a brute force: expected hits over random orders of a matrix full of ties."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 3, (6, 14), generator=generator).double()
    links = torch.cat([torch.arange(6), torch.randint(0, 6, (8,), generator=generator)])
    exact = metrics_of_scores(scores, links, ks=(1, 3))
    draws = 20_000
    hits = dict.fromkeys(exact, 0.0)
    for name, matrix, positive in (
        ("image_to_text", scores, links[None, :] == torch.arange(6)[:, None]),
        ("text_to_image", scores.T, links[:, None] == torch.arange(6)[None, :]),
    ):
        noise = torch.rand(draws, *matrix.shape, generator=generator) * 0.5
        order = (matrix + noise).argsort(dim=-1, descending=True)
        sorted_positive = positive.expand(draws, *matrix.shape).gather(-1, order)
        for k in (1, 3):
            hits[f"{name}_R@{k}"] = float(sorted_positive[..., :k].any(-1).double().mean())
    for name, value in exact.items():
        assert value == pytest.approx(hits[name], abs=0.005)  # standard error below 0.0015


def test_a_captions_own_score_may_differ_in_the_last_bit(monkeypatch):
    """It is computed in two ways; a caption is never ranked behind its own image by that."""
    image, text, links = random_features(20, [2] * 20, seed=6)
    wanted = retrieval_metrics(image, text, links)
    paired = metrics_module._paired_scores
    assert torch.equal(paired(image, text, links, 7), paired(image, text, links))  # 7 at once
    for nudge in (1 + 2**-23, 1 - 2**-23):
        monkeypatch.setattr(
            metrics_module, "_paired_scores", lambda *a, nudge=nudge: paired(*a) * nudge
        )
        assert retrieval_metrics(image, text, links) == pytest.approx(wanted, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=25),
    chunk_size=st.integers(1, 40),
    duplicates=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_order_and_chunks_do_not_matter(counts, chunk_size, duplicates, seed):
    image, text, links = random_features(len(counts), counts, seed=seed)
    if duplicates:  # equal captions and equal pictures: ties
        text[-1] = text[0]
        image[-1] = image[0]
    whole = retrieval_metrics(image, text, links, chunk_size=10_000)
    assert retrieval_metrics(image, text, links, chunk_size=chunk_size) == pytest.approx(
        whole, abs=1e-9
    )

    generator = torch.Generator().manual_seed(seed)
    image_order = torch.randperm(len(image), generator=generator)
    text_order = torch.randperm(len(text), generator=generator)
    moved = image_order.argsort()[links[text_order]]
    permuted = retrieval_metrics(image[image_order], text[text_order], moved, chunk_size=chunk_size)
    assert permuted == pytest.approx(whole, abs=1e-9)

    scores = (image.double() @ text.double().T).float()
    assert metrics_of_scores(scores, links, chunk_size=chunk_size) == pytest.approx(whole, abs=1e-9)
    for way in ("image_to_text", "text_to_image"):
        assert 0 <= whole[f"{way}_R@1"] <= whole[f"{way}_R@5"] <= whole[f"{way}_R@10"] <= 1


def test_the_results_are_clip_benchmarks(tmp_path, export):
    """The same folder by both programs: their reader, encoding and metrics, in full precision."""
    counts = np.random.default_rng(5).integers(1, 8, 48).tolist()
    write_retrieval_set(tmp_path / "set", counts)
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{export}")
    loader = DataLoader(
        build_wds_dataset("wds/set", transform, data_dir=str(tmp_path / "set")).batched(20),
        batch_size=None,
    )
    tokenizer = open_clip.get_tokenizer(f"local-dir:{export}")
    theirs = zeroshot_retrieval.evaluate(
        model.eval(), loader, tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10]
    )
    data = f"s={tmp_path / 'set'}"
    ours = score_checkpoint(str(export), data, captions_per_image=None)["s"]
    assert ours["captions"] == sum(counts)
    for way, name in (("image_to_text", "text"), ("text_to_image", "image")):
        for k in (1, 5, 10):
            theirs_at_k = theirs[f"{name}_retrieval_recall@{k}"]
            assert ours[f"{way}_R@{k}"] == pytest.approx(theirs_at_k, abs=1e-6)
    # The comparison is informative: the recalls are neither all 0 nor all 1. Five captions an image are another measurement.
    assert 0 < ours["text_to_image_R@10"] < 1 and 0 < ours["image_to_text_R@5"] < 1
    five = score_checkpoint(str(export), data)["s"]
    assert five["captions"] == sum(min(count, 5) for count in counts)


@pytest.mark.parametrize(
    ("image", "links", "sentence"),
    [
        (torch.zeros(3, 2), [0, 1], "for each of the 3 captions; it has 2 entries"),
        (torch.zeros(3, 2), [0, 1, 3], r"an image's index in 0\.\.2 for each of the 3"),
        (torch.zeros(3, 2), [0, 2, 2], "image 1 has no caption"),
        (torch.zeros(0, 2), [], "the set without images has no caption"),
        (torch.tensor([[0.0, 1], [float("nan"), 0]]), [0, 1], "NaN or infinity .*row 1"),
    ],
)
def test_what_would_give_a_wrong_number_is_refused(image, links, sentence):
    with pytest.raises(UserError, match=sentence):
        retrieval_metrics(image, torch.zeros(len(image), 2), links)


def test_chance_is_the_mean_of_random_orders_and_its_bound_holds_nearly_all():
    captions = [f"caption {i}" for i in range(60)]
    links = torch.arange(30).repeat_interleave(2)
    bounds = recall_bounds(captions, links)
    drawn = []
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        drawn.append(metrics_of_scores(torch.rand(30, 60, generator=generator), links)["rsum"])
    assert np.mean(drawn) == pytest.approx(bounds["rsum_chance"], abs=3 * np.std(drawn) / 300**0.5)
    assert (
        np.mean(np.array(drawn) <= bounds["rsum_chance_upper"]) > 0.95
        and bounds["rsum_best"] == 600
    )
    one = torch.ones(60, 4)  # a collapsed model has it exactly
    assert retrieval_metrics(F.normalize(one[:30], dim=1), F.normalize(one, dim=1), links)[
        "rsum"
    ] == pytest.approx(bounds["rsum_chance"], abs=1e-9)


def test_the_best_possible_score_is_that_of_a_model_that_knows_the_captions():
    """Pictures of one caption get its embedding, so that all of them tie."""
    captions = ["a person"] * 20 + ["a dog"] * 8 + ["a red car", "a blue car"]
    best = recall_bounds(captions, range(30))["rsum_best"]
    texts = F.one_hot(torch.tensor([0] * 20 + [1] * 8 + [2, 3]), 4).float()
    assert (
        best == pytest.approx(retrieval_metrics(texts, texts, range(30))["rsum"], abs=1e-9)
        and best < 300
    )
    # A second caption that no other picture has makes each picture known.
    assert recall_bounds([*captions, *map(str, range(30))], [*range(30), *range(30)])[
        "rsum_best"
    ] == pytest.approx(450 + best / 4)


def test_the_interval_of_a_mean_is_that_of_statistics_and_covers_as_often_as_it_says():
    """The mean of n values: the interval is 2 * 1.96 * s / sqrt(n) wide, and 95 of 100 hold the truth (binomial: 88 to 100)."""
    rng, held = np.random.default_rng(0), 0
    for trial in range(100):
        values = torch.from_numpy(rng.exponential(size=200))
        measure = mean_over([(torch.arange(200), values)], 200)
        drawn = resampled({"m": measure}, 400, seed=trial)["m"]
        low, high = np.quantile(drawn, (0.025, 0.975))
        held += low < 1 < high
        assert high - low == pytest.approx(2 * 1.96 * values.std().item() / 200**0.5, rel=0.25)
    assert 87 <= held <= 100


def test_queries_of_one_concept_are_drawn_together():
    """Twenty copies of each of 10 values are no more evidence than the 10; drawn one by one they would seem so."""
    values = torch.from_numpy(np.random.default_rng(1).normal(size=10)).repeat_interleave(20)
    together = mean_over([(torch.arange(10).repeat_interleave(20), values)], 10)
    alone = mean_over([(torch.arange(200), values)], 200)
    wide, narrow = (
        np.ptp(np.quantile(resampled({"m": m}, 1000, 0)["m"], (0.025, 0.975)))
        for m in (together, alone)
    )
    assert wide > 3 * narrow


def test_draws_are_seeded_and_the_same_for_all_measures(monkeypatch):
    """Also those of a large set, which are drawn in parts."""
    values = torch.from_numpy(np.random.default_rng(2).normal(size=50))
    one = mean_over([(torch.arange(50), values)], 50)
    shifted = mean_over([(torch.arange(50), values + 1)], 50)
    drawn = resampled({"one": one, "shifted": shifted}, 300, 5)
    assert np.allclose(drawn["shifted"] - drawn["one"], 1)  # a paired difference has no spread here
    assert np.array_equal(drawn["one"], resampled({"one": one}, 300, 5)["one"])
    assert not np.array_equal(drawn["one"], resampled({"one": one}, 300, 6)["one"])
    uneven = mean_over([(torch.tensor([0, 1, 1]), torch.tensor([1.0, 5.0, 6.0]))], 2)
    assert uneven.weighted(np.array([[2.0, 0.0], [1.0, 1.0]])).tolist() == [1, 4]
    monkeypatch.setattr(metrics_module, "_DRAWS_AT_ONCE_BYTES", 7 * 50 * 8)
    assert np.allclose(drawn["one"], resampled({"one": one}, 300, 5)["one"])
