"""The ceiling of RSUM is the score of a model that knows every caption and nothing else of a picture."""

import pytest
import torch

from open_clip_zerovl.evaluate.retrieval.ceiling import ceiling_note, rsum_ceiling
from open_clip_zerovl.evaluate.retrieval.metrics import retrieval_metrics


@pytest.mark.parametrize("shared", [1, 3, 10, 40])
def test_the_ceiling_is_what_a_perfect_model_scores(shared):
    """Pictures in groups of `shared` have one caption; a perfect model's features are one-hot in the captions."""
    labels = torch.arange(40) // shared
    features = torch.nn.functional.one_hot(labels).float()
    scored = retrieval_metrics(features, features, list(range(40)))["rsum"]
    assert rsum_ceiling([[f"caption {label}"] for label in labels.tolist()]) == pytest.approx(scored)
    assert (scored == 600) == (shared == 1)


def test_a_rare_caption_beside_a_common_one_finds_its_picture():
    """Text queries of the common caption still miss."""
    captions = [["a person", f"person {number}"] for number in range(20)]
    assert rsum_ceiling(captions) == pytest.approx(300 + 100 * sum((1 + k / 20) / 2 for k in (1, 5, 10)))
    note = ceiling_note("photos", captions)
    assert "21 different captions serve the 20 pictures of photos: RSUM can reach 490 of 600" in note
    assert "--positives caption" in note and ceiling_note("x", [["a"], ["b"]]) is None
