"""Models compared on one's own sources: pools, hits and intervals against numbers by hand, and the command on tiny models."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.cli import program as cli
from open_clip_zerovl.cli.shared import name_models, name_sides
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.held_out import identity_of, write_trained_on
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.embeddings.encoder import FrozenModel
from open_clip_zerovl.evaluate.compare import charts
from open_clip_zerovl.evaluate.compare.commands import _trained_on
from open_clip_zerovl.evaluate.compare.comparison import ONE_RUN, compare_runs, measure_run
from open_clip_zerovl.evaluate.compare.measures import (
    check_source_probe,
    source_probe_guesses,
)
from open_clip_zerovl.evaluate.compare.pools import SourceFeatures, source_pools
from open_clip_zerovl.evaluate.compare.resampling import Measure, mean_over, resampled
from open_clip_zerovl.evaluate.compare.samples import ComparedPair, read_samples
from open_clip_zerovl.evaluate.retrieval.metrics import ranks_by_label, recalls, retrieval_ranks
from open_clip_zerovl.evaluate.zero_shot.score import run_zero_shot
from open_clip_zerovl.report.verdicts import student
from scripts.paper import figures
from scripts.paper.figures import mean_log_p_negatives
from support.tars import png, write_tar
from support.tiny_clip import (
    NATIVE_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_classes,
    write_run,
)


def unit(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return F.normalize(
        torch.randn(
            rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ),
        dim=1,
    )


def sources(
    *, bias: float, noise: float, seed: int = 0, rows: int = 60, width: int = 48
) -> dict[str, SourceFeatures]:
    """Two sources of the same concepts: a pair's embeddings share its content, `noise` blurs them, `bias` marks the source."""
    content = unit(rows, width, seed=100)
    found = {}
    for index, name in enumerate("ab"):
        mark = bias * F.one_hot(torch.tensor(index), width).double()
        images, texts = (
            F.normalize(
                content + noise * unit(rows, width, seed=7 * seed + 2 * index + side) + mark, dim=1
            ).float()
            for side in (0, 1)
        )
        found[name] = SourceFeatures(
            images, texts, [f"c{row}" for row in range(rows)], [True] * rows
        )
    return found


# -- hits ------------------------------------------------------------------------------------------------------------


def test_ranks_by_label_are_those_of_pairs_where_each_label_comes_once():
    images, texts = unit(80, 12), F.normalize(unit(80, 12) + 0.6 * unit(80, 12, seed=1), dim=1)
    texts[7] = texts[3]  # a tie
    labels = torch.arange(80)
    pairs = retrieval_ranks(images, texts, labels)
    for chunk in (None, 7):
        own = {
            "image_to_text": ranks_by_label(images, texts, labels, labels, chunk_size=chunk),
            "text_to_image": ranks_by_label(texts, images, labels, labels, chunk_size=chunk),
        }
        assert recalls(own) == pytest.approx(recalls(pairs), abs=1e-12)
    assert recalls(pairs)["rsum"] < 590


@pytest.mark.parametrize("chunk", [1, 2, 7, None])
def test_a_copy_of_the_best_match_ties_with_it_in_blocks_of_any_size(chunk):
    """In fp32 a product's last bit depends on where the copy stands and on how many rows are multiplied at once."""
    for width in (12, 77, 500):
        queries = unit(101, width)
        keys = F.normalize(queries + 0.3 * unit(101, width, seed=1), dim=1)
        labels = torch.arange(101)
        ranks = ranks_by_label(
            queries, torch.cat([keys, keys[:98]]), labels, torch.arange(199), chunk_size=chunk
        )
        assert ranks.tied.tolist() == [2] * 98 + [1] * 3 and (ranks.tied_positives == 1).all()


def test_a_query_with_several_matches_is_ranked_by_its_best_one():
    keys = F.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]]), dim=1)
    ranks = ranks_by_label(keys[:1], keys, torch.tensor([5]), torch.tensor([4, 5, 5, 6]))
    assert (ranks.above.tolist(), ranks.tied.tolist(), ranks.tied_positives.tolist()) == (
        [1],
        [1],
        [1],
    )
    with pytest.raises(UserError, match="each query needs a match"):
        ranks_by_label(keys, keys, torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 2]))


