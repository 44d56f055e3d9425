"""open_clip's ImageNet zero-shot within a training with an HF text tower."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from support.tiny_clip import (
    NATIVE_VISION,
    bert_text,
    picture,
    register,
    write_bert,
)

# NumPy 2.4 ended float(array of one element), which open_clip 3.3 and CLIP_benchmark 1.6.2 use in their accuracy.
old_numpy = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="open_clip 3.3's accuracy needs numpy<2.4, as setup.py asks",
)


@old_numpy
def test_imagenet_zero_shot_of_open_clip_runs_with_bert_while_training(tmp_path, monkeypatch):
    """`--imagenet-val` through `training.main`: the classifier is built with BERT's tokenizer, and logged each epoch.

    Twelve class names and two templates stand for open_clip's 1,000 and 80: 80,000 prompts would test the wiring no better.
    """
    import open_clip_train.zero_shot as zero_shot

    from training.main import main

    monkeypatch.setattr(zero_shot, "IMAGENET_CLASSNAMES", zero_shot.IMAGENET_CLASSNAMES[:12])
    monkeypatch.setattr(
        zero_shot, "OPENAI_IMAGENET_TEMPLATES", zero_shot.OPENAI_IMAGENET_TEMPLATES[:2]
    )
    register(tmp_path, "test-imagenet", NATIVE_VISION, bert_text(write_bert(tmp_path / "bert")))
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
    words = """--model test-imagenet --device cpu --precision fp32 --workers 0 --name run --batch-size 8 --epochs 1 --warmup 1
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
