"""`--context-length`: positions stretched by Long-CLIP's rule, and exports that stock open_clip loads with the new length."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.models.long_context import CONSTANT, lengthen, stretched, text_positions
from open_clip_zerovl.recipe.apply import build_model
from open_clip_zerovl.recipe.flags import RecipeConfig
from open_clip_zerovl.recipe.start import init_from
from support.programs import COMMON, launch, state_of
from support.tars import write_source
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    WORDS,
    bert_text,
    random_model,
    register,
    write_bert,
    write_modernbert,
    write_run,
    write_xlm_roberta,
)

LONGER = 96
SHORT, LONG = "a red cat", " ".join(["a small red cat with the big round sun"] * 9)
# name -> learned rows before the first token's
TOWERS = {"long-clip": 0, "long-custom": 0, "long-last": 0, "long-bert": 0, "long-xlm": 2}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("long")
    clip = {**CLIP_TEXT, "context_length": 32}
    texts = {
        "long-clip": clip,
        "long-custom": {**clip, "hf_tokenizer_name": ""},
        "long-last": {**clip, "no_causal_mask": True, "pool_type": "last"},
        "long-bert": bert_text(write_bert(place / "bert")),
        "long-xlm": bert_text(write_xlm_roberta(place / "xlm")),
        "long-modern": bert_text(write_modernbert(place / "modern")),
        "long-tiny": CLIP_TEXT,
    }
    for name, text_cfg in texts.items():
        custom = {"custom_text": True} if name in ("long-custom", "long-last") else {}
        register(place / "configs", name, NATIVE_VISION, text_cfg, **custom)
    return place


def rows_of(model: torch.nn.Module) -> torch.Tensor:
    tower = getattr(model, "text", model)
    if hasattr(tower, "positional_embedding"):
        return tower.positional_embedding.detach()
    return tower.transformer.embeddings.position_embeddings.weight.detach()


@torch.no_grad()
def encoded(model: torch.nn.Module, texts: list[str], length: int, name: str) -> torch.Tensor:
    return model.eval().encode_text(open_clip.get_tokenizer(name, context_length=length)(texts))


@pytest.mark.parametrize(("old", "new"), [(77, 248), (77, 78), (22, 23), (512, 4096)])
def test_the_first_rows_stay_and_the_rest_is_interpolated(old, new):
    rows = torch.randn(old, 5, generator=torch.Generator().manual_seed(0))
    found = stretched(rows, new)
    assert found.shape == (new, 5) and torch.equal(found[:20], rows[:20])
    at = np.linspace(20, old - 1, new - 20)
    expected = np.stack(
        [np.interp(at, np.arange(20, old), column[20:]) for column in rows.double().numpy().T],
        axis=1,
    )
    assert np.abs(found[20:].numpy() - expected).max() < 1e-5
    assert torch.equal(found[-1], rows[-1])


@pytest.mark.parametrize("name", TOWERS)
def test_each_tower_reads_more_tokens(name):
    """The rows before 20 and those that count from padding stay; a tower whose text ends in row 19 embeds it as before."""
    model, before = random_model(name), random_model(name)
    first, old = TOWERS[name], text_positions(model)
    lengthen(model, LONGER)
    assert text_positions(model) == LONGER and model.context_length == LONGER + first
    assert torch.equal(rows_of(model)[: first + 20], rows_of(before)[: first + 20])
    assert not torch.equal(rows_of(model)[first + 20 : first + old], rows_of(before)[first + 20 :])
    short = encoded(model, [SHORT], LONGER, name), encoded(before, [SHORT], old, name)
    # SigLIP's text is its last place, which is another one now; padding is read by none of the other towers
    assert torch.allclose(*short, atol=1e-6) == (name != "long-last")
    long = encoded(model, [LONG, LONG + " dog"], LONGER, name)
    assert (long[0] - long[1]).norm() / long[
        0
    ].norm() > 1e-3  # the word after the old length counts
    cut = encoded(before, [LONG, LONG + " dog"], old, name)
    assert torch.equal(cut[0], cut[1])


@pytest.mark.parametrize(
    ("name", "length", "sentence"),
    [
        ("long-clip", 32, "--context-length 32 must be above the 32 tokens that the model reads"),
        ("long-bert", 12, "must be above the 12 tokens that the model reads"),
        ("long-modern", 99, "none of its own; where its positions are computed"),
        ("long-tiny", 99, "the text tower has 16; give --force-context-length 99"),
    ],
)
def test_lengths_that_do_not_work_are_refused(name, length, sentence):
    with pytest.raises(UserError, match=sentence):
        lengthen(random_model(name), length, 12 if name == "long-bert" else None)


def test_a_tower_with_enough_positions_is_left_as_it_is():
    model = random_model("long-bert")  # texts of 12 tokens, 32 positions
    assert not lengthen(model, 30, 12)
    assert torch.equal(rows_of(model), rows_of(random_model("long-bert")))


@pytest.mark.parametrize(
    ("name", "length", "said"), [("long-clip", LONGER, 1), ("long-bert", 30, 0)]
)
def test_adapters_beside_stretched_positions_are_said_to_learn_alone(name, length, said, caplog):
    caplog.set_level("INFO")
    model, *_ = build_model(
        name, None, RecipeConfig(context_length=length, lora=2, lora_on="text"), seed=0
    )
    assert caplog.messages.count(CONSTANT) == said
    assert not any(p.requires_grad for n, p in model.named_parameters() if "position" in n)


@pytest.mark.parametrize("name", TOWERS)
def test_a_stretched_checkpoint_starts_a_run_of_its_length_and_of_a_longer_one(
    tmp_path, name, caplog
):
    """Weights were loaded before positions were stretched: the text tower did not fit and stayed random."""
    trained = random_model(name)
    lengthen(trained, LONGER, 12 if name == "long-bert" else None)
    checkpoint = write_run(
        tmp_path / "run", trained, {"model": name, "force_context_length": LONGER}
    )
    found = {}
    for length in (LONGER, 2 * LONGER):
        start = partial(init_from, checkpoint=checkpoint, context_length=length)
        found[length], *_ = build_model(
            name, None, RecipeConfig(context_length=length), seed=0, start=start
        )
        assert text_positions(found[length]) == length
    weights = trained.state_dict()
    assert all(
        torch.equal(tensor, weights[key]) for key, tensor in found[LONGER].state_dict().items()
    )
    lengthen(trained, 2 * LONGER, LONGER)
    assert torch.equal(rows_of(found[2 * LONGER]), rows_of(trained))
    with pytest.raises(
        UserError,
        match=f"has positions for {LONGER} tokens, more than --context-length 90; give --context-length",
    ):
        init_from(random_model(name), checkpoint, context_length=90)
    assert "text tower" in init_from(random_model(name), checkpoint).left
    assert f"is not loaded; give --context-length {LONGER} to start from it" in caplog.text


@pytest.mark.parametrize("name", ["long-clip", "long-bert", "long-xlm"])
def test_stock_open_clip_loads_the_export_with_the_new_length(tmp_path, name):
    model = random_model(name)
    lengthen(model, LONGER)
    checkpoint = write_run(tmp_path / "run", model, {"model": name, "force_context_length": LONGER})
    folder = "local-dir:" + str(export_local_dir(checkpoint, tmp_path / "export"))
    stock = open_clip.create_model(folder)
    tokens = open_clip.get_tokenizer(folder)([SHORT, LONG])
    assert tokens.shape == (2, LONGER)
    with torch.no_grad():
        assert torch.equal(stock.eval().encode_text(tokens), model.eval().encode_text(tokens))


@pytest.mark.slow(reason="three trainings, 15 s; the tests above hold each part")
def test_a_training_with_longer_captions_resumes_and_exports(tmp_path):
    bert = write_bert(tmp_path / "bert", words=[*WORDS, "sample", *"0123456789"])
    config = tmp_path / "tiny.json"
    config.write_text(
        json.dumps({"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": bert_text(bert)})
    )
    words = f"--train-data a={write_source(tmp_path / 'a', 0, 24, 12)} --batch-size 8 --workers 0 --context-length 40"

    def train(name: str, *more: str, status: int = 0) -> str:
        return launch(
            "ours",
            config,
            [*COMMON, *words.split(), "--name", name, *more],
            cwd=tmp_path,
            status=status,
        ).stderr

    train("whole", "--epochs", "2")
    assert (
        "the text tower has 32 positions, the first 20 are kept"
        in (tmp_path / "logs/whole/out.log").read_text()
    )
    first = tmp_path / "logs" / "whole" / "checkpoints" / "epoch_1.pt"
    train("resumed", "--epochs", "2", "--resume", str(first))
    weights = [state_of(tmp_path, name, 2)["state_dict"] for name in ("whole", "resumed")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert "the shape in current model is torch.Size([50, 32])" in train(
        "other", "--resume", str(first), "--context-length", "50", status=2
    )
    open_clip.add_model_config(config)
    folder = export_local_dir(first, tmp_path / "export")
    assert open_clip.get_tokenizer(f"local-dir:{folder}")([LONG]).shape == (1, 40)
    assert text_positions(open_clip.create_model(f"local-dir:{folder}")) == 40
