"""Retrieval metrics: hand-computed matrices, properties, ties, parity with CLIP_benchmark's code and its program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import tarfile
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from clip_benchmark.metrics import zeroshot_retrieval
from hypothesis import given, settings
from hypothesis import strategies as st

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sets import open_retrieval_set, parse_retrieval_data, retrieval_batches
from open_clip_zerovl.evaluate import metrics as metrics_module
from open_clip_zerovl.evaluate.metrics import (
    recall_bounds,
    retrieval_metrics,
)
from open_clip_zerovl.evaluate.retrieval import encode_retrieval, format_retrieval
from open_clip_zerovl.report.verdicts import bounds_remarks
from support import warm
from support.scoring import score_checkpoint
from support.tars import add_file
from support.tiny_clip import picture, write_retrieval_set

PARITY = 1e-6  # the bound; CLIP_benchmark averages in float32


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


# -- the metric ------------------------------------------------------------------------------------------------------


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


def clip_benchmark_recalls(
    image: torch.Tensor, text: torch.Tensor, links: torch.Tensor, k: int
) -> tuple[float, float]:
    scores = text @ image.T
    positive = F.one_hot(links, len(image)).bool()
    i2t = (zeroshot_retrieval.recall_at_k(scores.T, positive.T, k) > 0).float().mean().item()
    t2i = (zeroshot_retrieval.recall_at_k(scores, positive, k) > 0).float().mean().item()
    return i2t, t2i


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_equals_clip_benchmarks_recall_on_features(noise):
    rng = np.random.default_rng(0)
    image, text, links = random_features(
        150, rng.integers(1, 7, 150).tolist(), width=32, noise=noise
    )
    metrics = retrieval_metrics(image, text, links, chunk_size=37)
    recalls = [value for name, value in metrics.items() if name != "rsum"]
    assert len(recalls) == 6 and metrics["rsum"] == pytest.approx(100 * sum(recalls), abs=1e-9)
    for k in (1, 5, 10):
        i2t, t2i = clip_benchmark_recalls(image, text, links, k)
        assert metrics[f"image_to_text_R@{k}"] == pytest.approx(i2t, abs=PARITY)
        assert metrics[f"text_to_image_R@{k}"] == pytest.approx(t2i, abs=PARITY)
    # Negative control: with the captions' pictures mixed up the numbers differ.
    wrong = retrieval_metrics(image, text, links.flip(0))
    assert abs(wrong["rsum"] - metrics["rsum"]) > 1


def test_memory_is_bounded_by_the_chunk():
    """The largest matrix that the metric makes has `chunk_size` rows."""
    shapes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                shapes.append(result.numel())
            return result

    features = random_features(300, [2] * 300, width=4)
    with Watch():
        retrieval_metrics(*features, chunk_size=10)
    assert shapes
    assert max(shapes) <= 10 * 600


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


# -- the ranks behind the metrics ------------------------------------------------------------------------------------


# -- data sets -------------------------------------------------------------------------------------------------------


def test_parsing_of_retrieval_data():
    assert parse_retrieval_data("coco=/d/x::f30k=/e/y") == {
        "coco": Path("/d/x"),
        "f30k": Path("/e/y"),
    }
    assert parse_retrieval_data("/d/coco/::/e/f30k") == {
        "coco": Path("/d/coco"),
        "f30k": Path("/e/f30k"),
    }
    assert parse_retrieval_data("/d/run=3/coco") == {"coco": Path("/d/run=3/coco")}


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("", "empty entry"),
        ("a=/x::", "empty entry"),
        ("a=", "empty entry"),
        ("a=/x::a=/y", "two sets are named 'a'"),
        ("/x/coco::/y/coco", "two sets are named 'coco'"),
    ],
)
def test_bad_retrieval_data_is_refused(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_retrieval_data(spec)


def test_a_set_is_read_in_order_with_all_captions(tmp_path):
    texts = write_retrieval_set(
        tmp_path / "set", [1, 3, 7, 2, 5], extensions=("png", "jpg", "webp", "jpeg")
    )
    dataset = open_retrieval_set(tmp_path / "set")
    assert [list(sample.captions) for sample in dataset.samples] == texts
    assert len(dataset) == 5
    assert sum(map(len, dataset.captions())) == 18
    assert sum(map(len, dataset.captions(5))) == 1 + 3 + 5 + 2 + 5
    assert [dataset.image(i).size for i in range(5)] == [(48, 40)] * 5
    assert {dataset.image(i).mode for i in range(5)} == {"RGB"}


def rewrite_shard(folder: Path, files: dict[str, bytes]) -> None:
    (folder / "test" / "nshards.txt").write_text("1")
    with tarfile.open(folder / "test" / "0.tar", "w") as tar:
        for name, data in files.items():
            add_file(tar, name, data)


PNG = picture(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "holds no sample"),
        ({"a.png": PNG}, r"0\.tar: sample 'a' has no \.txt; no member is a caption"),
        ({"a.png": PNG, "a.txt": b" \n"}, r"sample 'a' has an empty caption"),
        ({"a.png": PNG, "a.txt": b"caf\xe9"}, r"'a' has a caption that is not UTF-8"),
        ({"a.svg": PNG, "a.txt": b"a cat"}, r"0\.tar: sample 'a' has no image .jpg, png"),
    ],
)
def test_bad_samples_are_named_by_file_and_key(tmp_path, files, sentence):
    write_retrieval_set(tmp_path / "set", [1, 1])
    rewrite_shard(tmp_path / "set", files)
    with pytest.raises(UserError, match=sentence):
        open_retrieval_set(tmp_path / "set")


def test_no_sample_of_a_shard_is_lost_without_a_word(tmp_path):
    """Samples with equal keys stay two, as in training; a tar cut off between two samples, and stray members, are named."""
    write_retrieval_set(tmp_path / "set", [1, 1])
    shard = tmp_path / "set" / "test" / "0.tar"
    (tmp_path / "set" / "test" / "nshards.txt").write_text("1")
    with tarfile.open(shard, "w") as tar:
        for key, caption in (("a", b"a cat"), ("a", b"a dog"), ("b", b"a bird"), ("a", b"a fish")):
            add_file(tar, f"{key}.png", PNG)
            add_file(tar, f"{key}.txt", caption)
        ends = [
            member.offset_data + 512 for member in tar.getmembers() if member.name.endswith("txt")
        ]
    samples = open_retrieval_set(tmp_path / "set").samples
    assert [f"{s.key}: {s.captions[0]}" for s in samples] == [
        "a: a cat",
        "a: a dog",
        "b: a bird",
        "a: a fish",
    ]
    shard.write_bytes(shard.read_bytes()[: ends[1]])  # after two whole samples
    with pytest.raises(
        UserError,
        match=r"0\.tar is not a readable, uncompressed tar \(it is cut off after \d+ bytes",
    ):
        open_retrieval_set(tmp_path / "set")
    for files in ({"a.json": b"{}"}, {"b.png": PNG, "a.png": PNG, "b.txt": b"1", "a.txt": b"2"}):
        rewrite_shard(tmp_path / "set", files)
        with pytest.raises(UserError, match=r"0\.tar: sample '[ab]' has no (image|.txt)"):
            open_retrieval_set(tmp_path / "set")


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("", None, "does not exist"),
        (".", b"x", "not a readable, uncompressed tar"),
        ("dataset_type.txt", None, "set is not a retrieval set: shards, or"),
        ("dataset_type.txt", b"classification", "is not a retrieval set"),
        ("test/nshards.txt", None, r"has no split 'test' with nshards\.txt; it has none"),
        ("test/nshards.txt", b"two", "number of shards, got 'two'"),
        ("test/1.tar", None, r"1\.tar does not exist"),
        ("test/0.tar", b"not a tar" * 100, "not a readable, uncompressed tar"),
        ("--split val", None, r"has no split 'val' with .*; it has test"),
    ],
)
def test_bad_folders_are_refused_by_a_sentence(tmp_path, file, content, sentence):
    if file.startswith("--split"):
        write_retrieval_set(tmp_path / "set", [1, 1])
    elif file not in ("", "."):
        write_retrieval_set(tmp_path / "set", [1, 1])
        (tmp_path / "set" / file).unlink()
    if content is not None:
        (tmp_path / "set" / file).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        open_retrieval_set(tmp_path / "set", split="val" if file == "--split val" else "test")


# -- a model on a set ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock(export):
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{export}")
    return model, preprocess, open_clip.get_tokenizer(f"local-dir:{export}")


def metrics_of(model, preprocess, tokenizer, dataset, *, workers=0, batch_size=64, **how) -> dict:
    batches = retrieval_batches(dataset, preprocess, batch_size=batch_size, num_workers=workers)
    return retrieval_metrics(*encode_retrieval(model, batches, tokenizer, **how))


@pytest.mark.slow  # another program, on its own import of torch; its recalls on features are compared above
def test_clip_benchmarks_program_gives_the_same_recalls(tmp_path, export):
    """The real CLI on the exported folder, offline, in full precision."""
    counts = np.random.default_rng(5).integers(1, 8, 48).tolist()
    write_retrieval_set(tmp_path / "set", counts)
    program = shutil.which("clip_benchmark", path=sysconfig.get_path("scripts"))
    assert program, "clip_benchmark is part of the test extra"
    line = f"eval --model local-dir:{export} --pretrained none --dataset wds/set --dataset_root {tmp_path / 'set'}"
    line += " --task zeroshot_retrieval --recall_k 1 5 10 --no_amp --num_workers 0 --batch_size 20"
    command = [warm.python(), program, *line.split(), "--output", str(tmp_path / "theirs.json")]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads((tmp_path / "theirs.json").read_text())["metrics"]

    data, output = f"s={tmp_path / 'set'}", tmp_path / "out" / "ours.json"
    ours = score_checkpoint(str(export), data, captions_per_image=None, output=output)["s"]
    assert ours["captions"] == sum(counts)
    for k in (1, 5, 10):
        assert ours[f"image_to_text_R@{k}"] == pytest.approx(
            theirs[f"text_retrieval_recall@{k}"], abs=PARITY
        )
        assert ours[f"text_to_image_R@{k}"] == pytest.approx(
            theirs[f"image_retrieval_recall@{k}"], abs=PARITY
        )
    # The comparison is informative: the recalls are neither all 0 nor all 1.
    assert 0 < ours["text_to_image_R@10"] < 1
    assert 0 < ours["image_to_text_R@5"] < 1
    written = json.loads(output.read_text())
    assert written["results"] == {"s": ours}
    # Five captions an image is another measurement.
    assert score_checkpoint(str(export), data)["s"]["captions"] == sum(
        min(count, 5) for count in counts
    )


def test_encoding_normalises_and_restores_the_modes(tmp_path, stock):
    model, preprocess, tokenizer = stock
    write_retrieval_set(tmp_path / "set", [2, 1, 3])
    dataset = open_retrieval_set(tmp_path / "set")
    model.train()
    model.text.transformer.eval()  # a tower frozen in eval, as open_clip's BERT starts
    before = {name: module.training for name, module in model.named_modules()}
    images = torch.stack([preprocess(dataset.image(i)) for i in range(3)])
    batches = [
        (images[:2], [s.captions for s in dataset.samples[:2]]),
        (images[2:], [dataset.samples[2].captions]),
    ]
    image, text, links = encode_retrieval(model, batches, tokenizer)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert links.tolist() == [0, 0, 1, 2, 2, 2]
    assert image.dtype == text.dtype == torch.float32
    model.eval()
    with torch.no_grad():
        assert torch.allclose(image, F.normalize(model.encode_image(images), dim=-1), atol=1e-6)
        tokens = tokenizer([c for s in dataset.samples for c in s.captions])
        assert torch.allclose(text, F.normalize(model.encode_text(tokens), dim=-1), atol=1e-6)


def test_workers_batch_size_and_precision(tmp_path, stock, export):
    """Workers and batch size do not change the numbers; autocast and a model in half precision are evaluated."""
    write_retrieval_set(tmp_path / "set", [3] * 20)
    dataset = open_retrieval_set(tmp_path / "set")
    alone = metrics_of(*stock, dataset)
    assert metrics_of(*stock, dataset, workers=2, batch_size=7) == pytest.approx(alone, abs=PARITY)
    mixed = metrics_of(
        *stock, dataset, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )
    half, _, _ = open_clip.create_model_and_transforms(f"local-dir:{export}", precision="pure_bf16")
    pure = metrics_of(half, *stock[1:], dataset, input_dtype=torch.bfloat16)
    assert alone.keys() == mixed.keys() == pure.keys()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_picture_is_named_also_from_a_loader_worker(tmp_path, stock, num_workers):
    write_retrieval_set(tmp_path / "set", [1, 1])
    rewrite_shard(
        tmp_path / "set",
        {"good.png": PNG, "good.txt": b"a cat", "bad.png": PNG[:60], "bad.txt": b"a dog"},
    )
    with pytest.raises(
        UserError, match=r"0\.tar: the image of sample 'bad' cannot be read"
    ) as caught:
        metrics_of(*stock, open_retrieval_set(tmp_path / "set"), workers=num_workers)
    assert "Traceback" not in str(caught.value)


def test_refusals_come_before_the_model_is_loaded(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        score_checkpoint(str(tmp_path / "no-model"), str(tmp_path / "no-data"))


def test_the_papers_row():
    row = {
        f"{way}_R@{k}": 0.01 * k for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)
    }
    lines = format_retrieval(
        {"coco": {**row, "images": 5000, "captions": 25000, "rsum": 32.0, "rsum_chance": 0.6}}
    ).splitlines()
    assert lines[-1].split() == [
        "coco",
        "5000",
        "25000",
        "1.0",
        "5.0",
        "10.0",
        "1.0",
        "5.0",
        "10.0",
        "32.0",
        "0.6",
    ]
    assert len({len(line) for line in lines[1:]}) == 1


# -- chance and the best possible score ----------------------------------------------------------------------------------


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


def test_a_score_at_chance_and_a_low_best_score_are_sentences():
    bounds = recall_bounds(["a person"] * 40, range(40))
    low, high = ({**bounds, "rsum": bounds["rsum_chance"] + more} for more in (10.0, 80.0))
    chance, best = bounds_remarks({"shop": low})
    assert chance.startswith(
        "Not above chance: shop (RSUM 90.0; a random order has 80.0, and reaches 1"
    )
    assert best.endswith("so that of 600 RSUM can reach at most: shop 80.")
    assert bounds_remarks({"shop": high}) == [best] and bounds_remarks({"a": {"rsum": 5.0}}) == []
