"""Source bias: pools, log p and the probe against numbers by hand, and the program on tiny models."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import parse_sources
from scripts.paper.bias import Pair, bias, cells_of, measure, read_pairs, rows_of
from scripts.paper.bias_measures import (
    Pool,
    hits_of,
    log_p_by_query,
    pools_of,
    ranks_by_label,
    source_probe_guesses,
    units_of,
)
from scripts.program import program
from support.tars import png, write_tar
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, random_model, register, write_run


def unit(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return F.normalize(
        torch.randn(
            rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ),
        dim=1,
    )


Embedded = tuple[list[Pair], torch.Tensor, torch.Tensor]


def pairs_of(source: str, concepts: list[str | None], held_out: list[bool] | None = None):
    held = held_out or [True] * len(concepts)
    return [Pair(source, b"", "", *each) for each in zip(concepts, held, strict=True)]


def sources(*, bias: float, noise: float, seed: int = 0, rows: int = 60) -> Embedded:
    """Two sources of the same concepts: a pair's embeddings share its content, `noise` blurs them, `bias` marks the source."""
    content = unit(rows, 48, seed=100)
    sides = [[], []]
    for index, side in itertools.product((0, 1), (0, 1)):
        mark = bias * F.one_hot(torch.tensor(index), 48).double()
        blur = noise * unit(rows, 48, seed=7 * seed + 2 * index + side)
        sides[side].append(F.normalize(content + blur + mark, dim=1).float())
    concepts = [f"c{row}" for row in range(rows)]
    return pairs_of("a", concepts) + pairs_of("b", concepts), *map(torch.cat, sides)


def pools_by_kind(pairs: list[Pair]) -> dict[str, list[Pool]]:
    columns = zip(*((pair.source, pair.concept, pair.held_out) for pair in pairs), strict=True)
    kinds: dict[str, list[Pool]] = {}
    for pool in pools_of(*columns):
        kinds.setdefault(pool.kind, []).append(pool)
    return kinds


def rsum(pool: Pool, features: torch.Tensor, units: torch.Tensor) -> float:
    """The RSUM of features that are the same on both sides."""
    terms, _ = hits_of(pool, features, features, units)
    return 100 * sum(float(hits.mean()) for _, hits in terms)


# -- hits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 7, 1024])
def test_a_copy_of_the_best_match_ties_with_it_in_blocks_of_any_size(chunk, monkeypatch):
    """In fp32 a product's last bit depends on where the copy stands and on how many rows are multiplied at once."""
    monkeypatch.setattr("scripts.paper.bias_measures._ROWS_AT_ONCE", chunk)
    for width in (12, 77, 500):
        queries = unit(101, width)
        keys = F.normalize(queries + 0.3 * unit(101, width, seed=1), dim=1)
        labels = torch.arange(101)
        ranks = ranks_by_label(queries, torch.cat([keys, keys[:98]]), labels, torch.arange(199))
        assert ranks.tied.tolist() == [2] * 98 + [1] * 3 and (ranks.tied_positives == 1).all()


def test_concepts_that_repeat_or_are_missing_match_as_they_should():
    pairs = pairs_of("a", ["dog", "dog", "cat", None]) + pairs_of("b", ["cat", "dog", None])
    features, units = torch.eye(6)[[0, 0, 1, 5, 1, 0, 5]], units_of([p.concept for p in pairs])
    assert units.tolist() == [0, 0, 1, 2, 1, 0, 3]  # dog, cat, and two of their own
    kinds = pools_by_kind(pairs)
    across = kinds["across"][0]
    assert rsum(across, features, units) == 600
    # two dogs and a cat; a pair without concept stays out
    assert (across.images, across.texts) == ([0, 1, 2], [4, 5])
    # In one pool only the own pair is right: the two dogs of a are each other's ties, and b's dog too.
    terms, _ = hits_of(kinds["mixed"][0], features, features, units)
    assert terms[0][1][0] == pytest.approx(1 / 3 + 1 + 1)
    assert "across" not in pools_by_kind(pairs[:4])


