"""Figures 3 and 4: log p of negatives against a hand computation, the source probe on planted marks, the pools."""

import math

import pytest
import torch
import torch.nn.functional as F

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.compare.measures import source_probe_guesses
from open_clip_zerovl.evaluate.compare.pools import SourceFeatures, source_pools
from scripts.paper.figures import mean_log_p_negatives


def unit(*shape, seed=0):
    return F.normalize(
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
        dim=-1,
    )


# --- log p -----------------------------------------------------------------------------------------------------------


def test_log_p_equals_a_hand_computed_3_by_3_case():
    # With images = identity the score of (image j, text k) is component j of text k: a literal matrix of similarities.
    similarity = [[0.9, 0.1, 0.3], [0.2, 0.8, 0.4], [0.5, 0.6, 0.7]]
    images = torch.eye(3, dtype=torch.float64)
    texts = torch.tensor(similarity, dtype=torch.float64).T
    scale, source = 2.0, ["a", "a", "b"]

    def log_p(matrix, j, k):
        return scale * matrix[j][k] - math.log(sum(math.exp(scale * value) for value in matrix[j]))

    transposed = [list(column) for column in zip(*similarity, strict=True)]
    result = mean_log_p_negatives(images, texts, source, scale)
    same, other = [(0, 1), (1, 0)], [(0, 2), (1, 2), (2, 0), (2, 1)]
    for way, matrix in (("image_to_text", similarity), ("text_to_image", transposed)):
        for group, pairs in (("same_source", same), ("other_source", other), ("all", same + other)):
            expected = sum(log_p(matrix, j, k) for j, k in pairs) / len(pairs)
            assert result[way][group] == pytest.approx(expected, abs=1e-12)
            assert result["mean"][group] == pytest.approx(
                (result["image_to_text"][group] + result["text_to_image"][group]) / 2, abs=1e-12
            )
    b = sum(log_p(matrix, 2, k) for matrix in (similarity, transposed) for k in (0, 1)) / 4
    assert result["by_source"]["b"]["other_source"] == pytest.approx(b, abs=1e-12)
    assert result["by_source"]["b"]["same_source"] is None  # b has one pair only


def test_log_p_of_a_uniform_softmax_is_minus_ln_of_the_batch():
    same = F.normalize(torch.ones(40, 4), dim=-1)
    for batch_size in (5, 20, 40):
        result = mean_log_p_negatives(
            same, same, [i % 2 for i in range(40)], 50.0, batch_size=batch_size
        )
        assert result["mean"]["all"] == pytest.approx(-math.log(batch_size), abs=1e-6)


def test_log_p_does_not_depend_on_the_chunk_but_on_the_seed_of_the_batches(monkeypatch):
    images, texts, source = unit(30, 8), unit(30, 8, seed=1), ["abc"[i % 3] for i in range(30)]
    whole = mean_log_p_negatives(images, texts, source, 20.0, batch_size=10, seed=3)
    monkeypatch.setattr("open_clip_zerovl.evaluate.compare.measures._ROWS_AT_ONCE", 3)
    chunked = mean_log_p_negatives(images, texts, source, 20.0, batch_size=10, seed=3)
    assert whole["mean"]["other_source"] == pytest.approx(
        chunked["mean"]["other_source"], abs=1e-12
    )
    other_seed = mean_log_p_negatives(images, texts, source, 20.0, batch_size=10, seed=4)
    assert whole["mean"]["all"] != other_seed["mean"]["all"]


def test_a_source_mark_pushes_other_source_negatives_down():
    source = torch.arange(60) % 2
    plain = unit(60, 16)
    mark = 3 * F.one_hot(source, 2).double()
    marked = F.normalize(torch.cat([plain, mark], dim=1), dim=-1)
    clean = mean_log_p_negatives(plain, plain, source, 20.0)["mean"]
    biased = mean_log_p_negatives(marked, marked, source, 20.0)["mean"]
    assert biased["other_source"] < biased["same_source"] - 10
    assert abs(clean["other_source"] - clean["same_source"]) < 1  # the control


# --- the probe -------------------------------------------------------------------------------------------------------


def test_the_probe_finds_a_planted_mark_and_nothing_where_there_is_none():
    source = [("noto", "fluent", "twemoji", "openmoji")[i % 4] for i in range(400)]
    plain = unit(400, 32)
    mark = (
        0.5 * F.one_hot(torch.arange(400) % 4, 32).double()
    )  # a shift in four directions, as a red frame would be
    assert source_probe_guesses(F.normalize(plain + mark, dim=-1), source).mean() > 0.85
    # The control's standard error is sqrt(.25 * .75 / 400) = 2.2 %; three of them.
    assert source_probe_guesses(plain, source).mean() == pytest.approx(0.25, abs=0.065)


