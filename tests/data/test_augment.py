"""Words are processed at the paper's rates, as the tokenizer means it; images by open_clip's transform plus the policy."""

import math
import random

import numpy as np
import pytest
import torch
from open_clip.tokenizer import HFTokenizer
from open_clip.transform import AugmentationCfg, image_transform
from PIL import Image
from tokenizers import ByteLevelBPETokenizer
from torchvision.transforms import (
    AutoAugment,
    CenterCrop,
    InterpolationMode,
    Normalize,
    Resize,
    ToTensor,
)
from transformers import RobertaTokenizer

from open_clip_zerovl.core.randomness import seeded
from open_clip_zerovl.data.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    image_transform_train,
    paper_eval_transform,
    with_auto_augment,
)
from open_clip_zerovl.data.tokens import WordAugment
from support.tiny_clip import WORDS, write_bert

CAPTION = "a small red cat with the round face of the moon"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    words = [*WORDS, "[unused1]", "!", "7", "cafe"]
    return write_bert(tmp_path_factory.mktemp("augment") / "bert", words=words)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return HFTokenizer(str(folder), context_length=32)


# --- words -----------------------------------------------------------------------------------------------------------


def test_rates_are_the_papers(tokenizer):
    """20 % of 200,000 distinct words are processed: 50 / 10 / 40 % masked, replaced, deleted; bounds of 5 deviations."""
    augment = WordAugment(tokenizer, 0.2)
    per_caption, captions = 50, 4000
    masked = replaced = kept = 0
    processed = []
    for seed in range(captions):
        words = [f"w{index}" for index in range(per_caption)]
        result = augment(" ".join(words), seed).split()
        masked += result.count("[MASK]")
        replaced += sum(word in WORDS or word == "cafe" for word in result)
        untouched = sum(word in words for word in result)
        kept += untouched
        processed.append(per_caption - untouched)
        assert [word for word in result if word in words] == [
            word for word in words if word in result
        ]  # order stays
    n = per_caption * captions
    deleted = n - masked - replaced - kept
    for count, share in ((masked, 0.1), (replaced, 0.02), (deleted, 0.08), (kept, 0.8)):
        assert abs(count - n * share) < 5 * math.sqrt(n * share * (1 - share)), (count, share)
    # word by word, not a fixed number of each caption
    assert abs(np.var(processed) / (per_caption * 0.2 * 0.8) - 1) < 0.12
    assert set(augment.vocabulary) == {word for word in [*WORDS, "cafe"] if len(word) > 1}


def test_no_caption_becomes_empty(tokenizer):
    augment = WordAugment(tokenizer, 1.0)
    results = [augment("cat dog", seed) for seed in range(500)]
    assert all(results) and augment("", 1) == ""
    assert {"cat", "dog"} <= set(results)  # where both were deleted, either stays
    assert {augment("zebra", seed) for seed in range(100)} >= {"[MASK]", "zebra"}


def test_the_same_seed_gives_the_same_caption_and_the_process_generator_stays(tokenizer):
    augment = WordAugment(tokenizer, 0.5)
    state = random.getstate()
    results = [augment(CAPTION, seed) for seed in range(20)]
    assert random.getstate() == state
    assert [augment(CAPTION, seed) for seed in range(20)] == results
    assert len(set(results)) > 15


def test_the_mask_becomes_the_mask_token(tokenizer):
    augment = WordAugment(tokenizer, 0.6)
    inner = tokenizer.tokenizer
    seen = 0
    for seed in range(50):
        text = augment("Cat &amp; Dog of the Moon", seed)
        ids = tokenizer([text])[0].tolist()
        assert ids.count(inner.mask_token_id) == text.split().count("[MASK]")
        seen += ids.count(inner.mask_token_id)
    assert seen > 20


def test_byte_level_vocabularies_work_too(tmp_path):
    corpus = [CAPTION, "two dogs in the snow", "snowing again", "the moon above a tower"] * 20
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        corpus, vocab_size=500, min_frequency=1, special_tokens=["<s>", "<pad>", "</s>", "<unk>"]
    )
    bpe.save_model(str(tmp_path))
    RobertaTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    augment = WordAugment(HFTokenizer(str(tmp_path), context_length=32), 1.0)
    assert augment.mask == "<mask>"
    assert {"snow", "moon", "tower", "dogs"} <= set(augment.vocabulary)
    assert not {"owing", "ow", "nowing"} & set(augment.vocabulary)


# --- images ----------------------------------------------------------------------------------------------------------


def image(seed=0, size=(90, 70), mode="RGB"):
    pixels = np.random.default_rng(seed).integers(
        0, 256, size=(size[1], size[0], 3), dtype=np.uint8
    )
    return Image.fromarray(pixels).convert(mode)


def names(transform):
    return [type(step).__name__ for step in transform.transforms]


def test_the_policy_goes_right_after_the_crop():
    stock = image_transform(
        32, is_train=True, aug_cfg=AugmentationCfg(scale=(0.6, 1.0), color_jitter_prob=None)
    )
    before = names(stock)
    transform = with_auto_augment(stock)
    assert names(transform) == [
        "RandomResizedCrop",
        "MaybeConvertMode",
        "AutoAugment",
        "MaybeToTensor",
        "Normalize",
    ]
    assert names(stock) == before  # the one that was given stays as it was
    assert len(transform.transforms[2].policies) == 25

    def shown(transform, seed: int) -> torch.Tensor:
        with seeded(seed):
            return transform(image(mode="P"))  # a palette image: the policy works on RGB

    assert shown(transform, 3).shape == (3, 32, 32) and torch.equal(
        shown(transform, 3), shown(transform, 3)
    )
    assert (
        sum(not torch.equal(shown(transform, seed), shown(stock, seed)) for seed in range(20)) >= 10
    )


def test_the_policy_goes_into_open_clips_timm_transform_too():
    stock = image_transform(
        32, is_train=True, aug_cfg=AugmentationCfg(scale=(0.6, 1.0), use_timm=True)
    )
    transform = with_auto_augment(stock)
    assert names(transform)[:2] == [names(stock)[0], "AutoAugment"]
    assert transform(image()).shape == (3, 32, 32)


def test_the_papers_training_transform():
    transform = image_transform_train(32, auto_augment="imagenet")
    crop = transform.transforms[0]
    assert (crop.size, crop.scale, crop.ratio) == ((32, 32), (0.6, 1.0), (0.75, 4 / 3))
    assert crop.interpolation is InterpolationMode.BILINEAR
    assert isinstance(transform.transforms[2], AutoAugment)
    assert transform(image()).shape == (3, 32, 32)
    assert not any(isinstance(step, AutoAugment) for step in image_transform_train(32).transforms)


def test_the_papers_evaluation_transform_squashes():
    transform = paper_eval_transform(224)
    picture = image(size=(300, 200))
    expected = Normalize(IMAGENET_MEAN, IMAGENET_STD)(
        ToTensor()(CenterCrop(224)(Resize((256, 256))(picture)))
    )
    assert torch.equal(transform(picture), expected)
    assert transform.transforms[1].size == (256, 256)
    assert paper_eval_transform(112).transforms[1].size == (128, 128)
    # Negative control: open_clip's default keeps the aspect ratio.
    stock = image_transform(
        224, is_train=False, mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bilinear"
    )
    assert (stock(picture) - expected).abs().max() > 0.1
