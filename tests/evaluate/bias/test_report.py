"""The bias report: reading samples, measuring several models, and the pages that show it."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.cli import program as cli
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.evaluate.bias.commands import bias_page
from open_clip_zerovl.evaluate.bias.report import BiasReport, embedding_map, measure_bias
from open_clip_zerovl.evaluate.bias.samples import SourceSample, encode, read_samples
from support import tiny_clip
from support.tars import png, write_tar


def pictures(count: int, *, seed: int, frame: bool) -> list[bytes]:
    """Blurred random pictures; framed ones have a red border (the mark of appendix A.5)."""
    rng = np.random.default_rng(seed)
    encoded = []
    for _ in range(count):
        image = Image.fromarray(rng.integers(0, 256, size=(5, 5, 3), dtype=np.uint8)).resize(
            (32, 32)
        )
        pixels = np.array(image)
        if frame:
            for border in (pixels[:4], pixels[-4:], pixels[:, :4], pixels[:, -4:]):
                border[:] = (255, 0, 0)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        encoded.append(buffer.getvalue())
    return encoded


def two_sources(*, frame: bool, count: int = 60) -> list[SourceSample]:
    """Sources "a" and "b" with pictures and captions of one distribution, but for a's red frame."""
    rng = np.random.default_rng(5)
    samples = []
    for seed, name in enumerate("ab"):
        own = zip(
            pictures(count, seed=seed, frame=frame and name == "a"),
            tiny_clip.captions(rng, count),
            strict=True,
        )
        samples += [SourceSample(name, image, caption) for image, caption in own]
    return samples


