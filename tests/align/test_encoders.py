"""Towers of encoders: their features are those of the libraries that the encoders come from."""

from __future__ import annotations

import json
import logging
import shutil
import time
from types import SimpleNamespace

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import normalize
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    BertTokenizer,
    DistilBertConfig,
    LlamaConfig,
    MistralConfig,
    MPNetConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    ResNetConfig,
    ViTConfig,
)

from open_clip_zerovl.align.encoders import open_tower
from open_clip_zerovl.align.export import check_together, export_aligned
from open_clip_zerovl.align.train import Heads
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.checkpoints.transformers_folder import preprocess_of
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.models.build import check_model
from open_clip_zerovl.models.text_towers import register_text_towers
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, WORDS, random_model, register, write_run

TEXTS = ["a red house", "the small green tree with a round face of the sun", "cat"]
CPU = torch.device("cpu")


def test_a_folder_of_timm_gives_timms_features(home):
    tower = open_tower(f"timm:{home / 'timm'}", "image")
    stock = timm.create_model(f"local-dir:{home / 'timm'}", pretrained=True, num_classes=0).eval()
    pixels = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        assert torch.equal(tower.module.eval()(pixels), stock(pixels))
    assert (tower.width, tower.preprocess_cfg["size"]) == (64, [160, 160])
    assert tower.preprocess_cfg["mean"] == [0.5, 0.5, 0.5]
    assert not any(key.startswith("head.") for key in tower.tensors)


@pytest.mark.parametrize(
    "settings",
    [
        {"rescale_factor": 1 / 127.5}, {"do_resize": False}, {"do_normalize": False}, {"size": {"shortest_edge": 40}},
        {"size": {"height": 50, "width": 50}, "do_center_crop": True, "crop_size": {"height": 40, "width": 40}},
        {"size": None}, {"resample": 0},
    ],
)  # fmt: skip
def test_an_image_processor_that_open_clip_cannot_follow_is_refused(home, settings):
    processor = AutoImageProcessor.from_pretrained(home / "siglip")
    known = {**processor.to_dict(), "do_center_crop": None, **settings}
    with pytest.raises(
        UserError, match="does not resize bilinearly or bicubically to one size, scale by 1/255"
    ):
        preprocess_of(SimpleNamespace(to_dict=lambda: known))


@pytest.mark.parametrize(
    ("kind", "mode", "interpolation"),
    [("dinov2", "shortest", "bicubic"), ("siglip", "squash", "bilinear")],
)
def test_a_vision_model_of_transformers_gives_its_pooled_output(home, kind, mode, interpolation):
    tower, text = (
        open_tower(f"hf:{home / kind}", "image"),
        open_tower(f"hf:{home / 'bert'}", "text"),
    )
    stock, processor = (
        AutoModel.from_pretrained(home / kind).eval(),
        AutoImageProcessor.from_pretrained(home / kind),
    )
    side = 32 if kind == "dinov2" else 40
    cfg = {
        "size": [side, side],
        "mean": list(processor.image_mean),
        "std": list(processor.image_std),
        "mode": "RGB",
    }
    assert tower.preprocess_cfg == {**cfg, "interpolation": interpolation, "resize_mode": mode}
    pixels = torch.randn(2, 3, side, side)
    with torch.no_grad():
        output = getattr(stock, "vision_model", stock)(pixel_values=pixels)
        assert torch.equal(tower.module(pixels), output.pooler_output)
    check_together(tower, text)
    mean = open_tower(f"hf:{home / 'bert-mean'}", "text")
    with pytest.raises(
        UserError,
        match=r"open_clip has no image tower such as hf:.*MeanPooler.*give .* with CLS pooling",
    ):
        check_together(tower, mean)


def test_a_vision_model_that_lacks_weights_or_a_pooled_vector_is_refused(home, tmp_path):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    vit = ViTConfig(image_size=40, patch_size=8, **sizes)
    resnet = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    for config, more, sentence in (
        (vit, {"add_pooling_layer": False}, r"holds no weights of pooler\.dense\.bias"),
        (resnet, {}, "a resnet, pools no vector of its pictures"),
    ):
        folder = tmp_path / config.model_type
        (type(AutoModel.from_config(config))(config, **more)).save_pretrained(folder)
        shutil.copy(home / "siglip" / "preprocessor_config.json", folder)
        with pytest.raises(UserError, match=sentence):
            open_tower(f"hf:{folder}", "image")


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_a_sentence_transformer_is_pooled_as_it_says_itself(home, tmp_path, pool):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    words = Transformer(str(home / "bert"), max_seq_length=20)
    model = SentenceTransformer(
        modules=[words, Pooling(words.get_word_embedding_dimension(), pooling_mode=pool)]
    )
    model.save(str(tmp_path / "st"))
    tower = open_tower(f"hf:{tmp_path / 'st'}", "text")
    assert tower.tokenizer.context_length == 20
    expected = model.encode(TEXTS, convert_to_tensor=True).cpu()
    found = tower.frozen(CPU).texts(TEXTS)  # cut to the longest of the batch
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    with torch.no_grad():  # and as the exported model computes them, with all padding
        assert torch.allclose(tower.module(tower.tokenizer(TEXTS)), expected, rtol=0, atol=1e-5)


