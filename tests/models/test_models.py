"""The registered model configs build as in the paper, and open_clip's silent traps end with a sentence.

`--model-config FILE.json`: one's own model in training, plan, evaluation and export.
"""

import json
import math
import shutil
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import open_clip
import pytest
import timm
import torch
import transformers
from huggingface_hub import constants
from open_clip.factory import get_model_config
from open_clip.tokenizer import HFTokenizer
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

from open_clip_zerovl.align.encoders import SMALL_IMAGE
from open_clip_zerovl.checkpoints.loading import MODEL_ENTRY, load_model, spec_of
from open_clip_zerovl.checkpoints.weights import load_pretrained_tower
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.models import configs as models
from open_clip_zerovl.models.build import (
    check_model,
    create_model_and_transforms,
    pretrained_text_of,
    with_text_model,
)
from scripts.drawn.make import write_bert
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, random_model, write_run
from training.params import parse

PAPER = ("zerovl-ViT-B-16-BERT-base", "zerovl-ViT-B-32-BERT-base", "zerovl-ViT-S-16-BERT-base")
CAPTIONS = ["a red car on a road", "two dogs in the snow", "the moon above a tower"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The folder of a small BERT without weights."""
    folder = tmp_path_factory.mktemp("text") / "bert"
    write_bert(folder, CAPTIONS, vocab_size=200)
    return folder


@pytest.fixture
def bert_with_weights(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "bert")
    torch.manual_seed(1)
    BertModel(BertConfig.from_pretrained(folder), add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory, bert):
    """A registered model of the paper's layout with a timm ViT of 0.4 M parameters."""
    config = get_model_config(PAPER[0])
    config["vision_cfg"].update(
        timm_model_name="test_vit", timm_model_pretrained=False, image_size=160
    )
    config["text_cfg"].update(
        hf_model_name=str(bert), hf_tokenizer_name=str(bert), hf_model_pretrained=False
    )
    file = tmp_path_factory.mktemp("configs") / "zerovl-test-small.json"
    file.write_text(json.dumps(config))
    open_clip.add_model_config(file)
    return file.stem


# --- the configs -----------------------------------------------------------------------------------------------------


def test_importing_the_package_registers_its_configs_and_again_is_harmless():
    before = open_clip.list_models()
    assert {*PAPER, "zerovl-emoji"} <= set(models.register_model_configs()) <= set(before)
    assert open_clip.list_models() == before


@pytest.mark.parametrize(
    ("name", "tag"), zip(PAPER, ("base_patch16", "base_patch32", "small_patch16"), strict=True)
)
def test_the_paper_configs_name_the_pretrained_towers(name, tag):
    config = get_model_config(name)
    vision, text = config["vision_cfg"], config["text_cfg"]
    assert (
        vision["timm_model_name"] == f"vit_{tag}_224.augreg_in21k"
        and vision["timm_model_pretrained"]
    )
    assert vision["timm_model_name"] in timm.list_models(pretrained=True)
    assert (
        text["hf_model_name"] == text["hf_tokenizer_name"] == "bert-base-uncased"
        and text["hf_model_pretrained"]
    )
    assert math.exp(-config["init_logit_scale"]) == pytest.approx(0.02, rel=1e-6)


@pytest.mark.parametrize(("name", "pixels"), [(PAPER[2], 224), ("zerovl-emoji", 32)])
def test_the_configs_build_as_the_paper_says(name, pixels, bert, caplog):
    model, _, _ = create_model_and_transforms(with_text_model(name, bert))
    assert ("image tower starts at random" in caplog.text) == (name in PAPER)
    tokenizer = open_clip.get_tokenizer(with_text_model(name, bert))
    model.eval()
    assert isinstance(tokenizer, HFTokenizer)
    tokens = tokenizer(CAPTIONS)
    assert tokens.shape == (3, 25)
    assert float(model.logit_scale.detach().exp()) == pytest.approx(50, rel=1e-6)
    assert tuple(model.visual.preprocess_cfg["size"]) == (pixels, pixels)

    images = torch.randn(2, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        image_features, text_features = model.encode_image(images), model.encode_text(tokens)
        # Raw [CLS], then one linear map without bias.
        hidden = model.text.transformer(
            input_ids=tokens, attention_mask=(tokens != 0).long()
        ).last_hidden_state
        torch.testing.assert_close(
            text_features, hidden[:, 0] @ model.text.proj.weight.T, rtol=0, atol=1e-6
        )
        if name in PAPER:
            token = model.visual.trunk.forward_features(images)[:, 0]
            torch.testing.assert_close(
                image_features, token @ model.visual.head.proj.weight.T, rtol=0, atol=1e-4
            )
    width = 512 if name in PAPER else get_model_config(name)["embed_dim"]
    assert image_features.shape == (2, width) and text_features.shape == (3, width)
    assert model.text.proj.bias is None
    if name == "zerovl-emoji":
        assert sum(parameter.numel() for parameter in model.visual.parameters()) < 1_000_000
        dropouts = {m.p for m in model.text.modules() if isinstance(m, torch.nn.Dropout)}
        assert dropouts == {0.1}  # the demo's text tower has dropout, as BERT has


# --- another text tower ----------------------------------------------------------------------------------------------


def test_with_text_model_is_idempotent_and_leaves_the_model_alone(bert, monkeypatch):
    before = get_model_config("zerovl-emoji")
    name = with_text_model("zerovl-emoji", bert)
    count = len(open_clip.list_models())
    assert (
        with_text_model("zerovl-emoji", str(bert)) == name and len(open_clip.list_models()) == count
    )
    monkeypatch.chdir(bert.parent)
    assert (
        with_text_model("zerovl-emoji", "./bert") == name
    )  # a relative folder is kept as an absolute one
    assert get_model_config("zerovl-emoji") == before
    derived = get_model_config(name)
    assert (
        derived["text_cfg"]["hf_model_name"]
        == derived["text_cfg"]["hf_tokenizer_name"]
        == str(bert.resolve())
    )
    assert derived["vision_cfg"] == before["vision_cfg"] and "/" not in name
    monkeypatch.setattr(
        constants, "HF_HUB_OFFLINE", False
    )  # a hub id is taken on trust; nothing is downloaded
    assert with_text_model("zerovl-emoji", "org/some-bert") != name


def test_a_folder_with_weights_loads_them_and_one_without_logs_a_random_start(
    bert, bert_with_weights, small, caplog
):
    name = with_text_model(small, bert_with_weights)
    assert pretrained_text_of(name)
    model, _, _ = create_model_and_transforms(name)
    expected = BertModel.from_pretrained(bert_with_weights).state_dict()
    for key, value in model.text.transformer.state_dict().items():
        assert torch.equal(value, expected[key])

    assert not pretrained_text_of(with_text_model(PAPER[2], bert))
    assert "its text tower starts at random" in caplog.text


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "zerovl-ViT-B-16-BERT",
            "open_clip knows no model 'zerovl-ViT-B-16-BERT'; did you mean zerovl-ViT-B-16-BERT-base",
        ),
        ("zerovl-ViT-B/16-BERT-base", "write zerovl-ViT-B-16-BERT-base .* CLIP's BPE tokenizer"),
    ],
)
def test_a_name_that_is_not_registered_ends_with_a_sentence(name, words):
    with pytest.raises(UserError, match=words):
        check_model(name)
    # The silent alternative: CLIP's BPE tokenizer.
    assert isinstance(open_clip.get_tokenizer(name), open_clip.SimpleTokenizer)