def measured(
    features: torch.Tensor, texts: torch.Tensor, samples: list[SourceSample], **options: object
) -> BiasReport:
    return measure_bias({"model": (features, texts, 50.0)}, samples, map_samples=20, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Findings
# ---------------------------------------------------------------------------------------------------------------------


def test_a_red_frame_is_found_and_its_absence_too(clip_runs, tmp_path: Path):
    """A random tower keeps enough of its input: the frame shows in image embeddings, not in those of texts."""
    reports = {}
    for name in ("framed", "plain"):
        samples = two_sources(frame=name == "framed")
        images, texts, _ = encode(Encoder(clip_runs[0], device="cpu"), samples, name, tmp_path)
        reports[name] = measured(images, texts, samples, batch_sizes=[32])
    assert reports["framed"].models["model"].probe_images > 0.95
    for name, probe in (("framed", "texts"), ("plain", "texts"), ("plain", "images")):
        # Chance is 0.5; over 120 guesses its standard deviation is 0.05.
        assert 0.3 < getattr(reports[name].models["model"], f"probe_{probe}") < 0.7, (name, probe)
    assert reports["plain"].probe_chance == 0.5


def test_the_map_keeps_sources_apart_only_where_embeddings_do():
    samples = two_sources(frame=False, count=40)
    content = torch.randn(80, 16, generator=torch.Generator().manual_seed(0))
    side = torch.tensor([1.0] * 40 + [-1.0] * 40)[:, None] * 6 * torch.eye(16)[0]
    report = measure_bias(
        {"model": (F.normalize(content + side, dim=1), F.normalize(content, dim=1), 50.0)},
        samples,
        map_samples=40,
    )
    own = np.arange(80) < 40

    def same_source_neighbours(points: np.ndarray) -> float:
        distances = ((points[:, None] - points) ** 2).sum(-1) + 1e9 * np.eye(len(points))
        return float((own[distances.argmin(1)] == own).mean())

    assert report.models["model"].map_images.shape == (80, 2) and list(report.map_rows) == list(
        range(80)
    )
    assert same_source_neighbours(report.models["model"].map_images) > 0.95
    assert same_source_neighbours(report.models["model"].map_texts) < 0.75


def test_a_batch_larger_than_the_samples_is_a_sentence():
    features = F.normalize(torch.randn(20, 8), dim=1)
    with pytest.raises(UserError, match="batch of 64 cannot be cut from 20 samples"):
        measure_bias(
            {"x": (features, features, 50.0)}, two_sources(frame=False, count=10), batch_sizes=[64]
        )


# ---------------------------------------------------------------------------------------------------------------------
# Samples
# ---------------------------------------------------------------------------------------------------------------------


def test_samples_are_spread_over_shards_and_bad_ones_counted(tmp_path: Path):
    for shard in range(3):
        members = []
        for i in range(6):
            content = b"no picture" if (shard, i) == (1, 0) else png((shard, i, 0))
            members += [(f"{i}.png", content), (f"{i}.txt", f"caption {shard} {i}".encode())]
            members.append((f"{i}.json", json.dumps({"concept": i}).encode()))
        write_tar(tmp_path / "a" / f"{shard}.tar", [*members, ("9.png", png((0, 0, 0)))])
    sources = parse_sources(f"a={tmp_path / 'a'}")
    samples, skipped = read_samples(sources, 6, concept_field="concept")
    places = [(0, 0), (0, 1), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert [sample.caption for sample in samples] == [f"caption {shard} {i}" for shard, i in places]
    assert skipped == {"a": 1} and samples[0].concept == "0" and samples[0].picture().size == (8, 8)
    # More than there are: all 17 usable ones.
    samples, skipped = read_samples(sources, 500)
    assert len(samples) == 17 and skipped == {"a": 4} and samples[0].concept is None
    with pytest.raises(UserError, match="no field 'group' in its json"):
        read_samples(sources, 6, concept_field="group")
    write_tar(tmp_path / "b" / "0.tar", [("1.png", b"broken"), ("1.txt", b"text")])
    with pytest.raises(UserError, match="source 'b' has no pair"):
        read_samples(parse_sources(f"b={tmp_path / 'b'}"), 6)
    with pytest.raises(UserError, match="is remote, and local shards are read here"):
        read_samples([Source("c", ("https://example.org/0.tar",), (3,))], 6)
    # A cluster's own samples, and those alone: numbers 1 and 5 of the first shard, 2 of the last.
    cluster = dataclasses.replace(
        sources[0],
        shards=sources[0].shards[::2],
        sizes=(2, 1),
        picked=np.array([1, 5, 2], dtype=np.int32),
    )
    samples, _ = read_samples([cluster], 6)
    assert [sample.caption for sample in samples] == ["caption 0 1", "caption 0 5", "caption 2 2"]


def test_of_several_captions_the_first_is_taken(tmp_path: Path):
    members = [
        ("0.png", png((0, 0, 0))),
        ("0.txt", b"\n a cat \nanother cat\nand a third"),
        ("1.png", png((9, 0, 0))),
    ]
    write_tar(
        tmp_path / "a" / "0.tar",
        [*members, ("1.txt", b"a dog\n"), ("2.png", png((0, 9, 0))), ("2.txt", b" \n")],
    )
    samples, skipped = read_samples(parse_sources(f"a={tmp_path / 'a'}"), 6)
    assert [sample.caption for sample in samples] == ["a cat", "a dog"] and skipped == {"a": 1}


# ---------------------------------------------------------------------------------------------------------------------
# Pages
# ---------------------------------------------------------------------------------------------------------------------


def check_self_contained(page: str, pictures_at_least: int) -> None:
    sources = re.findall(r'<img[^>]* src="([^"]*)"', page)
    assert len(sources) >= pictures_at_least
    for source in sources:
        head, _, data = source.partition(",")
        assert head in ("data:image/png;base64", "data:image/jpeg;base64")
        Image.open(io.BytesIO(base64.b64decode(data, validate=True))).load()
    assert all(re.search(r' alt="[^"]+"', tag) for tag in re.findall(r"<img[^>]*>", page))
    rest = re.sub(r'src="data:[^"]*"', "", page)
    assert "<script" not in rest and not re.search(r"(src|href)=|url\(|@import|https?:", rest)


def test_bias_page_is_one_file_and_escapes_what_data_says(tmp_path: Path):
    samples = two_sources(frame=True, count=12)
    samples[3] = SourceSample("a", samples[3].image, '<script>alert("x")</script> & <b>')
    features = F.normalize(torch.randn(24, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    models = {"de<biased": (features, features, 50.0), "random": (features, features.flip(1), 20.0)}
    report = measure_bias(models, samples)
    page = bias_page(tmp_path / "sub" / "bias.html", report).read_text(encoding="utf-8")
    check_self_contained(page, 4 + 12)
    assert "de&lt;biased" in page and "de<biased" not in page and "&lt;script&gt;" in page
    numbers = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (
        numbers["sources"]["a"]["samples"] == 12
        and len(numbers["models"]["random"]["map_texts"]) == 24
    )
    assert list(numbers["models"]["random"]["log_p_negatives"]) == ["16"]


def test_command(tmp_path: Path, clip_runs, capsys: pytest.CaptureFixture[str]):
    for name, caption in (("a", b"a red cat"), ("b", b"the big blue house")):
        shown = enumerate(pictures(24, seed=ord(name), frame=name == "a"))
        members = [
            member
            for i, image in shown
            for member in ((f"{i:03d}.png", image), (f"{i:03d}.txt", caption))
        ]
        write_tar(tmp_path / name / "0.tar", members)
    command = [
        "bias",
        f"one={clip_runs[0]}",
        clip_runs[1],
        "--device",
        "cpu",
        "--batch-sizes",
        "8",
        "32",
    ]
    command += ["--out", str(tmp_path / "out"), "--data", f"a={tmp_path / 'a'}"]
    assert cli.main(command) == 2 and "names one source" in capsys.readouterr().err
    command[-1] += f"::b={tmp_path / 'b'}"
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert (
        printed.splitlines()[3].split() == ["chance", "50.0", "%", "50.0", "%", "-3.47", "-3.47"]
        and "batch 32" in printed
    )
    numbers = json.loads((tmp_path / "out" / "bias.json").read_text())
    assert list(numbers["models"]) == ["one", "run1"]
    # One caption a source: the probe on texts cannot fail.
    assert numbers["models"]["one"]["source_probe"]["texts"] == 1.0
    assert numbers["sources"]["b"]["caption_words"]["mean"] == 4.0
    check_self_contained((tmp_path / "out" / "bias.html").read_text(encoding="utf-8"), 4 + 12)


@pytest.mark.parametrize("noise", [0.0, 1e-8])
def test_a_collapsed_model_gets_a_map_of_one_point(noise, caplog):
    features = torch.full((20, 8), 8**-0.5) + noise * torch.randn(
        20, 8, generator=torch.Generator().manual_seed(0)
    )
    assert (
        embedding_map(features) == 0
    ).all() and "has collapsed" in caplog.text  # t-SNE ends the process here


def test_embeddings_that_are_no_numbers_are_refused():
    with pytest.raises(UserError, match="has diverged"):
        embedding_map(torch.full((20, 8), float("nan")))