SENTENCE = "sentence_transformers.models."


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("modules.json", [{"type": f"{SENTENCE}Transformer", "path": ""}], None),
        ("modules.json", [{"type": f"{SENTENCE}Transformer", "path": "0_Transformer"}], "its model in 0_Transformer"),
        ("modules.json", [{"type": f"{SENTENCE}Dense", "path": "2_Dense"}], "has a layer Dense"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "in lower case"),
        ("config_sentence_transformers.json", {"prompts": {"q": "query: "}, "default_prompt_name": "q"}, "the prompt"),
        ("config_sentence_transformers.json", {"prompts": {"q": "query: "}}, None),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, None),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "by weightedmean, .* by cls or mean or lasttoken"),
    ],
)  # fmt: skip
def test_settings_that_change_embeddings_are_taken_or_refused_by_name(
    home, tmp_path, file, content, sentence
):
    folder = tmp_path / "encoder"
    shutil.copytree(home / "bert-mean", folder)
    (folder / file).write_text(json.dumps(content))
    if sentence is None:
        assert open_tower(f"hf:{folder}", "text").cfg["hf_pooler_type"] == "mean_pooler"
        return
    with pytest.raises(UserError, match=sentence):
        open_tower(f"hf:{folder}", "text")


def write_decoder(folder, config, *, padding, side="left"):
    """A decoder whose tokenizer ends each text with `</s>`, as those of released embedders do."""
    tokens = {token: number for number, token in enumerate(("<unk>", "</s>", "<pad>", *WORDS))}
    words = Tokenizer(WordLevel(tokens, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    named = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": padding, "padding_side": side}
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=20, **named).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "vocab_size": len(tokens),
        "eos_token_id": 1,
    }
    AutoModel.from_config(config(**sizes, pad_token_id=None)).save_pretrained(folder)
    if side == "left":  # else the pooling is that of all decoders
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"pooling_mode_lasttoken": True})
        )
    return folder


@pytest.mark.parametrize(
    ("config", "padding", "side"),
    [(Qwen2Config, "</s>", "left"), (LlamaConfig, None, "right"), (MistralConfig, "<pad>", "left")],
)
def test_a_decoder_gives_the_last_state_of_each_text_alone_without_padding(
    home, tmp_path, config, padding, side
):
    """Its padding is the token that ends a text, none, or a token of its own. In fp64; the exported model in fp32."""
    folder = write_decoder(tmp_path / "decoder", config, padding=padding, side=side)
    stock, words = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    text = open_tower(f"hf:{folder}", "text")
    assert text.cfg["hf_pooler_type"] == "last_token_pooler" and text.tokenizer.context_length == 20
    tokens, pad = text.tokenizer(TEXTS), text.tokenizer.tokenizer.pad_token_id
    assert (tokens[:, -1] == pad).all() and (tokens[:, 0] != pad).all()
    before = torch.stack([row.roll(int((row == pad).sum())) for row in tokens])
    with torch.no_grad():
        states = [
            stock.double()(torch.tensor([words(one).input_ids])).last_hidden_state for one in TEXTS
        ]
        alone = torch.stack([of_text[0, -1] for of_text in states])
        fp32 = text.frozen(CPU).texts(TEXTS)
        again = open_tower(f"hf:{folder}", "text").frozen(CPU)
        text.module.double()
        found, padded_before = text.module(tokens), text.module(before)
        text.module.float()
    assert torch.allclose(found, alone, rtol=0, atol=1e-12)
    assert torch.allclose(padded_before, alone, rtol=0, atol=1e-5)  # rotary positions are fp32
    assert torch.allclose(fp32.double(), alone, rtol=0, atol=1e-5)
    assert again.fingerprints == text.frozen(CPU).fingerprints  # rows are found again
    image = open_tower(f"timm:{home / 'timm'}", "image")
    heads = Heads((image.width, text.width), 12)
    out = export_aligned(tmp_path / "out", image, text, heads, (1.0, 1.0), metrics={})
    model, _, tokenizer = load_model(out)
    with torch.no_grad():
        assert torch.allclose(
            model.encode_text(tokenizer(TEXTS)).double(),
            heads.text.double()(alone),
            rtol=0,
            atol=1e-5,
        )
    if padding != "<pad>":
        with pytest.raises(
            UserError,
            match=r"a decoder without a padding token of its own.*zerovl align --text hf:",
        ):
            check_model("zerovl-ViT-B-16-BERT-base", text_model=folder)
    check_model("zerovl-ViT-B-16-BERT-base", text_model=out, context_length=20)


def test_an_encoder_stored_in_half_precision_computes_in_float32(home, tmp_path):
    folder = shutil.copytree(home / "bert", tmp_path / "half")
    AutoModel.from_pretrained(home / "bert").bfloat16().save_pretrained(folder)
    tower = open_tower(f"hf:{folder}", "text")
    assert {p.dtype for p in tower.module.parameters()} == {torch.float32}