def test_the_probe_is_reproducible_and_keeps_a_concept_on_one_side():
    # Each concept comes in both sources with nearly one embedding: a probe that may see the duplicate learns the wrong source
    # by heart, one that may not is at chance.
    concepts = [i // 2 for i in range(200)]
    features = unit(100, 64).repeat_interleave(2, dim=0) + 0.001 * unit(200, 64, seed=1)
    source = [i % 2 for i in range(200)]
    grouped = source_probe_guesses(features, source, concepts=concepts).mean()
    assert grouped == source_probe_guesses(features, source, concepts=concepts).mean()
    assert grouped == pytest.approx(0.5, abs=0.11)
    assert source_probe_guesses(features, source).mean() < grouped


def test_the_probe_refuses_too_little():
    with pytest.raises(UserError, match="5 folds cannot be cut from a source of 2 samples"):
        source_probe_guesses(unit(10, 4), list("aaaaaaaabb"))


# --- the pools -------------------------------------------------------------------------------------------------------


def two_sources(mark: float, known: int = 20) -> dict[str, SourceFeatures]:
    """Two sources with the same `known` concepts; each pair carries its concept, and `mark` times its source."""
    content = unit(known, 64)
    result = {}
    for index, name in enumerate("ab"):
        tag = mark * F.one_hot(torch.full((known,), index), 2)
        features = F.normalize(torch.cat([content, tag.double()], dim=1), dim=-1)
        held_out = [(i % 2 == index) for i in range(known)]
        result[name] = SourceFeatures(features, features, [f"c{i}" for i in range(known)], held_out)
    return result


def rsum_and_size(features: dict[str, SourceFeatures]) -> dict[str, dict[str, tuple]]:
    """Kind of pools -> name -> (RSUM, pictures)."""
    kinds = source_pools(features).kinds
    return {
        kind: {name: (pool.rsum, pool.size) for name, pool in own.items()}
        for kind, own in kinds.items()
    }


def test_perfect_features_score_600_in_every_pool():
    assert rsum_and_size(two_sources(mark=0.0)) == {
        "within": {"a": (600, 10), "b": (600, 10)},
        "across": {"a->b": (600, 10), "b->a": (600, 10)},
        "mixed": {"mixed": (600, 20)},
    }


def test_a_model_that_knows_only_the_source_gains_in_the_mixed_pool_alone():
    rows = 20
    chance = {}
    for mark in (0.0, 1.0):
        features = {}
        for index, name in enumerate("ab"):
            # The same embedding for every pair of a source: nothing about content, all about the source.
            one = torch.tensor([1.0 - mark * index, mark * index]).expand(rows, 2)
            features[name] = SourceFeatures(
                one, one, [str(i) for i in range(rows)], [i % 2 == index for i in range(rows)]
            )
        chance[mark] = rsum_and_size(features)
    mixed = {mark: kinds.pop("mixed")["mixed"][0] for mark, kinds in chance.items()}
    # With the mark the chance level of 10, not of 20.
    assert mixed == pytest.approx({1.0: 2 * (10 + 50 + 100), 0.0: 2 * (5 + 25 + 50)})
    for kind, pools in chance[1.0].items():
        for name, one in pools.items():
            assert one == pytest.approx(chance[0.0][kind][name])


def test_pools_match_concepts_by_name_and_leave_out_those_a_source_lacks():
    sources = two_sources(mark=0.0)
    b = sources["b"]
    order = torch.arange(19, 4, -1)  # reversed, and without the first five concepts
    sources["b"] = SourceFeatures(
        b.image_features[order],
        b.text_features[order],
        [b.concepts[i] for i in order],
        [b.held_out[i] for i in order],
    )
    # a holds out c0, c2, ..., of which b lacks three
    assert rsum_and_size(sources)["across"] == {"a->b": (600, 7), "b->a": (600, 8)}


def test_sources_without_a_common_concept_have_no_pools_across():
    sources = two_sources(mark=0.0)
    a = sources["a"]
    sources["a"] = SourceFeatures(
        a.image_features, a.text_features, [f"x{i}" for i in range(20)], a.held_out
    )
    result = rsum_and_size(sources)
    assert "across" not in result and result["within"] == {"a": (600, 10), "b": (600, 10)}
