"""ModernBERT as the text tower: open_clip 3.3 builds it by our registration, and the recipe is as exact on it as on BERT."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess

import open_clip
import pytest
import torch
from open_clip import hf_model
from transformers import AutoModel

from open_clip_zerovl.checkpoints.transformers_folder import export_transformers
from open_clip_zerovl.checkpoints.weights import load_pretrained_tower
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.tokens import fast_tokenizer
from open_clip_zerovl.dga import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.models.build import create_model_and_transforms
from open_clip_zerovl.models.text_towers import TowerModel, register_text_towers
from open_clip_zerovl.recipe.gpu import without_gpu_syncs
from open_clip_zerovl.recipe.mixup import CoinFlipMixup, Mix
from support import warm
from support.dga_reference import error, gradients, one_graph
from support.hf_towers import MixedByHand, micro_batches_of, small_model
from support.tiny_clip import (
    NATIVE_VISION,
    bert_text,
    random_model,
    register,
    write_modernbert,
    write_run,
)

modernbert = pytest.importorskip(
    "transformers.models.modernbert", reason="transformers before 4.48 has no ModernBERT"
)

NAME = "zerovl-ViT-S-16-ModernBERT-base"
TEXTS = ["a small red cat", "the sun", "the big round house with a tree and the moon of a red dog"]
PAD = 3


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return write_modernbert(tmp_path_factory.mktemp("text") / "modernbert")


@pytest.fixture(scope="module")
def small(tmp_path_factory, tower) -> str:
    return small_model(tmp_path_factory.mktemp("configs"), "small-modernbert", tower)


# --- registration and building ---------------------------------------------------------------------------------------


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


def test_a_folders_weights_are_loaded_whatever_head_they_were_stored_with(tower, tmp_path):
    """Hubs hold ModernBERT with its head for masked words, and some in half precision."""
    folder = tmp_path / "with-weights"
    torch.manual_seed(3)
    whole = modernbert.ModernBertForMaskedLM(
        modernbert.ModernBertConfig.from_pretrained(tower)
    ).half()
    whole.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((tower / file).read_bytes())
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


def test_rotary_frequencies_stay_in_float32_where_the_model_is_cast(small):
    """Checkpoints do not hold them: if training rounded them to bfloat16, they would differ in evaluation."""
    model = random_model(small)
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


# --- the recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared_first", [False, True])
def test_mixed_texts_are_exact(small, prepared_first):
    """DGA's gradient is that of the same mixture, written down without hooks."""
    model, mix, weight = (
        random_model(small).double().eval(),
        Mix(mixes_images=False, weight=0.35),
        0.35,
    )
    model.output_dict = True
    parts = micro_batches_of(small, TEXTS)
    loss_inputs = mix.loss_inputs([3, 3, 3])
    _, reference = one_graph(
        MixedByHand(model, weight, pad=PAD),
        ContrastiveLoss(),
        parts,
        **loss_inputs,
    )
    mixup = CoinFlipMixup()
    if prepared_first:
        without_gpu_syncs(model)
    mixup.attach(model)
    without_gpu_syncs(model)
    dga = DecoupledGradientAccumulation(model, ContrastiveLoss(), retain=1)
    with mixup.applied(mix):
        dga.backward(parts, prepare=mix.prepare, **loss_inputs)
    found = gradients(model)
    assert (
        error(found, {name.removeprefix("model."): value for name, value in reference.items()})
        <= 1e-10
    )


def test_the_compiled_part_of_its_tokenizer_is_found(small):
    tokenizer = open_clip.get_tokenizer(small)
    assert fast_tokenizer(tokenizer) is not tokenizer  # its compiled part gives the same tokens


# --- exports and commands --------------------------------------------------------------------------------------------

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
def test_an_export_loads_in_another_process_after_one_import(small, tmp_path, capsys):
    model = random_model(small)
    checkpoint = write_run(tmp_path / "run", model, {"model": small})
    folder, features = tmp_path / "out", tmp_path / "features.pt"
    assert main(["export", str(checkpoint), str(folder)]) in (0, None)
    said = capsys.readouterr().out
    assert (
        "write 'import open_clip_zerovl.models' before the model is loaded" in said
        and "after a move" in said
    )
    card = (folder / "README.md").read_text()
    assert (
        "import open_clip\nimport open_clip_zerovl.models  # its text tower\n" in card
        and "stock" not in card
    )
    assert json.loads((folder / "config.json").read_text())["model_type"] == "modernbert"
    # transformers 4 knows this name alone, 5 both.
    assert (
        json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
        == "PreTrainedTokenizerFast"
    )

    command = [warm.python(), "-c", LOADS, str(folder), str(features), *TEXTS]
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
        torch.load(features), model.encode_text(open_clip.get_tokenizer(small)(TEXTS)).detach()
    )

    with pytest.raises(
        UserError, match="takes a text tower with a pooler .*, and not 'modernbert'"
    ):
        export_transformers(checkpoint, tmp_path / "tf")