def test_towers_of_an_open_clip_model_give_its_features_before_the_projection(home):
    checkpoint = str(home / "native" / "checkpoints" / "epoch_1.pt")
    model, _, tokenizer = load_model(checkpoint)
    image, text = open_tower(checkpoint, "image"), open_tower(checkpoint, "text")
    assert (image.kind, text.kind, image.width, text.width) == ("vit", "clip", 32, 32)
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(
            image.module(pixels) @ model.visual.proj, model.encode_image(pixels), rtol=0, atol=1e-6
        )
        features = text.frozen(CPU).texts(TEXTS) @ model.text_projection
        assert torch.allclose(features, model.encode_text(tokenizer(TEXTS)), rtol=0, atol=1e-5)
    assert not torch.allclose(
        features.norm(dim=1), normalize(features).norm(dim=1)
    )  # of their own length
    assert "proj" not in image.tensors and "text_projection" not in text.tensors


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_of_a_file_are_those_of_timms_network(tmp_path, suffix):
    """With the classifier, as timm and torchvision publish them."""
    torch.manual_seed(3)
    stock = timm.create_model("test_vit.r160_in1k", num_classes=7).eval()
    file = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(stock.state_dict(), file)
    else:
        save_file(stock.state_dict(), file)
    tower = open_tower(f"timm:test_vit.r160_in1k,{file}", "image")
    pixels = torch.randn(2, 3, *tower.size)
    with torch.no_grad():
        expected = stock.forward_head(stock.forward_features(pixels), pre_logits=True)
        assert torch.equal(tower.module(pixels), expected)
    with pytest.raises(RuntimeError, match="state_dict"):  # none stays random
        open_tower(f"timm:resnet18,{file}", "image")


@pytest.mark.parametrize("kind", ["mpnet", "distilbert"])
def test_sentence_encoders_that_open_clip_has_no_entry_for_are_built(home, tmp_path, kind):
    folder = tmp_path / kind
    pad, unknown, *words = (home / "bert" / "vocab.txt").read_text().splitlines()
    (tmp_path / "vocab.txt").write_text("\n".join([unknown, pad, *words]) + "\n")
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(folder)
    common = {"vocab_size": 100, "max_position_embeddings": 30, "pad_token_id": 1}  # as MPNet's
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    small = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    config = (
        MPNetConfig(**common, **sizes) if kind == "mpnet" else DistilBertConfig(**common, **small)
    )
    torch.manual_seed(0)
    stock = AutoModel.from_config(config)
    stock.save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    text = open_tower(f"hf:{folder}", "text")
    assert text.tokenizer.context_length == (
        28 if kind == "mpnet" else 30
    )  # MPNet's positions begin after the padding token's number
    inputs = text.tokenizer.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = stock.eval()(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    expected = (states * mask).sum(dim=1) / mask.sum(dim=1)
    assert torch.allclose(text.frozen(CPU).texts(TEXTS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "side", "options", "sentence"),
    [
        ("timm:{home}/timm", "text", {}, "is an image encoder of timm; give it as --image"),
        (
            "hf:{home}/bert",
            "text",
            {"context_length": 99},
            "--context-length 99: .* has 32 positions",
        ),
        ("{home}/nowhere", "image", {}, "is not a model; give a folder"),
        (
            "{home}/native/checkpoints/epoch_1.pt",
            "text",
            {"context_length": 9},
            "--context-length is of hf: encoders",
        ),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused(home, name, side, options, sentence):
    with pytest.raises(UserError, match=sentence):
        open_tower(name.format(home=home), side, **options)


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "hf:no-owner/no-model"])
def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch, caplog, name):
    """Each request would be repeated for half a minute with pauses."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # no server
    with pytest.raises(OSError):  # the boundary makes a sentence of it
        open_tower(name, "text" if name.startswith("hf") else "image")
    assert slept == [] and not constants.HF_HUB_OFFLINE
    assert "http://127.0.0.1:9 cannot be reached" in caplog.text


def test_transformers_reports_missing_weights_and_no_unused_ones(home):
    register_text_towers()
    handler = logging.getLogger("transformers").handlers[0]
    for text, shown in (("pooler UNEXPECTED", False), ("pooler UNEXPECTED | layer MISSING", True)):
        record = logging.LogRecord("transformers.x", logging.WARNING, "", 0, text, None, None)
        assert bool(handler.filter(record)) == shown


def test_a_pair_that_open_clip_has_no_place_for_is_refused(home, tmp_path):
    checkpoint = str(home / "native" / "checkpoints" / "epoch_1.pt")
    native = open_tower(checkpoint, "image")
    register(tmp_path / "configs", "align-quick", NATIVE_VISION, CLIP_TEXT, quick_gelu=True)
    run = write_run(tmp_path / "quick", random_model("align-quick"), {"model": "align-quick"})
    quick = open_tower(str(run), "text")
    with pytest.raises(UserError, match="was trained with QuickGELU and .* without"):
        check_together(native, quick)
    check_together(open_tower(f"timm:{home / 'timm'}", "image"), quick)