def test_concepts_that_repeat_or_are_missing_match_as_they_should():
    content = torch.eye(6)
    a = SourceFeatures(
        content[[0, 0, 1, 5]], content[[0, 0, 1, 5]], ["dog", "dog", "cat", None], [True] * 4
    )
    b = SourceFeatures(content[[1, 0, 5]], content[[1, 0, 5]], ["cat", "dog", None], [True] * 3)
    pools = source_pools({"a": a, "b": b})
    across = pools.kinds["across"]["a->b"]
    assert (
        across.rsum == 600 and across.size == 3 and len(across.texts) == 2
    )  # two dogs and a cat; a pair without concept stays out
    assert pools.units == 4 and pools.unit_of.tolist() == [
        0,
        0,
        1,
        2,
        1,
        0,
        3,
    ]  # dog, cat, and two of their own
    # In one pool only the own pair is right: the two dogs of a are each other's ties, and b's dog too.
    assert pools.kinds["mixed"]["mixed"].images[0] == pytest.approx(1 / 3 + 1 + 1)
    assert "across" not in source_pools({"a": a}).kinds


# -- intervals -------------------------------------------------------------------------------------------------------


def test_measures_are_the_numbers_that_the_library_gives_without_draws():
    features = sources(bias=0.5, noise=0.9)
    run = measure_run(features, 30.0, {"c": sources(bias=0, noise=0.5)["a"]}, seed=3)
    pools = source_pools(features).kinds
    values = {kind: measure.value for kind, measure in run.measures.items()}
    for kind in ("within", "across", "mixed"):
        wanted = fmean(pool.rsum for pool in pools[kind].values())
        assert values[kind] == pytest.approx(wanted, abs=1e-9)
    images, texts = (
        torch.cat([getattr(one, f"{side}_features") for one in features.values()])
        for side in ("image", "text")
    )
    owner, concepts = (
        ["a"] * 60 + ["b"] * 60,
        [c for one in features.values() for c in one.concepts],
    )
    for side, own in (("images", images), ("texts", texts)):
        accuracy = source_probe_guesses(own, owner, concepts=concepts, seed=3).mean()
        assert values[f"probe_{side}"] == pytest.approx(100 * accuracy)
    log_p = mean_log_p_negatives(images, texts, owner, 30.0)["mean"]
    assert values["log_p_same"] == pytest.approx(log_p["same_source"])
    assert values["log_p_other"] == pytest.approx(log_p["other_source"])
    assert values["unseen"] > values["within"]


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


def test_reported_units_are_those_with_queries():
    sides = {}
    for name, bias in (("a", 1.0), ("b", 0.5)):
        own = {
            source: replace(one, held_out=[row >= 40 for row in range(60)])
            for source, one in sources(bias=bias, noise=0.5).items()
        }
        sides[name] = [measure_run(own, 50.0)]
    asked = {
        c if c is not None else (s, i)
        for s, one in own.items()
        for i, c in enumerate(one.concepts)
        if i >= 40
    }
    assert compare_runs(sides, draws=100).units == len(asked)


def test_samples_that_the_probe_cannot_split_are_refused_before_encoding():
    names = ["a"] * 20 + ["b"] * 20
    check_source_probe(names, [f"c{i % 5}" for i in range(40)])
    for concepts in (
        ["x"] * 40,
        ["x"] * 20 + list("vwxyz") * 4,
    ):  # all in one fold; none of a's left to fit on
        with pytest.raises(
            UserError, match=r"5 folds cannot be cut from the 1 concepts of source 'a'; .*--concept"
        ):
            source_probe_guesses(unit(40, 4), names, concepts=concepts)


def test_draws_are_seeded_and_the_same_for_all_measures(monkeypatch):
    values = torch.from_numpy(np.random.default_rng(2).normal(size=50))
    one = mean_over([(torch.arange(50), values)], 50)
    shifted = mean_over([(torch.arange(50), values + 1)], 50)
    drawn = resampled({"one": one, "shifted": shifted}, 300, 5)
    assert np.allclose(drawn["shifted"] - drawn["one"], 1)  # a paired difference has no spread here
    assert np.array_equal(drawn["one"], resampled({"one": one}, 300, 5)["one"])
    assert not np.array_equal(drawn["one"], resampled({"one": one}, 300, 6)["one"])
    monkeypatch.setattr(
        "open_clip_zerovl.evaluate.compare.resampling._DRAWS_AT_ONCE_BYTES", 8 * 50 * 7
    )
    assert np.allclose(
        np.sort(drawn["one"]).mean(),
        np.sort(resampled({"one": one}, 300, 5)["one"]).mean(),
        atol=0.02,
    )
    empty = Measure(np.zeros((1, 3)), np.array([[0.0, 0.0, 4.0]]), np.ones(1))
    assert np.isnan(empty.weighted(np.array([[1.0, 1.0, 0.0]]))).all()