def test_a_model_that_knows_only_the_source_gains_in_the_mixed_pool_alone():
    rows = 20
    concepts = [str(i) for i in range(rows)]
    pairs = [
        pair
        for index, name in enumerate("ab")
        for pair in pairs_of(name, concepts, [i % 2 == index for i in range(rows)])
    ]
    units, scores = units_of(concepts * 2), {}
    for mark in (0.0, 1.0):
        # The same embedding for every pair of a source: nothing about content, all about the source.
        features = torch.tensor([[1.0, 0.0], [1.0 - mark, mark]]).repeat_interleave(rows, dim=0)
        for kind, pools in pools_by_kind(pairs).items():
            scores[mark, kind] = [rsum(pool, features, units) for pool in pools]
    # With the mark the chance level of 10, not of 20.
    assert scores[1.0, "mixed"] == pytest.approx([2 * (10 + 50 + 100)])
    assert scores[0.0, "mixed"] == pytest.approx([2 * (5 + 25 + 50)])
    for kind in ("within", "across"):
        assert scores[1.0, kind] == pytest.approx(scores[0.0, kind])


# -- log p and the probe -------------------------------------------------------------------------------------------


def test_log_p_equals_a_hand_computed_3_by_3_case():
    # With images = identity the score of (image j, text k) is component j of text k: a literal matrix of similarities.
    similarity = [[0.9, 0.1, 0.3], [0.2, 0.8, 0.4], [0.5, 0.6, 0.7]]
    images = torch.eye(3, dtype=torch.float64)
    texts = torch.tensor(similarity, dtype=torch.float64).T
    scale, source = 2.0, ["a", "a", "b"]

    def log_p(matrix, j, k):
        return scale * matrix[j][k] - math.log(sum(math.exp(scale * value) for value in matrix[j]))

    transposed = [list(column) for column in zip(*similarity, strict=True)]
    result = log_p_by_query(images, texts, source, scale)
    negatives = {0: {0: [1], 1: [0], 2: []}, 1: {0: [2], 1: [2], 2: [0, 1]}}  # same, other source
    for way, matrix in enumerate((similarity, transposed)):
        for group, of_query in negatives.items():
            for query, others in of_query.items():
                expected = sum(log_p(matrix, query, other) for other in others)
                assert result[0, way, group, query] == pytest.approx(expected, abs=1e-12)
                assert result[1, way, group, query] == len(others)


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


# -- the numbers ---------------------------------------------------------------------------------------------------


def test_a_debiased_model_differs_from_a_biased_one_and_not_from_its_like():
    def model(bias: float, seed: int):
        return measure(*sources(bias=bias, noise=1.0, seed=seed), 30.0)

    measured = {"biased": model(2.0, 0), "debiased": model(0.0, 0), "like": model(2.0, 50)}
    rows = {row["kind"]: row for row in rows_of(measured, draws=400)}
    for kind, way in (("across", 1), ("probe_images", -1), ("mixed", -1), ("log_p_other", 1)):
        difference = rows[kind]["differences"]["debiased"]
        low, high = difference["interval"]
        assert low < difference["value"] < high and (low if way > 0 else -high) > 0, kind
    low, high = rows["within"]["differences"]["like"]["interval"]
    assert low < 0 < high
    assert rows["within"]["chance"] == pytest.approx(2 * 100 * 16 / 60)
    assert rows["probe_images"]["chance"] == 50
    assert (
        cells_of(rows["across"])[0] == "RSUM across" and len(cells_of(rows["across"])) == 2 + 3 + 2
    )


# -- pairs and the program -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip_runs(tmp_path_factory) -> list[str]:
    """Checkpoints of two seeds of a small CLIP."""
    folder = tmp_path_factory.mktemp("clip")
    name = register(folder, "bias-clip", NATIVE_VISION, CLIP_TEXT)
    return [
        str(write_run(folder / f"run{s}", random_model(name, seed=s), {"model": name}))
        for s in range(2)
    ]