def test_text_models_that_cannot_serve_are_refused(bert, small, tmp_path, monkeypatch):
    def broken(name, **config):
        folder = shutil.copytree(bert, tmp_path / name)
        whole = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**whole, **config}))
        return folder

    monkeypatch.chdir(bert.parent)
    unnamed = get_model_config(PAPER[2])
    unnamed["text_cfg"] = {"hf_model_name": str(bert)}
    (tmp_path / "zerovl-test-unnamed.json").write_text(json.dumps(unnamed))
    open_clip.add_model_config(tmp_path / "zerovl-test-unnamed.json")
    no_tokenizer = broken("no-tokenizer")
    (no_tokenizer / "vocab.txt").unlink()
    for name, source, words in (
        (small, broken("word", vocab_size="many"), "give the config of an HF text tower"),
        (small, "./brt", r"folder ./brt does not exist \(seen from .*\)$"),
        (small, no_tokenizer, "holds no tokenizer"),
        (small, broken("gpt", model_type="gpt9"), "a model of type 'gpt9'"),
        (small, broken("vocabulary", vocab_size=7), "the tower only 7"),
        (small, broken("short", max_position_embeddings=16), "16 positions, fewer than the 25"),
        ("zerovl-test-unnamed", None, "no hf_tokenizer_name"),
        ("zerovl-emoji", None, "data/emoji/bert does not exist .*`python -m scripts.drawn emoji"),
        ("ViT-B-32", bert, "own text tower"),
        ("local-dir:/somewhere", bert, "has its own text tower"),
    ):
        with pytest.raises(UserError, match=words):
            check_model(name, text_model=source)
    with pytest.raises(UserError, match="no ImageNet weights"):
        check_model("ViT-B-32", pretrained_image=True)