# -- two sides -------------------------------------------------------------------------------------------------------


def test_a_debiased_side_differs_from_a_biased_one_and_not_from_its_like():
    def runs(bias: float, first: int) -> list:
        return [
            measure_run(sources(bias=bias, noise=1.0, seed=seed), 30.0)
            for seed in range(first, first + 3)
        ]

    found = compare_runs(
        {"biased": runs(2.0, 0), "debiased": runs(0.0, 0), "like": runs(2.0, 50)}, draws=400
    )
    assert found.seeds == 3 and found.names == ["biased", "debiased", "like"]
    for kind, way in (("across", 1), ("probe_images", -1), ("mixed", -1), ("log_p_other", 1)):
        difference = found.differences[kind]["debiased"]
        assert difference.decided and difference.value * way > 0, kind
        low, high = difference.over_queries
        assert low < difference.value < high
    assert (
        not found.differences["within"]["like"].decided
        and not found.differences["across"]["like"].decided
    )
    for kind, of_sides in found.sides.items():  # runs of one place have one seed
        paired = zip(of_sides["like"].runs, of_sides["biased"].runs, strict=True)
        interval = student([run - first for run, first in paired]).interval
        assert found.differences[kind]["like"].over_seeds == pytest.approx(interval), kind
    said = found.verdicts()
    assert any(line.startswith("RSUM across: debiased is better than biased (+") for line in said)
    mixed = next(line for line in said if line.startswith("RSUM mixed"))
    assert mixed.startswith("RSUM mixed: debiased is lower than biased")  # neither better nor worse
    assert any(line.startswith("RSUM within: undecided between like and biased (") for line in said)
    table = found.table().splitlines()
    assert "debiased - biased, over seeds" in table[0] and table[1].startswith("RSUM within")
    numbers = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert len(numbers["measures"]["across"]["sides"]["biased"]["runs"]) == 3
    assert numbers["rsum_of_single_pools"].keys() == {"a", "b", "a->b", "b->a"}
    assert numbers["rsum_of_single_pools"]["a->b"]["chance"] == pytest.approx(2 * 100 * 16 / 60)
    assert found.warnings(concepts=True) == []


def test_labelled_sets_have_their_own_pictures_and_leave_the_pairs_as_they_are(monkeypatch):
    features = sources(bias=1.0, noise=0.5)

    def side(right: int, classes: int):
        guesses = (torch.arange(100) < right).double()
        return [measure_run(features, 30.0, labelled={"pets": (guesses, classes)})]

    plain = compare_runs(
        {"a": [measure_run(features, 30.0)], "b": [measure_run(features, 30.0)]}, draws=300
    )
    found = compare_runs({"a": side(30, 10), "b": side(50, 10)}, draws=300)
    assert found.units == plain.units and {k: found.sides[k] for k in plain.sides} == plain.sides
    difference = found.differences["top-1 pets"]["b"]
    low, high = (
        difference.over_queries
    )  # of pairs: a fifth of the pictures changed, 2 * 1.96 * sqrt(0.2 * 0.8 / 100) wide
    assert difference.value == pytest.approx(20) and high - low == pytest.approx(15.7, rel=0.2)
    assert found.rows()[-1][:2] == ["top-1 pets, %", "10.0"]
    assert found.verdicts() == [ONE_RUN]
    at_chance = compare_runs({"a": side(30, 2), "b": side(50, 2)}, draws=100).verdicts()[0]
    assert (
        at_chance
        == "top-1 pets, %: at chance: a (30.0), b (50.0); guessing has 50.0, and reaches 60.0."
    )
    monkeypatch.setattr(charts, "png_bytes", lambda figure: figure)
    assert charts.comparison_picture(found).axes[2].get_ylabel() == "not up to 0"  # log p


