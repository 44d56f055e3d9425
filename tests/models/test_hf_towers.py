"""HF text towers other than BERT: the recipe is as exact on them, whatever their padding token, masks and layers."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import open_clip
import pytest
import torch
from open_clip import hf_model
from open_clip.factory import get_model_config
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from open_clip_zerovl.checkpoints.transformers_folder import export_transformers
from open_clip_zerovl.checkpoints.weights import load_pretrained_tower
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.tokens import WordAugment, fast_tokenizer
from open_clip_zerovl.models.build import check_model, create_model_and_transforms, with_text_model
from open_clip_zerovl.models.text_towers import TowerModel, register_text_towers
from open_clip_zerovl.recipe.gpu import without_gpu_syncs
from open_clip_zerovl.recipe.step import text_padding
from support import warm
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


def small_model(configs: Path, name: str, folder: Path) -> str:
    """Register a small model with dropout 0.1 everywhere in the text tower and token drop in the image tower."""
    vision = {**NATIVE_VISION, "patch_dropout": 0.25}
    text = {**bert_text(folder), "context_length": 24}
    return register(configs, name, vision, text, init_logit_scale=3.9)


@pytest.fixture(scope="module")
def small(tmp_path_factory, tower, folder) -> str:
    return small_model(tmp_path_factory.mktemp("configs"), f"small-{tower.name}", folder)


@pytest.fixture(scope="module")
def modernbert(tmp_path_factory) -> Path:
    return write_modernbert(tmp_path_factory.mktemp("text") / "modernbert")


@pytest.fixture(scope="module")
def small_modernbert(tmp_path_factory, modernbert) -> str:
    return small_model(tmp_path_factory.mktemp("configs"), "small-modernbert", modernbert)


def test_a_config_builds_with_a_folder_and_reads_77_tokens(tower, folder):
    for size in ("S-16", "B-32", "B-16"):
        config = get_model_config(f"zerovl-ViT-{size}-{tower.name}")
        assert (
            config["text_cfg"]["hf_model_name"]
            == config["text_cfg"]["hf_tokenizer_name"]
            == tower.hub
        )
        assert (
            config["vision_cfg"] == get_model_config(f"zerovl-ViT-{size}-BERT-base")["vision_cfg"]
        )
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
    exported = export_transformers(checkpoint, tmp_path / "export")  # compares its embeddings
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


def test_the_compiled_part_of_its_tokenizer_is_found(small):
    tokenizer = open_clip.get_tokenizer(small)
    assert fast_tokenizer(tokenizer) is not tokenizer  # its compiled part gives the same tokens


# --- ModernBERT, which open_clip 3.3 builds by our registration ---


def test_registering_again_changes_nothing_and_an_open_clip_with_other_names_is_left_alone(
    monkeypatch,
):
    register_text_towers()
    assert hf_model.AutoModel is TowerModel
    other = object()
    monkeypatch.setattr(hf_model, "AutoModel", other)
    monkeypatch.delitem(hf_model.arch_dict, "modernbert")
    register_text_towers()
    assert hf_model.AutoModel is other and "modernbert" not in hf_model.arch_dict


def test_a_folders_weights_are_loaded_whatever_head_they_were_stored_with(modernbert, tmp_path):
    """Hubs hold ModernBERT with its head for masked words, and some in half precision."""
    folder = tmp_path / "with-weights"
    torch.manual_seed(3)
    shutil.copytree(modernbert, folder)
    whole = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(modernbert)).half()
    whole.save_pretrained(folder)
    text = {**bert_text(folder), "hf_model_pretrained": True}
    model, _, _ = create_model_and_transforms(
        register(tmp_path, "weights-modernbert", NATIVE_VISION, text)
    )
    found = model.text.transformer.state_dict()
    assert len(found) > 10
    for key, tensor in whole.model.state_dict().items():
        assert found[key].dtype == torch.float32 and torch.equal(found[key], tensor.float()), key
    other = random_model(
        register(tmp_path, "no-weights-modernbert", NATIVE_VISION, {**bert_text(folder)})
    )
    assert load_pretrained_tower(other, "text", folder).loaded == len(found)
    assert all(
        torch.equal(value, found[key]) for key, value in other.text.transformer.state_dict().items()
    )


def test_rotary_frequencies_stay_in_float32_where_the_model_is_cast(small_modernbert):
    """Checkpoints do not hold them: if training rounded them to bfloat16, they would differ in evaluation."""
    model = random_model(small_modernbert)
    config = model.text.transformer.config
    assert config._attn_implementation == "sdpa" and not config.reference_compile
    exact = {name: value.clone() for name, value in model.text.transformer.named_buffers()}
    assert exact and not any(
        name.endswith("inv_freq") for name in model.text.transformer.state_dict()
    )
    changed = copy.deepcopy(model).to(torch.bfloat16)
    again = pickle.loads(pickle.dumps(model.text)).to(torch.bfloat16)
    for part in (changed.text.transformer, again.transformer):
        assert {parameter.dtype for parameter in part.parameters()} == {torch.bfloat16}
        assert all(torch.equal(value, exact[name]) for name, value in part.named_buffers())
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    plain = AutoModel.from_config(model.text.config).to(
        torch.bfloat16
    )  # the control: transformers' own
    assert not all(torch.equal(value.float(), exact[name]) for name, value in plain.named_buffers())


LOADS = """
import sys, torch, open_clip
name = "local-dir:" + sys.argv[1]
try:
    open_clip.create_model_and_transforms(name)
    print("stock open_clip loads it")
except TypeError as error:
    print(error)
assert "open_clip_zerovl" not in sys.modules
import open_clip_zerovl.models
model, _, _ = open_clip.create_model_and_transforms(name)
tokens = open_clip.get_tokenizer(name)(sys.argv[3:])
with torch.no_grad():
    torch.save(model.eval().encode_text(tokens), sys.argv[2])
"""


@pytest.mark.slow  # nine seconds of imports; the registration on import is shown by tests/core/test_lazy.py
def test_an_export_loads_in_another_process_after_one_import(small_modernbert, tmp_path, capsys):
    model, texts = random_model(small_modernbert), TOWERS[1].texts
    checkpoint = write_run(tmp_path / "run", model, {"model": small_modernbert})
    folder, features = tmp_path / "out", tmp_path / "features.pt"
    assert main(["export", str(checkpoint), str(folder)]) in (0, None)
    assert "import open_clip_zerovl.models" in capsys.readouterr().out
    assert "\nimport open_clip_zerovl.models" in (folder / "README.md").read_text()
    # transformers 4 knows this name alone, 5 both.
    assert (
        json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
        == "PreTrainedTokenizerFast"
    )

    command = [warm.python(), "-c", LOADS, str(folder), str(features), *texts]
    finished = subprocess.run(
        command, capture_output=True, text=True, env=os.environ, cwd=tmp_path, timeout=240
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    by_itself = hasattr(hf_model.HFTextEncoder, "layer_groups")  # open_clip 4
    assert (
        "stock open_clip loads it"
        if by_itself
        else "unexpected keyword argument 'add_pooling_layer'"
    ) in finished.stdout
    assert torch.equal(
        torch.load(features),
        model.encode_text(open_clip.get_tokenizer(small_modernbert)(texts)).detach(),
    )

    with pytest.raises(
        UserError, match="takes a text tower with a pooler .*, and not 'modernbert'"
    ):
        export_transformers(checkpoint, tmp_path / "tf")