def test_pairs_are_spread_over_shards_and_bad_ones_passed_over(tmp_path: Path):
    for shard in range(3):
        members = []
        for i in range(6):
            content = b"no picture" if (shard, i) == (1, 0) else png((shard, i, 0))
            members += [(f"{i}.png", content), (f"{i}.txt", f"caption {shard} {i}\nmore".encode())]
            members.append((f"{i}.json", json.dumps({"concept": i}).encode()))
        write_tar(tmp_path / "a" / f"{shard}.tar", [*members, ("9.png", png((0, 0, 0)))])
    sources = parse_sources(f"a={tmp_path / 'a'}")
    pairs = read_pairs(sources, 6, concept_field="concept")
    places = [(0, 0), (0, 1), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert [pair.caption for pair in pairs] == [f"caption {shard} {i}" for shard, i in places]
    assert pairs[0].concept == "0" and pairs[0].picture().size == (8, 8)
    pairs = read_pairs(sources, 500)  # more than there are: all 17 usable ones
    assert len(pairs) == 17 and pairs[0].concept is None


COLOURS = ("red", "green", "blue")


def write_pairs(folder: Path, seed: int, *, count: int = 36) -> Path:
    """Pairs of one colour each, with json that gives the colour and the held-out pairs."""
    rng = np.random.default_rng(seed)
    members = []
    folder.mkdir(parents=True)
    for i in range(count):
        colour, image = COLOURS[i % 3], png(tuple(int(v) for v in rng.integers(0, 256, 3)), 16)
        kept = i < count - 6
        members += [(f"{i:03d}.png", image), (f"{i:03d}.txt", f"a {colour} cat".encode())]
        members.append(
            (f"{i:03d}.json", json.dumps({"shows": f"{colour} {i}", "kept": kept}).encode())
        )
    write_tar(folder / "0.tar", members)
    return folder


def test_the_program_measures_models_on_shards(tmp_path: Path, clip_runs, capsys):
    a, b, c = (write_pairs(tmp_path / name, seed) for seed, name in enumerate("abc"))
    command = [f"one={clip_runs[0]}", f"two={clip_runs[1]}", f"same={clip_runs[0]}"]
    command += ["--data", f"a={a}::b={b}", "--device", "cpu", "--draws", "200"]
    more = f"--unseen c={c} --concept shows --held-out kept --out {tmp_path / 'out'}".split()
    assert program(bias, [*command, *more]) == 0
    assert "two - one" in (printed := capsys.readouterr().out) and "RSUM unseen" in printed
    rows = json.loads((tmp_path / "out" / "bias.json").read_text())
    kinds = "within across mixed unseen probe_images probe_texts log_p_same log_p_other"
    assert [row["kind"] for row in rows] == kinds.split()
    for row in rows:  # the same weights
        assert row["differences"]["same"] == {"value": 0, "interval": [0, 0]}


@pytest.mark.parametrize(
    ("word", "held_out"),
    [
        (True, True),
        ("YES", True),
        ("1.0", True),
        ("test", True),
        (False, False),
        (None, False),
        ("", False),
        ("train", False),
    ],
)
def test_the_words_of_a_held_out_field(tmp_path: Path, word, held_out):
    for name, value in (("a", word), ("b", "-")):
        about = json.dumps({"kept": value}).encode()
        write_tar(
            tmp_path / f"{name}.tar",
            [("1.png", png((9, 9, 9))), ("1.txt", b"a cat"), ("1.json", about)],
        )
    a, b = (parse_sources(f"{name}={tmp_path / name}.tar") for name in "ab")
    assert [pair.held_out for pair in read_pairs(a, 9, held_out_field="kept")] == [held_out]
    with pytest.raises(UserError, match="has '-' in its field 'kept', neither true nor false"):
        read_pairs(b, 9, held_out_field="kept")
