"""Conversion: the released key layout, built from tiny timm and BERT towers whose own forward is the reference."""

from __future__ import annotations

import math
from pathlib import Path

import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertModel, BertTokenizer

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.core.errors import UserError
from scripts.paper.convert import convert, convert_checkpoint
from scripts.program import program
from support.tiny_clip import (
    TIMM_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_run,
)

IMAGE_MODEL = "test_vit.r160_in1k"
TEMPERATURE = 0.0173
TOLERANCE = 1e-5  # the bound on L2-normalised embeddings
TEXTS = ["a small red cat", "The BIG round house, with a tree", "moon"]


class Reference:
    """The released model's forward, from timm and transformers alone."""

    def __init__(
        self, bert_folder: Path, image_size_px: int = 160, embed_dim: int = 24, pooler: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.image_encoder = timm.create_model(
            IMAGE_MODEL, num_classes=0, img_size=image_size_px
        ).eval()
        self.text_encoder = BertModel(
            BertConfig.from_pretrained(bert_folder), add_pooling_layer=pooler
        ).eval()
        self.image_projection = torch.nn.Linear(self.image_encoder.embed_dim, embed_dim, bias=False)
        self.text_projection = torch.nn.Linear(32, embed_dim, bias=False)
        self.tokenizer = BertTokenizer.from_pretrained(bert_folder)
        with torch.no_grad():
            for tower in (self.image_encoder, self.text_encoder):
                for parameter in tower.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))

    def state_dict(self) -> dict[str, torch.Tensor]:
        weights = {
            f"image_encoder.model.model.{k}": v for k, v in self.image_encoder.state_dict().items()
        }
        weights |= {
            f"text_encoder.model.model.{k}": v for k, v in self.text_encoder.state_dict().items()
        }
        weights["image_projection.linear.weight"] = self.image_projection.weight.data
        weights["text_projection.linear.weight"] = self.text_projection.weight.data
        weights["loss.temperature"] = torch.tensor(TEMPERATURE)
        return weights

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.tokenizer(
            texts, padding="max_length", max_length=25, truncation=True, return_tensors="pt"
        )
        hidden = self.text_encoder(
            tokens.input_ids, attention_mask=tokens.attention_mask
        ).last_hidden_state
        image = F.normalize(self.image_projection(self.image_encoder(images)), dim=-1)
        return image, F.normalize(self.text_projection(hidden[:, 0]), dim=-1)


def saved(file: Path, weights: dict[str, torch.Tensor], **more: object) -> Path:
    torch.save({"state_dict": weights, **more}, file)
    return file


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return write_bert(tmp_path_factory.mktemp("convert") / "bert")


@torch.no_grad()
def stock(folder: Path, images: torch.Tensor, texts: list[str]):
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    model.eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(texts)
    return (
        model,
        model.encode_image(images, normalize=True),
        model.encode_text(tokens, normalize=True),
    )