# --- weights of one tower --------------------------------------------------------------------------------------------


def raw_image_weights():
    torch.manual_seed(2)
    return timm.create_model("test_vit", num_classes=10).state_dict()


def test_raw_timm_weights_load_whole_where_open_clip_loads_nothing(small, tmp_path):
    raw = raw_image_weights()
    torch.save(raw, tmp_path / "raw.pt")
    save_file(raw, tmp_path / "raw.safetensors")

    stock, _, _ = create_model_and_transforms(small, pretrained_image_path=str(tmp_path / "raw.pt"))
    trunk = stock.visual.trunk.state_dict()
    assert not torch.equal(
        trunk["patch_embed.proj.weight"], raw["patch_embed.proj.weight"]
    )  # the trap, silent

    for file in ("raw.pt", "raw.safetensors"):
        model, _, _ = create_model_and_transforms(small)
        head = model.visual.head.proj.weight.clone()
        done = load_pretrained_tower(model, "image", tmp_path / file)
        assert done.loaded == len(trunk) and set(done.unused) == {"head.weight", "head.bias"}
        assert all(
            torch.equal(value, raw[key]) for key, value in model.visual.trunk.state_dict().items()
        )
        assert torch.equal(model.visual.head.proj.weight, head)


def test_raw_bert_weights_load_under_the_names_in_use(small, bert, tmp_path):
    torch.manual_seed(3)
    source = BertForMaskedLM(BertConfig.from_pretrained(bert))
    whole = source.state_dict()
    old_names = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): v
        for k, v in whole.items()
    }
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save(old_names, folder / "pytorch_model.bin")
    model, _, _ = create_model_and_transforms(small)
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}},
        tmp_path / "epoch_1.pt",
    )

    done = load_pretrained_tower(model, "text", folder)
    assert all(key.startswith("cls.") for key in done.unused)
    for key, value in model.text.transformer.state_dict().items():
        assert torch.equal(value, whole[f"bert.{key}"])
    # And back from a training checkpoint.
    load_pretrained_tower(model, "text", tmp_path / "epoch_1.pt")
    assert not torch.equal(
        model.text.transformer.embeddings.word_embeddings.weight,
        whole["bert.embeddings.word_embeddings.weight"],
    )


def test_tower_weights_that_do_not_fit_get_a_sentence(small, tmp_path):
    model, _, _ = create_model_and_transforms(small)
    raw = raw_image_weights()
    raw.pop("norm.bias")
    torch.save(raw, tmp_path / "short.pt")
    with pytest.raises(UserError, match='Missing key.* "norm.bias"'):
        load_pretrained_tower(model, "image", tmp_path / "short.pt")
    with pytest.raises(UserError, match="is not a HF model"):
        load_pretrained_tower(open_clip.create_model("ViT-S-32-alt"), "text", tmp_path / "short.pt")


@pytest.mark.parametrize("fault", [None, "number", "side", "unigram"])
def test_a_tokenizer_that_does_not_fit_its_tower_is_refused(tmp_path, fault):
    """One text at two lengths had two embeddings: padding was read as text. Pieces without embeddings raised IndexError."""
    folder = tmp_path / "bert"
    write_bert(folder, ["a cat", "a dog on grass"])
    sentence = ""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if fault == "number":
        sentence = "pads with the number 0, and the tower takes 3 for padding"
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 3}))
    elif fault == "side":
        sentence = "pads before the text"
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
        tokenizer.save_pretrained(folder)
    elif fault == "unigram":
        sentence = "tokens, the tower only"
        tokenizer.save_pretrained(folder)
        content = json.loads((folder / "tokenizer.json").read_text())
        pieces = [[f"p{n}", -1.0] for n in range(5000)]
        content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    text_cfg = dict.fromkeys(("hf_model_name", "hf_tokenizer_name"), str(folder))
    model_cfg = {"embed_dim": 8, "vision_cfg": SMALL_IMAGE}
    model_cfg["text_cfg"] = {**text_cfg, "context_length": 16}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": model_cfg}))
    for check in (
        lambda: check_model("zerovl-emoji", text_model=folder),
        lambda: check_model(f"local-dir:{folder}"),
        lambda: spec_of(folder),
    ):
        with pytest.raises(UserError, match=sentence) if fault else nullcontext():
            check()