def test_models_and_sides_are_named():
    named = name_models(
        ["random=a/b.pt", "logs/run-1/checkpoints/epoch_9.pt", "out/export", "local-dir:/x/y"]
    )
    assert list(named) == ["random", "run-1", "export", "y"] and named["random"] == "a/b.pt"
    assert name_sides(["a=x.pt,y.pt", "b=u.pt,v.pt"]) == {
        "a": ["x.pt", "y.pt"],
        "b": ["u.pt", "v.pt"],
    }
    assert name_sides(["logs/one/checkpoints/epoch_2.pt", "b=v"])["one"] == [
        "logs/one/checkpoints/epoch_2.pt"
    ]


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ("a=x,y b=z", "a has 2, b has 1; give each side the same number"),
        ("a=x a=y", "needs a name of its own"),
        ("a/export b/export", "needs a name of its own"),
        ("x.pt,y.pt b=z,w", "needs a name of its own and a model"),
        ("a=x,,y b=z,v,w", "needs a name of its own and a model"),
    ],
)
def test_sides_without_a_name_of_their_own_or_as_many_runs(models, sentence, capsys, tmp_path):
    assert cli.main(["compare", *models.split(), "--data", "a=A::b=B", "--out", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err


# -- the command -----------------------------------------------------------------------------------------------------

COLOURS = ("red", "green", "blue")


def write_pairs(folder: Path, seed: int, *, count: int = 36, table: bool = False) -> Path:
    """Pairs of one colour each, with json or columns that give the colour and the held-out pairs."""
    rng = np.random.default_rng(seed)
    members, rows = [], ["filepath\ttitle\tshows\tkept"]
    folder.mkdir(parents=True)
    for i in range(count):
        colour, image = COLOURS[i % 3], png(tuple(int(v) for v in rng.integers(0, 256, 3)), 16)
        kept = i < count - 6
        members += [(f"{i:03d}.png", image), (f"{i:03d}.txt", f"a {colour} cat".encode())]
        members.append(
            (f"{i:03d}.json", json.dumps({"shows": f"{colour} {i}", "kept": kept}).encode())
        )
        (folder / f"{i}.png").write_bytes(image)
        rows.append(f"{i}.png\ta {colour} cat\t{colour} {i}\t{'yes' if kept else 'no'}")
    if table:
        (folder / "pairs.tsv").write_text("\n".join(rows) + "\n")
        return folder / "pairs.tsv"
    write_tar(folder / "0.tar", members)
    return folder


def test_the_command_compares_on_shards_and_tables(tmp_path: Path, clip_runs, capsys, monkeypatch):
    a, b, c = (
        write_pairs(tmp_path / name, seed, table=name == "b") for seed, name in enumerate("abc")
    )
    models = clip_runs
    command = [
        "compare",
        f"one={models[0]},{models[1]}",
        f"two={models[1]},{models[0]}",
        "--data",
        f"a={a}::b={b}",
    ]
    command += ["--device", "cpu", "--draws", "200", "--out", str(tmp_path / "out")]
    shop = write_classes(tmp_path / "shop", "cat moon", each=9)
    first = f"--unseen c={c} --concept shows --held-out kept --zero-shot-data shop={shop}".split()
    assert cli.main([*command, *first]) == 0
    printed = capsys.readouterr().out
    assert (
        "two - one, over seeds" in printed and "RSUM unseen" in printed and "Small pools" in printed
    )
    # The same two runs in another order: no difference of means, and nothing differs significantly.
    numbers = json.loads((tmp_path / "out" / "compare.json").read_text())
    measures = numbers["measures"]
    kinds = "within across mixed unseen probe_images probe_texts log_p_same log_p_other"
    assert (
        list(measures) == [*kinds.split(), "top-1 shop"] and measures["top-1 shop"]["chance"] == 50
    )
    scored = [
        run_zero_shot(Encoder(model, device="cpu"), f"shop={shop}")["shop"]["top1"]
        for model in models
    ]
    assert measures["top-1 shop"]["sides"]["one"]["runs"] == pytest.approx(
        [100 * share for share in scored]
    )
    for own in measures.values():
        assert own["sides"]["one"]["runs"] == own["sides"]["two"]["runs"][::-1]
        assert own["differences_from_the_first"]["two"]["value"] == pytest.approx(0, abs=1e-9)
    assert "is better" not in printed and "is worse" not in printed
    # 30 pairs of each were held out; all 36 of the other source have captions of the same concepts, 30 are asked for.
    assert numbers["pool_sizes"] == {"a": 30, "b": 30, "a->b": 30, "b->a": 30, "c": 36, "mixed": 60}
    assert numbers["intervals"]["units"] == 36 and numbers["samples_passed_over"] == {
        "a": 0,
        "b": 0,
        "c": 0,
    }
    page = (tmp_path / "out" / "compare.html").read_text(encoding="utf-8")
    assert (
        "The mixed pool rewards a model that recognises sources" in page
        and page.count('class="example"') == 2
    )
    assert "https:" not in page.replace("data:image", "") and "a-&gt;b" in page
    # Without concepts there is nothing to compare across sources. The embeddings of these pairs are there already.
    monkeypatch.setattr(FrozenModel, "texts", None)
    assert (
        cli.main([*command[:1], models[0], f"x={models[1]}", *command[3:], "--samples", "12"]) == 0
    )
    printed = capsys.readouterr().out
    assert (
        "RSUM across sources was not measured: --concept names the field" in printed
        and "RSUM within" in printed
    )
    assert ONE_RUN in printed
    # One model: a report on it.
    assert cli.main([*command[:1], models[0], *command[3:], "--samples", "12"]) == 0
    printed = capsys.readouterr().out
    assert "probe, images %" in printed and " - " not in printed and ONE_RUN not in printed


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--data a=A", "names one source; name those that the models were trained on"),
        ("--data a=A::b=B --unseen b=B", "'b' is a source of --data and of --unseen"),
        ("--data a=A::b=B --concept what", "has no field 'what' in its json"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(tmp_path: Path, clip_runs, capsys, more, sentence):
    a, b = (write_pairs(tmp_path / name, 0) for name in "ab")
    command = ["compare", *clip_runs, "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert cli.main([*command, *more.replace("A", str(a)).replace("B", str(b)).split()]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "out" / "compare.json").exists()


def test_a_model_that_was_trained_on_held_out_pictures_is_named(tmp_path: Path):
    """One answer to "was it trained on?": that of the model's own list."""
    pictures = [Image.new("RGB", (4, 4), (10 * number, 0, 0)) for number in range(4)]
    samples = [
        ComparedPair("a", png_of(one), "x", held_out=n > 0) for n, one in enumerate(pictures)
    ]
    write_trained_on(tmp_path / "seen", np.array([identity_of(one) for one in pictures[:2]]), None)
    write_trained_on(tmp_path / "clean", np.array([identity_of(pictures[0])]), None)
    runs = [("", 1, Encoder(str(tmp_path / name))) for name in ("seen", "clean", "unknown")]
    (sentence,) = _trained_on(samples, runs)
    assert f"{tmp_path / 'seen'} was trained on 1 of the 3 held-out pictures" in sentence


def png_of(picture: Image.Image) -> bytes:
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()


def test_missing_models_are_refused_before_encoding(tmp_path: Path, clip_runs, capsys):
    a, b = (write_pairs(tmp_path / name, seed) for seed, name in enumerate("ab"))
    gone = clip_runs[1].replace("epoch_1", "epoch_7")
    asked = ["--data", f"a={a}::b={b}", "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert cli.main(["compare", clip_runs[0], f"two={gone}", *asked]) == 2
    error = capsys.readouterr().err
    assert f"'{gone}' is not a model" in error and f"did you mean {clip_runs[1]}?" in error
    assert "batch" not in error  # of a progress bar


def test_exported_folders_and_checkpoints_of_ones_own_model_stand_side_by_side(
    tmp_path: Path, capsys
):
    """`--model-config` and `--text-model` are of the checkpoints among the models; a folder has its own."""
    a, b = (write_pairs(tmp_path / name, seed, count=12) for seed, name in enumerate("ab"))
    bert = write_bert(tmp_path / "bert")
    config = {"embed_dim": 16, "vision_cfg": NATIVE_VISION, "text_cfg": bert_text(bert)}
    name = register(tmp_path, "compare-own", NATIVE_VISION, config["text_cfg"], embed_dim=16)
    run = write_run(tmp_path / "run", random_model(name, seed=0), {"model": name})
    folder = export_local_dir(run, tmp_path / "exported")
    (tmp_path / "run/params.txt").unlink()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / f"{name}.json").write_text(json.dumps(config))
    asked = f"--data a={a}::b={b} --out {tmp_path / 'out'} --device cpu --draws 100".split()
    asked += ["--text-model", str(bert)]
    assert cli.main(["compare", f"one={folder}", f"two={run}", *asked]) == 2
    assert "no params.txt beside" in capsys.readouterr().err
    config_flag = ["--model-config", str(tmp_path / "own" / f"{name}.json")]
    assert cli.main(["compare", f"one={folder}", f"two={run}", *asked, *config_flag]) == 0
    sides = json.loads((tmp_path / "out/compare.json").read_text())["measures"]["within"]["sides"]
    assert sides["one"]["runs"] == sides["two"]["runs"]  # the same weights


def test_columns_of_a_table_are_fields(tmp_path: Path):
    table = write_pairs(tmp_path / "t", 0, table=True)
    samples, _ = read_samples(
        parse_sources(f"t={table}"), 100, concept_field="shows", held_out_field="kept"
    )
    assert [sample.concept for sample in samples[:2]] == ["red 0", "green 1"]
    assert [sample.held_out for sample in samples] == [True] * 30 + [False] * 6


@pytest.mark.parametrize(
    ("words", "held_out"),
    [
        (["t", "True", "y", "YES", "on", "1", "1.0", "test", "val"], True),
        (["f", "False", "n", "NO", "off", "0", "0.0", "nan", "None", "null", "", "train"], False),
        (["yes", "-"], None),
    ],
)
def test_the_words_of_a_held_out_column(words, held_out, tmp_path: Path):
    (tmp_path / "0.png").write_bytes(png((9, 9, 9), 16))
    (tmp_path / "t.csv").write_text(
        "filepath,title,kept\n" + "".join(f"0.png,a cat,{word}\n" for word in words)
    )
    given = parse_sources(f"t={tmp_path / 't.csv'}")
    if held_out is None:
        with pytest.raises(
            UserError, match=r"has '-' in its field 'kept', neither true nor false: write true"
        ):
            read_samples(given, 100, held_out_field="kept")
        return
    samples, _ = read_samples(given, 100, held_out_field="kept")
    assert [sample.held_out for sample in samples] == [held_out] * len(words)


def collapsed(features: dict[str, SourceFeatures]) -> dict[str, SourceFeatures]:
    """The same pairs, embedded by a model that gives nearly one embedding to all."""
    return {
        name: replace(
            one,
            image_features=F.normalize(1 + 1e-3 * unit(60, 48, seed=3).float(), dim=1),
            text_features=F.normalize(1 + 1e-3 * unit(60, 48, seed=4).float(), dim=1),
        )
        for name, one in features.items()
    }


def test_a_collapsed_model_is_at_chance_and_neither_better_nor_worse():
    """Its probe finds less of the sources, which is no merit; over three seeds the other measures would be "worse"."""
    good = [sources(bias=1.0, noise=0.6, seed=seed) for seed in range(3)]
    sides = {
        "good": [measure_run(features, 10.0) for features in good],
        "flat": [measure_run(collapsed(features), 10.0) for features in good],
    }
    comparison = compare_runs(sides, draws=200)
    assert comparison.differences["within"]["flat"].decided
    verdicts = comparison.verdicts()
    within = next(line for line in verdicts if line.startswith("RSUM within"))
    assert within.startswith("RSUM within: at chance: flat (") and "guessing has 53.3" in within
    assert not any("better" in line or "worse" in line for line in verdicts)
    assert any(line.startswith("probe, images %: flat is lower than good") for line in verdicts)


def test_one_run_a_side_gives_no_verdict_however_far_apart():
    """Eight seeds of one training scattered with a standard deviation of 22 RSUM around a difference of 0."""
    sides = {
        name: [measure_run(sources(bias=bias, noise=0.8), 30.0)]
        for name, bias in (("biased", 2.0), ("debiased", 0.0))
    }
    comparison = compare_runs(sides, draws=200)
    low, _ = comparison.differences["across"]["debiased"].over_queries
    assert low > 0 and not comparison.differences["across"]["debiased"].decided
    assert comparison.verdicts() == [ONE_RUN] and "another seed may turn" in ONE_RUN


def test_figures_of_the_paper_are_drawn(tmp_path: Path, clip_runs):
    """t-SNE, which compare's page leaves out, and log p by batch size."""
    data = "::".join(f"{name}={write_pairs(tmp_path / name, 0, count=12)}" for name in "ab")
    out = tmp_path / "figures"
    assert figures.main([clip_runs[0], "--data", data, "--out", str(out)]) == 0
    assert {path.name for path in out.glob("*.png")} == {"figure3.png", "figure4.png"}
