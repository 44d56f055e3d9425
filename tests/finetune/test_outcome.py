"""The verdict on a fine-tuning: sign and size of its change on held-out pictures, by the rule of trials."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from open_clip_zerovl.evaluate.metrics import difference_of_shares
from open_clip_zerovl.evaluate.retrieval import GallerySet
from open_clip_zerovl.finetune.outcome import recall_verdicts, zero_shot_sentences


def gallery(name: str, noise: float) -> GallerySet:
    pictures = torch.randn(80, 16, generator=torch.Generator().manual_seed(0))
    texts = pictures + noise * torch.randn(80, 16, generator=torch.Generator().manual_seed(1))
    features = (F.normalize(pictures, dim=1), F.normalize(texts, dim=1), torch.arange(80))
    captions = [(f"picture {number}",) for number in range(80)]
    return GallerySet.scored(name, captions, lambda index: None, features)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (2.0, 0.5, "higher, above the margin of 1"),
        (0.5, 2.0, "lower, above the margin of 1"),
        (1.0, 1.0, "sign open, below the margin of 1"),
    ],
)
def test_a_change_of_recall_has_sign_and_size(before, after, words):
    first, second = gallery("mine, before", before), gallery("mine, chosen", after)
    (said,) = recall_verdicts([first, second])
    change = (second.metrics["rsum"] - first.metrics["rsum"]) / 6
    assert said.startswith(f"mine, chosen over before: {words}. mean recall {change:+.2f} (")
    assert said.endswith(" over pictures).")


def test_a_change_of_top1_has_sign_and_size():
    """0.5 and 0.7 of 100 pictures: an error of sqrt(0.25 + 0.21) / 10, 6.8 points, and t of 1.98."""
    estimate = difference_of_shares(0.5, 0.7, 100)
    assert estimate[:3] == pytest.approx((20.0, 20 - 13.46, 20 + 13.46), abs=0.01)
    scored = {
        "images": 100,
        "classes": 2,
        "chance": 0.5,
        "commonest": 0.6,
        "top1_interval": (0.4, 0.8),
    }
    labels = {"before": {**scored, "top1": 0.5}, "chosen, alpha 1": {**scored, "top1": 0.7}}
    shares, said = zero_shot_sentences({"things": labels})
    assert "chance 50.0 %, the commonest class 60.0 %" in shares
    assert said == (
        "things, chosen over before: higher, above the margin of 1. top-1 +20.00 (+6.54 to +33.46 over pictures)."
    )