# --- a model of one's own --------------------------------------------------------------------------------------------

CONFIG = {
    "embed_dim": 24,
    "vision_cfg": NATIVE_VISION,
    "text_cfg": {**CLIP_TEXT, "vocab_size": 49408},
}
TEXTS = torch.arange(1, 33).reshape(2, 16)


def write(file: Path, config: object = CONFIG) -> Path:
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return file


def with_config(checkpoint: Path, config: dict) -> Path:
    """Write the entry by which training keeps the config in a checkpoint."""
    content = torch.load(checkpoint, weights_only=True)
    torch.save({**content, MODEL_ENTRY: config}, checkpoint)
    return checkpoint


def test_training_takes_the_file_in_place_of_a_name(tmp_path, monkeypatch):
    write(tmp_path / "own-training.json")
    monkeypatch.chdir(tmp_path)
    args, config = parse(["--model-config", "own-training.json", "--train-data", "a=/nowhere"])
    assert args.model == "own-training" and config.model_config == args.model_config == str(
        tmp_path / "own-training.json"
    )
    words = ["--model", "ViT-B-32", "--model-config", "own-training.json", "--train-data", "a=/x"]
    with pytest.raises(UserError, match="--model ViT-B-32 and --model-config .* are two models"):
        parse(words)


def test_evaluation_and_export_find_the_runs_config_or_take_a_file(tmp_path, capsys):
    """As in another process: the name is not registered there."""
    file = write(tmp_path / "own-run.json")
    models.register_model_file(file)
    model = random_model("own-run")
    run = {"model": "own-found", "model_config": file.with_name("own-found.json")}
    checkpoint = write_run(tmp_path / "run", model, run)
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "knows no model 'own-found'" in capsys.readouterr().err
    write(tmp_path / "own-given.json")
    given = ["--model", str(tmp_path / "own-given.json")]
    assert main(["export", str(checkpoint), str(tmp_path / "given"), *given]) == 0
    with_config(checkpoint, CONFIG)
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    held = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())["model_cfg"]
    assert held["vision_cfg"]["width"] == NATIVE_VISION["width"]
    for source in (tmp_path / "given", tmp_path / "out", checkpoint):
        assert torch.equal(load_model(source)[0].visual.proj, model.visual.proj)


def test_two_runs_whose_files_have_one_name_keep_their_own_models(tmp_path):
    """In one process, as for `zerovl compare`: both fit the same tensors, and differ in their heads."""
    other = deepcopy(CONFIG)
    other["text_cfg"]["heads"] *= 2
    checkpoints, wanted = [], []
    for name, config in (("a", CONFIG), ("b", other)):
        model = random_model(
            models.register_model_file(write(tmp_path / f"heads-{name}.json", config))
        )
        params = {"model": "heads", "model_config": "heads.json"}
        checkpoints.append(with_config(write_run(tmp_path / name, model, params), config))
        wanted.append(model.eval().encode_text(TEXTS))
    for checkpoint, embeddings in zip(
        [*checkpoints, checkpoints[0]], [*wanted, wanted[0]], strict=True
    ):
        assert torch.equal(load_model(checkpoint)[0].encode_text(TEXTS), embeddings)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("bad-empty.json", {}, "needs embed_dim, vision_cfg and text_cfg"),
        ("ViT-B-32.json", CONFIG, "there is another model called ViT-B-32"),
    ],
)
def test_a_file_that_is_not_a_model_gives_a_sentence(tmp_path, name, config, words):
    with pytest.raises(UserError, match=words) as caught:
        models.register_model_file(write(tmp_path / name, config))
    assert "\n" not in str(caught.value)
