"""Exported folders in other people's programs: CLIP_benchmark's classification and probe, open_clip's ImageNet zero-shot.

Retrieval with the real CLIP_benchmark is in test_retrieval.py.
"""

from __future__ import annotations

import io
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
from PIL import Image

from open_clip_zerovl.checkpoints.export import export_local_dir
from support import warm
from support.tars import add_file
from support.tiny_clip import (
    NATIVE_VISION,
    bert_text,
    picture,
    random_model,
    register,
    write_bert,
    write_run,
)

# NumPy 2.4 ended float(array of one element), which open_clip 3.3 and CLIP_benchmark 1.6.2 use in their accuracy.
old_numpy = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="open_clip 3.3's accuracy needs numpy<2.4, as setup.py asks",
)

CLASSES = ["cat", "dog", "red house", "moon"]
TEMPLATES = ["a {c}", "the small {c} with a tree"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """`export`, a folder of a small ViT + BERT, and `set`, a classification set in CLIP_benchmark's layout."""
    home = tmp_path_factory.mktemp("home")
    name = register(
        home / "configs", "test-benchmark", NATIVE_VISION, bert_text(write_bert(home / "bert"))
    )
    export_local_dir(write_run(home / "run", random_model(name), {"model": name}), home / "export")
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        (home / "set" / split).mkdir(parents=True)
        (home / "set" / split / "nshards.txt").write_text("1")
        with tarfile.open(home / "set" / split / "0.tar", "w") as tar:
            for i in range(40):
                add_file(tar, f"{i:04d}.png", picture(rng))
                add_file(tar, f"{i:04d}.cls", str(int(rng.integers(len(CLASSES)))).encode())
    (home / "set" / "classnames.txt").write_text("\n".join(CLASSES))
    (home / "set" / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))
    return home


def clip_benchmark(home: Path, out: Path, task: str, *more: str) -> dict[str, float]:
    """The command of docs/evaluation.md."""
    program = shutil.which("clip_benchmark", path=sysconfig.get_path("scripts"))
    assert program, "clip_benchmark is part of the test extra"
    options = f"--pretrained none --dataset wds/set --task {task} --no_amp".split()
    command = [warm.python(), program, "eval", "--model", f"local-dir:{home / 'export'}", *options]
    command += ["--dataset_root", str(home / "set"), "--output", str(out), *more]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=out.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())["metrics"]


@old_numpy
def test_zero_shot_classification_of_an_exported_folder(tmp_path, home):
    """The program's accuracy equals that of stock open_clip's functions, called by hand."""
    metrics = clip_benchmark(
        home, tmp_path / "o.json", "zeroshot_classification", "--num_workers", "0"
    )
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{home / 'export'}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{home / 'export'}")
    model.eval()
    with tarfile.open(home / "set" / "test" / "0.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    images = torch.stack(
        [preprocess(Image.open(io.BytesIO(files[f"{i:04d}.png"]))) for i in range(40)]
    )
    labels = torch.tensor([int(files[f"{i:04d}.cls"]) for i in range(40)])
    with torch.no_grad():
        prompts = [
            model.encode_text(tokenizer([t.format(c=c) for t in TEMPLATES]), normalize=True)
            for c in CLASSES
        ]
        weights = F.normalize(torch.stack([prompt.mean(dim=0) for prompt in prompts]), dim=-1)
        predicted = (model.encode_image(images, normalize=True) @ weights.T).argmax(dim=1)
    accuracy = (predicted == labels).double().mean().item()
    assert metrics["acc1"] == pytest.approx(accuracy, abs=1e-6)
    assert 0 < accuracy < 1
    assert len(predicted.unique()) > 1


@old_numpy
def test_imagenet_zero_shot_of_open_clip_runs_with_bert_while_training(tmp_path, home, monkeypatch):
    """`--imagenet-val` through `training.main`: the classifier is built with BERT's tokenizer, and logged each epoch.

    Twelve class names and two templates stand for open_clip's 1,000 and 80: 80,000 prompts would test the wiring no better.
    """
    import open_clip_train.zero_shot as zero_shot

    from training.main import main

    monkeypatch.setattr(zero_shot, "IMAGENET_CLASSNAMES", zero_shot.IMAGENET_CLASSNAMES[:12])
    monkeypatch.setattr(
        zero_shot, "OPENAI_IMAGENET_TEMPLATES", zero_shot.OPENAI_IMAGENET_TEMPLATES[:2]
    )
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for label in range(12):
        (tmp_path / "val" / f"n{label:08d}").mkdir(parents=True)
        (tmp_path / "val" / f"n{label:08d}" / "a.png").write_bytes(picture(rng))
    pairs = ["filepath\ttitle"]
    for i in range(16):
        (tmp_path / f"{i}.png").write_bytes(picture(rng))
        pairs.append(f"{tmp_path}/{i}.png\ta red cat")
    (tmp_path / "pairs.csv").write_text("\n".join(pairs) + "\n")
    seen: list[torch.Size] = []
    build = zero_shot.build_zero_shot_classifier

    def watched(*arguments, **options):
        classifier = build(*arguments, **options)
        seen.append(classifier.shape)
        assert options["tokenizer"].tokenizer.mask_token == "[MASK]"
        return classifier

    monkeypatch.setattr(zero_shot, "build_zero_shot_classifier", watched)
    words = """--model test-benchmark --device cpu --precision fp32 --workers 0 --name run --batch-size 8 --epochs 1 --warmup 1
    --dga-steps 1"""
    given = ["--train-data", str(tmp_path / "pairs.csv"), "--imagenet-val", str(tmp_path / "val")]
    assert main([*words.split(), *given]) == 0
    assert seen[-1] == (24, 12)
    rows = [
        json.loads(line)
        for line in (tmp_path / "logs/run/checkpoints/results.jsonl").read_text().splitlines()
    ]
    assert (
        0 <= rows[-1]["imagenet-zeroshot-val-top1"] <= rows[-1]["imagenet-zeroshot-val-top5"] <= 1
    )
