"""open_clip's ImageNet zero-shot within a training with an HF text tower."""

from __future__ import annotations

import json

import numpy as np
import open_clip_train.zero_shot as zero_shot
import pytest

from support.tiny_clip import NATIVE_VISION, bert_text, picture, register, write_bert
from training.main import main


# NumPy 2.4 ended float(array of one element), which open_clip 3.3 and CLIP_benchmark 1.6.2 use in their accuracy.
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="open_clip 3.3's accuracy needs numpy<2.4, as setup.py asks",
)
def test_imagenet_zero_shot_of_open_clip_runs_with_bert(tmp_path, monkeypatch):
    """The classifier is built with BERT's tokenizer. Twelve names and two templates stand for open_clip's 1,000 and 80."""
    names, templates = zero_shot.IMAGENET_CLASSNAMES[:12], zero_shot.OPENAI_IMAGENET_TEMPLATES[:2]
    monkeypatch.setattr(zero_shot, "IMAGENET_CLASSNAMES", names)
    monkeypatch.setattr(zero_shot, "OPENAI_IMAGENET_TEMPLATES", templates)
    register(tmp_path, "test-imagenet", NATIVE_VISION, bert_text(write_bert(tmp_path / "bert")))
    monkeypatch.chdir(tmp_path)
    for label in range(12):
        (tmp_path / "val" / f"n{label:08d}").mkdir(parents=True)
        (tmp_path / "val" / f"n{label:08d}" / "a.png").write_bytes(
            picture(np.random.default_rng(label))
        )
    build, tokenizers = zero_shot.build_zero_shot_classifier, []

    def watched(*arguments, tokenizer, **options):
        tokenizers.append(tokenizer.tokenizer.mask_token)
        return build(*arguments, tokenizer=tokenizer, **options)

    monkeypatch.setattr(zero_shot, "build_zero_shot_classifier", watched)
    words = "--model test-imagenet --device cpu --precision fp32 --workers 0 --name run --dga-steps 2 --imagenet-val val"
    assert main(words.split()) == 0
    (row,) = (tmp_path / "logs/run/checkpoints/results.jsonl").read_text().splitlines()
    assert 0 <= json.loads(row)["imagenet-zeroshot-val-top1"] <= 1 and tokenizers == ["[MASK]"]