@pytest.mark.parametrize(("trained_px", "asked_px"), [(160, None), (96, None), (160, 288)])
def test_a_released_checkpoint_gives_the_same_embeddings_in_stock_open_clip(
    tmp_path, bert, trained_px, asked_px
):
    """At timm's own size (the timm tower), at another, which open_clip's own ViT takes over, and interpolated to a third."""
    reference = Reference(bert, trained_px)
    checkpoint = saved(tmp_path / "released.pth", reference.state_dict(), epoch=20)
    folder = convert_checkpoint(
        checkpoint,
        tmp_path / "out",
        image_model=IMAGE_MODEL,
        text_model=str(bert),
        image_size=asked_px,
        normalization="half",
        verify=True,
    )
    side = asked_px or trained_px
    if asked_px:
        tower = timm.create_model(IMAGE_MODEL, num_classes=0, img_size=side).eval()
        weights = reference.image_encoder.state_dict()
        positions = timm.layers.resample_abs_pos_embed(weights["pos_embed"], [side // 16] * 2)
        tower.load_state_dict(weights | {"pos_embed": positions})
        reference.image_encoder = tower
    images = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(1))
    expected_image, expected_text = reference(images, TEXTS)
    model, image, text = stock(folder, images, TEXTS)
    torch.testing.assert_close(image, expected_image, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(text, expected_text, rtol=0, atol=TOLERANCE)
    assert model.logit_scale.exp().item() == pytest.approx(1 / TEMPERATURE, rel=1e-6)
    assert ("interpolated" in (folder / "README.md").read_text()) == bool(asked_px)
    cfg = model.visual.preprocess_cfg
    assert (list(cfg["mean"]), list(cfg["std"])) == ([0.5] * 3, [0.5] * 3)
    assert model.visual.image_size in (side, (side, side))
    # Negative control: the comparison would see weights that are not the checkpoint's.
    with torch.no_grad():
        reference.image_encoder.norm.weight[0] += 1
        reference.text_encoder.encoder.layer[1].output.LayerNorm.weight[0] += 1
    other_image, other_text = reference(images, TEXTS)
    assert (other_image - image).abs().max() > 100 * TOLERANCE
    assert (other_text - text).abs().max() > 100 * TOLERANCE


def test_what_no_embedding_depends_on_is_left_behind_and_named(tmp_path, bert):
    """BERT's pooler (models that started at random have one), its position index; a temperature that was constant."""
    reference = Reference(bert, pooler=True)
    weights = reference.state_dict()
    weights["text_encoder.model.model.embeddings.position_ids"] = torch.arange(32)[None]
    del weights["loss.temperature"]
    checkpoint = saved(
        tmp_path / "released.pth", {f"module.{key}": value for key, value in weights.items()}
    )
    folder = convert_checkpoint(
        checkpoint, tmp_path / "out", image_model=IMAGE_MODEL, text_model=str(bert), verify=True
    )
    card = (folder / "README.md").read_text()
    for name in ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"):
        assert f"text_encoder.model.model.{name}" in card
    model, _, text = stock(folder, torch.zeros(1, 3, 160, 160), TEXTS)
    torch.testing.assert_close(
        text, reference(torch.zeros(1, 3, 160, 160), TEXTS)[1], rtol=0, atol=TOLERANCE
    )
    assert model.logit_scale.exp().item() == pytest.approx(1 / 0.02, rel=1e-6)


def test_a_timm_run_at_another_size_is_rescued(tmp_path, bert):
    """A model that export refuses, since open_clip cannot rebuild it, is converted to open_clip's own ViT."""
    vision = {**TIMM_VISION, "timm_proj_bias": False}
    name = register(
        tmp_path / "configs", "convert-forced", vision, {**bert_text(bert), "context_length": 25}
    )
    model = random_model(name, force_image_size=128)
    params = {"model": name, "force_image_size": 128}
    checkpoint = write_run(tmp_path / "run", model, params, prefix="_orig_mod.")
    with pytest.raises(UserError, match=r"size mismatch for visual\.trunk\.pos_embed"):
        export_local_dir(checkpoint, tmp_path / "out")
    folder = convert_checkpoint(
        checkpoint,
        tmp_path / "out",
        image_model=name,
        text_model=str(bert),
        image_size=128,
        verify=True,
    )
    images = torch.randn(2, 3, 128, 128, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.encode_image(images, normalize=True)
    torch.testing.assert_close(stock(folder, images, TEXTS)[1], expected, rtol=0, atol=TOLERANCE)


# What is wrong -> (parts of names that leave, tensors that come, the sentence).
REFUSED = {
    "a tensor too many": ((), {"extra_loss.0.queue": 3}, r"1 tensors that are not part of .*extra_loss\.0\.queue"),
    "no norm": (("blocks.0.norm1.bias",), {}, r"is not a test_vit.* 1 names differ \(blocks\.0\.norm1\.bias"),
    "no layer of BERT": (("encoder.layer.0.output.dense.bias",), {}, r'Missing key.*"text\.transformer\.encoder\.layer\.0'),
    "no projection": (("text_projection",), {}, "has no text projection"),
    "other widths": ((), {"text_projection.linear.weight": (8, 32)}, "size mismatch for text.proj.weight"),
    "open_clip's towers": (("",), {"visual.proj": 1}, "are not part of an open_clip model with timm.*zerovl export"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_a_sentence(tmp_path, bert, case):
    without, further, sentence = REFUSED[case]
    weights = Reference(bert).state_dict()
    weights = {key: value for key, value in weights.items() if not any(w in key for w in without)}
    weights |= {key: torch.ones(size) for key, size in further.items()}
    checkpoint = saved(tmp_path / "case.pth", weights)
    towers = {"image_model": IMAGE_MODEL, "text_model": str(bert)}
    with pytest.raises(UserError, match=sentence) as caught:
        convert_checkpoint(checkpoint, tmp_path / "out", **towers)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_the_command_clamps_a_temperature_as_the_released_code_does(tmp_path, bert):
    """A second call replaces nothing unless it is asked to; images are whole patches."""
    weights = {**Reference(bert).state_dict(), "loss.temperature": torch.tensor([0.9])}
    command = [str(saved(tmp_path / "hot.pth", weights)), str(tmp_path / "out")]
    command += ["--image-model", IMAGE_MODEL, "--text-model", str(bert)]
    more = ([], [], ["--force"], ["--force", "--image-size", "100"])
    assert [program(convert, [*command, *words]) for words in more] == [0, 2, 0, 2]
    model = open_clip.create_model(f"local-dir:{tmp_path / 'out'}")
    assert model.logit_scale.item() == pytest.approx(math.log(2), abs=1e-6)
