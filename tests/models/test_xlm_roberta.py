"""Text towers of other languages: the models with XLM-RoBERTa, whose padding token is 1 and whose positions begin at 2."""

from __future__ import annotations

import copy
import random

import open_clip
import pytest
import torch
import torch.nn.functional as F
from open_clip.factory import get_model_config

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.transformers_folder import export_transformers
from open_clip_zerovl.data.words import WordAugment
from open_clip_zerovl.dga import DecoupledGradientAccumulation
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.models.build import check_model, create_model_and_transforms, with_text_model
from open_clip_zerovl.recipe.host_waits import without_host_waits
from open_clip_zerovl.recipe.text_lengths import sort_texts, text_padding
from open_clip_zerovl.recipe.towers import freeze, lock_text_layers
from support.dga_reference import TOLERANCE, error, gradients, one_graph
from support.tiny_clip import NATIVE_VISION, bert_text, random_model, register, write_run, write_xlm_roberta

NAMES = [f"zerovl-ViT-{size}-XLM-RoBERTa-base" for size in ("S-16", "B-32", "B-16")]
TEXTS = ["a small red cat", "猫", "the big round house with a tree and the moon"]
PAD = 1


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return write_xlm_roberta(tmp_path_factory.mktemp("text") / "xlmr")


@pytest.fixture(scope="module")
def small(tmp_path_factory, tower) -> str:
    """A registered small model of the same layout."""
    text = {**bert_text(tower), "context_length": 24}
    vision = {**NATIVE_VISION, "patch_dropout": 0.25}
    return register(tmp_path_factory.mktemp("configs"), "small-xlmr", vision, text, init_logit_scale=3.9)


def texts_of(name: str) -> torch.Tensor:
    return open_clip.get_tokenizer(name)(TEXTS)


@pytest.mark.parametrize("name", NAMES)
def test_the_configs_name_their_towers(name, tower):
    config = get_model_config(name)
    text = config["text_cfg"]
    assert text["hf_model_name"] == text["hf_tokenizer_name"] == "FacebookAI/xlm-roberta-base"
    assert text["context_length"] == 77 and text["hf_pooler_type"] == "cls_last_hidden_state_pooler"
    assert config["vision_cfg"] == get_model_config(name.replace("XLM-RoBERTa", "BERT"))["vision_cfg"]
    check_model(name, text_model=tower)


