"""Text towers of other languages: the models with XLM-RoBERTa, whose padding token is 1 and whose positions begin at 2."""

from __future__ import annotations

import open_clip
import pytest
import torch
import torch.nn.functional as F

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.transformers_folder import export_transformers
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.tokens import WordAugment
from open_clip_zerovl.models.build import check_model
from support.hf_towers import small_model
from support.tiny_clip import (
    NATIVE_VISION,
    bert_text,
    random_model,
    register,
    write_run,
    write_xlm_roberta,
)

TEXTS = ["a small red cat", "猫", "the big round house with a tree and the moon"]
PAD = 1


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return write_xlm_roberta(tmp_path_factory.mktemp("text") / "xlmr")


@pytest.fixture(scope="module")
def small(tmp_path_factory, tower) -> str:
    return small_model(tmp_path_factory.mktemp("configs"), "small-xlmr", tower)


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
            with pytest.raises(
                UserError, match="has 78 positions, fewer than the 79 tokens of a text"
            ):
                check_model(name)


def test_words_are_not_pieces_and_the_mask_takes_the_space_before_it(small):
    tokenizer = open_clip.get_tokenizer(small)
    assert "s" not in WordAugment(tokenizer, 1.0).vocabulary
    row = tokenizer(["the <mask> cat"])[0].tolist()
    words = tokenizer.tokenizer.convert_tokens_to_ids(["▁the", "<mask>", "▁cat"])
    assert row[:5] == [0, *words, 2] and set(row[5:]) == {PAD}


def test_both_exports_hold_it(small, tmp_path):
    checkpoint = write_run(tmp_path / "run", random_model(small), {"model": small})
    folder = export_local_dir(checkpoint, tmp_path / "open")
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(TEXTS)
    assert torch.equal(tokens, open_clip.get_tokenizer(small)(TEXTS))
    for_transformers = export_transformers(
        checkpoint, tmp_path / "tf"
    )  # compares the embeddings itself
    from transformers import AutoModel, AutoProcessor

    loaded = AutoModel.from_pretrained(for_transformers).eval()
    inputs = AutoProcessor.from_pretrained(for_transformers)(
        text=TEXTS, padding=True, return_tensors="pt"
    )
    pixels = torch.zeros(1, 3, 32, 32)
    with torch.no_grad():
        found = loaded(**inputs, pixel_values=pixels).text_embeds
        torch.testing.assert_close(
            found, F.normalize(model.eval().encode_text(tokens), dim=-1), rtol=0, atol=1e-5
        )
