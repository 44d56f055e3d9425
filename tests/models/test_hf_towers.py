"""HF text towers other than BERT: the recipe is as exact on them, whatever their padding token, masks and layers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import open_clip
import pytest
import torch
from open_clip.factory import get_model_config
from transformers import AutoConfig

from open_clip_zerovl.checkpoints.transformers_folder import export_transformers
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.tokens import WordAugment
from open_clip_zerovl.models.build import check_model, create_model_and_transforms, with_text_model
from open_clip_zerovl.recipe.gpu import without_gpu_syncs
from open_clip_zerovl.recipe.step import text_padding
from support.hf_towers import small_model
from support.tiny_clip import (
    NATIVE_VISION,
    bert_text,
    random_model,
    register,
    write_modernbert,
    write_run,
    write_xlm_roberta,
)


class Tower(NamedTuple):
    name: str  # in our configs
    hub: str
    write: Callable[[Path], Path]
    start: int  # the first token of a text
    pad: int
    mask: str
    texts: list[str]


TOWERS = [
    Tower(
        "XLM-RoBERTa-base", "FacebookAI/xlm-roberta-base", write_xlm_roberta, 0, 1, "<mask>",
        ["a small red cat", "猫", "the big round house with a tree and the moon"],
    ),
    Tower(
        "ModernBERT-base", "answerdotai/ModernBERT-base", write_modernbert, 1, 3, "[MASK]",
        ["a small red cat", "the sun", "the big round house with a tree and the moon of a red dog"],
    ),
]  # fmt: skip


@pytest.fixture(scope="module", params=TOWERS, ids=[one.name for one in TOWERS])
def tower(request) -> Tower:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tower) -> Path:
    return tower.write(tmp_path_factory.mktemp("text") / "tower")


@pytest.fixture(scope="module")
def small(tmp_path_factory, tower, folder) -> str:
    return small_model(tmp_path_factory.mktemp("configs"), f"small-{tower.name}", folder)


@pytest.mark.parametrize("size", ["S-16", "B-32", "B-16"])
def test_the_configs_name_their_towers(size, tower, folder):
    name = f"zerovl-ViT-{size}-{tower.name}"
    config = get_model_config(name)
    text = config["text_cfg"]
    assert text["hf_model_name"] == text["hf_tokenizer_name"] == tower.hub
    assert text["context_length"] == 77 and text["hf_pooler_type"] == "cls_last_hidden_state_pooler"
    assert config["vision_cfg"] == get_model_config(f"zerovl-ViT-{size}-BERT-base")["vision_cfg"]
    check_model(name, text_model=folder)


def test_a_config_builds_with_a_folder_and_reads_77_tokens(tower, folder):
    name = with_text_model(f"zerovl-ViT-S-16-{tower.name}", folder)
    model, _, _ = create_model_and_transforms(name)
    model.eval()
    tokens = open_clip.get_tokenizer(name)(tower.texts)
    assert (
        tokens.shape == (3, 77)
        and (tokens[:, 0] == tower.start).all()
        and (tokens == tower.pad).any()
    )
    with torch.no_grad():
        features = model.encode_text(tokens)
        mask = (tokens != tower.pad).long()
        hidden = model.text.transformer(input_ids=tokens, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(
            features, hidden[:, 0] @ model.text.proj.weight.T, rtol=0, atol=1e-6
        )
        # Padding changes nothing; without its mask it would.
        length = int(mask.sum(dim=1).max())
        torch.testing.assert_close(
            model.encode_text(tokens[:, :length]), features, rtol=0, atol=1e-5
        )
        unmasked = model.text.transformer(
            input_ids=tokens, attention_mask=torch.ones_like(mask)
        ).last_hidden_state
    assert (unmasked[:, 0] - hidden[:, 0]).abs().max() > 1e-3


def test_the_prepared_masks_give_the_same_features(tower, small):
    stock = random_model(small)
    ours = copy.deepcopy(stock)
    without_gpu_syncs(ours)
    hooks = len(ours.text.transformer._forward_pre_hooks)
    without_gpu_syncs(ours)  # once is enough
    reads = (
        type(ours.text.transformer).__name__ != "ModernBertModel"
        or version("transformers") >= "5.1"
    )
    assert text_padding(ours) == tower.pad
    assert hooks == len(ours.text.transformer._forward_pre_hooks) == int(reads)
    tokens = open_clip.get_tokenizer(small)(tower.texts)
    with torch.no_grad():
        assert torch.equal(ours.encode_text(tokens), stock.encode_text(tokens))


def test_positions_are_counted_from_behind_the_padding_token(tmp_path):
    """XLM-RoBERTa's 80 positions hold 78 tokens: a context of 79 would end in an index error of the first full text."""
    folder = write_xlm_roberta(tmp_path / "xlmr")
    names = [
        register(tmp_path, f"long-{n}", NATIVE_VISION, {**bert_text(folder), "context_length": n})
        for n in (78, 79)
    ]
    check_model(names[0])
    full = torch.full((1, 78), 5)
    full[0, 0] = 0
    model = random_model(names[0])
    assert model.encode_text(full).isfinite().all()
    checkpoint = write_run(tmp_path / "run", model, {"model": names[0]})
    exported = export_transformers(
        checkpoint, tmp_path / "export"
    )  # compares its embeddings itself
    assert AutoConfig.from_pretrained(exported).text_config.pad_token_id == 1
    with pytest.raises(UserError, match="has 78 positions, fewer than the 79 tokens of a text"):
        check_model(names[1])


def test_words_are_masked_and_replaced_by_the_towers_own(tower, small):
    tokenizer = open_clip.get_tokenizer(small)
    augment = WordAugment(tokenizer, 1.0)
    assert augment.mask == tower.mask and "cat" in augment.vocabulary
    assert "s" not in augment.vocabulary  # a piece of a word
    inner = tokenizer.tokenizer
    seen = torch.cat(
        [tokenizer([augment("the small red cat", random.Random(seed))])[0] for seed in range(40)]
    )
    assert (seen == inner.mask_token_id).sum() > 20 and not (seen == inner.unk_token_id).any()