def test_a_config_builds_with_a_folder_and_reads_77_tokens(tower):
    name = with_text_model(NAMES[0], tower)
    model, _, _ = create_model_and_transforms(name)
    model.eval()
    tokens = texts_of(name)
    assert tokens.shape == (3, 77) and (tokens[:, 0] == 0).all() and (tokens == PAD).any()
    with torch.no_grad():
        features = model.encode_text(tokens)
        mask = (tokens != PAD).long()
        hidden = model.text.transformer(input_ids=tokens, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(features, hidden[:, 0] @ model.text.proj.weight.T, rtol=0, atol=1e-6)
        # Padding changes nothing; without its mask it would.
        length = int(mask.sum(dim=1).max())
        torch.testing.assert_close(model.encode_text(tokens[:, :length]), features, rtol=0, atol=1e-5)
        unmasked = model.text.transformer(input_ids=tokens, attention_mask=torch.ones_like(mask)).last_hidden_state
    assert (unmasked[:, 0] - hidden[:, 0]).abs().max() > 1e-3


def test_positions_are_counted_from_behind_the_padding_token(tower, tmp_path):
    """80 positions hold 78 tokens: a context of 79 would end in an index error of the first full text."""
    for length, fits in ((78, True), (79, False)):
        text = {**bert_text(tower), "context_length": length}
        name = register(tmp_path, f"long-{length}", NATIVE_VISION, text)
        if fits:
            check_model(name)
            model = random_model(name)
            full = torch.full((1, length), 5)
            full[0, 0] = 0
            assert model.encode_text(full).isfinite().all()
        else:
            with pytest.raises(UserError, match="has 78 positions, the model's context_length is 79"):
                check_model(name)


def test_words_are_masked_and_replaced_by_the_towers_own(small):
    tokenizer = open_clip.get_tokenizer(small)
    augment = WordAugment(tokenizer, 1.0)
    assert augment.mask == "<mask>" and "cat" in augment.vocabulary and "s" not in augment.vocabulary
    mask, unknown = tokenizer.tokenizer.mask_token_id, tokenizer.tokenizer.unk_token_id
    seen = torch.cat([tokenizer([augment("the small red cat", random.Random(seed))])[0] for seed in range(40)])
    assert (seen == mask).sum() > 20 and not (seen == unknown).any()
    row = tokenizer(["the <mask> cat"])[0].tolist()
    assert row[:5] == [0, *tokenizer.tokenizer.convert_tokens_to_ids(["▁the", "<mask>", "▁cat"]), 2] and set(
        row[5:]
    ) == {PAD}


@pytest.mark.parametrize("frozen", [(), ("text",)])
def test_accumulation_is_exact_with_dropout_and_token_drop(small, frozen):
    model = random_model(small).double().train()
    model.output_dict = True
    freeze(model, frozen)
    without_host_waits(model)
    tokens = texts_of(small)
    generator = torch.Generator().manual_seed(1)
    parts = [
        (
            torch.randn(3, 3, 32, 32, generator=generator, dtype=torch.float64),
            tokens[torch.randperm(3, generator=generator)],
        )
        for _ in range(3)
    ]
    loss = ContrastiveLoss()
    torch.manual_seed(7)
    _, reference = one_graph(model, loss, parts)
    torch.manual_seed(7)
    DecoupledGradientAccumulation(model, loss, retain=1).backward(parts)
    assert error(gradients(model), reference) <= TOLERANCE[torch.float64]


def test_the_prepared_mask_gives_the_same_features(small):
    stock = random_model(small)
    ours = copy.deepcopy(stock)
    without_host_waits(ours)
    assert len(ours.text.transformer._forward_pre_hooks) == 1
    tokens = texts_of(small)
    with torch.no_grad():
        assert torch.equal(ours.encode_text(tokens), stock.encode_text(tokens))


def test_sorted_texts_are_cut_at_their_own_padding(small):
    model = random_model(small)
    assert text_padding(model) == PAD
    tokens = texts_of(small)
    cut, order = sort_texts([tokens[:2], tokens[2:]], PAD)
    assert [part.shape[1] for part in cut] == [6, 12]  # the lengths are 4, 6, 12
    with torch.no_grad():
        features = torch.cat([model.encode_text(part) for part in cut])
        torch.testing.assert_close(features, model.encode_text(tokens)[order], rtol=0, atol=1e-5)


def test_layers_are_locked_where_bert_has_them(small):
    model = random_model(small)
    lock_text_layers(model, unlocked_layers=1)
    trained = {name for name, value in model.text.transformer.named_parameters() if value.requires_grad}
    assert trained and all(name.startswith("encoder.layer.1.") for name in trained)


def test_both_exports_hold_it(small, tmp_path):
    checkpoint = write_run(tmp_path / "run", random_model(small), {"model": small})
    folder = export_local_dir(checkpoint, tmp_path / "open")
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(TEXTS)
    assert torch.equal(tokens, texts_of(small))
    for_transformers = export_transformers(checkpoint, tmp_path / "tf")  # compares the embeddings itself
    from transformers import AutoModel, AutoProcessor

    loaded = AutoModel.from_pretrained(for_transformers).eval()
    inputs = AutoProcessor.from_pretrained(for_transformers)(text=TEXTS, padding=True, return_tensors="pt")
    pixels = torch.zeros(1, 3, 32, 32)
    with torch.no_grad():
        found = loaded(**inputs, pixel_values=pixels).text_embeds
        torch.testing.assert_close(found, F.normalize(model.eval().encode_text(tokens), dim=-1), rtol=0, atol=1e-5)
