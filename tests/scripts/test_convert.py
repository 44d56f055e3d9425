"""Conversion: the released key layout, built from tiny timm and BERT towers whose own forward is the reference."""

from __future__ import annotations

import math
from pathlib import Path

import open_clip
import pytest
import timm
import torch

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.core.errors import UserError
from scripts.paper.convert import convert, convert_checkpoint
from scripts.program import program
from support.released import IMAGE_MODEL, TEMPERATURE, Reference, saved
from support.tiny_clip import (
    NATIVE_VISION,
    TIMM_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_run,
)

TOLERANCE = 1e-5  # the bound on L2-normalised embeddings
TEXTS = ["a small red cat", "The BIG round house, with a tree", "moon"]


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


@pytest.mark.parametrize("image_size_px", [160, 96])
def test_a_released_checkpoint_gives_the_same_embeddings_in_stock_open_clip(
    tmp_path, bert, image_size_px
):
    """At timm's own size (the timm tower), and at another, which open_clip's own ViT takes over."""
    reference = Reference(bert, image_size_px)
    checkpoint = saved(tmp_path / "released.pth", reference.state_dict(), epoch=20)
    folder = convert_checkpoint(
        checkpoint,
        tmp_path / "out",
        image_model=IMAGE_MODEL,
        text_model=str(bert),
        normalization="half",
        verify=True,
    )
    images = torch.randn(
        3, 3, image_size_px, image_size_px, generator=torch.Generator().manual_seed(1)
    )
    expected_image, expected_text = reference(images, TEXTS)
    model, image, text = stock(folder, images, TEXTS)
    torch.testing.assert_close(image, expected_image, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(text, expected_text, rtol=0, atol=TOLERANCE)
    assert model.logit_scale.exp().item() == pytest.approx(1 / TEMPERATURE, rel=1e-6)
    cfg = model.visual.preprocess_cfg
    assert (list(cfg["mean"]), list(cfg["std"])) == ([0.5] * 3, [0.5] * 3)
    assert model.visual.image_size in (image_size_px, (image_size_px, image_size_px))
    # As many numbers as the checkpoint has, but for the bias that was added to the positions.
    folded = 0 if image_size_px == 160 else reference.image_encoder.embed_dim
    numbers = sum(value.numel() for value in checkpoint_numbers(checkpoint).values())
    assert sum(value.numel() for value in model.state_dict().values()) == numbers - folded
    # Negative control: the comparison would see weights that are not the checkpoint's.
    with torch.no_grad():
        reference.image_encoder.norm.weight[0] += 1
        reference.text_encoder.encoder.layer[1].output.LayerNorm.weight[0] += 1
    other_image, other_text = reference(images, TEXTS)
    assert (other_image - image).abs().max() > 100 * TOLERANCE
    assert (other_text - text).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("image_size_px", [288, 160])
def test_another_image_size_interpolates_the_position_embedding(tmp_path, bert, image_size_px):
    """160 px weights at 288 px equal timm's own tower of that size; at 160 px nothing is interpolated."""
    reference = Reference(bert)
    checkpoint = saved(tmp_path / "released.pth", reference.state_dict())
    folder = convert_checkpoint(
        checkpoint,
        tmp_path / "out",
        image_model=IMAGE_MODEL,
        text_model=str(bert),
        image_size=image_size_px,
        verify=True,
    )
    resized = timm.create_model(IMAGE_MODEL, num_classes=0, img_size=image_size_px).eval()
    weights = reference.image_encoder.state_dict()
    grid = [image_size_px // 16] * 2
    resized.load_state_dict(
        {**weights, "pos_embed": timm.layers.resample_abs_pos_embed(weights["pos_embed"], grid)}
    )
    reference.image_encoder = resized
    images = torch.randn(
        2, 3, image_size_px, image_size_px, generator=torch.Generator().manual_seed(1)
    )
    model, image, text = stock(folder, images, TEXTS)
    expected_image, expected_text = reference(images, TEXTS)
    torch.testing.assert_close(image, expected_image, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(text, expected_text, rtol=0, atol=TOLERANCE)
    assert model.visual.image_size in (image_size_px, (image_size_px, image_size_px))
    interpolated = "interpolated from 160 px" in (folder / "README.md").read_text()
    assert interpolated == hasattr(model.visual, "positional_embedding") == (image_size_px != 160)


def checkpoint_numbers(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=True)["state_dict"]


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


def test_what_does_not_fit_is_refused_by_a_sentence(tmp_path, bert):
    reference = Reference(bert)
    weights = reference.state_dict()

    def refused(changed: dict[str, torch.Tensor], sentence: str, **options) -> None:
        checkpoint = saved(tmp_path / "case.pth", changed)
        with pytest.raises(UserError, match=sentence) as caught:
            convert_checkpoint(
                checkpoint,
                tmp_path / "out",
                **{"image_model": IMAGE_MODEL, "text_model": str(bert), **options},
            )
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()

    def without(part: str) -> dict[str, torch.Tensor]:
        return {key: value for key, value in weights.items() if part not in key}

    refused(
        {**weights, "extra_loss.0.queue": torch.ones(3)},
        r"1 tensors that are not part of .*extra_loss\.0\.queue",
    )
    refused(
        {**weights, "image_encoder.model.model.pre_logits.fc.weight": torch.ones(3)},
        r"is not a test_vit.*pre_logits",
    )
    refused(
        without("blocks.0.norm1.bias"),
        r"is not a test_vit.* 1 names differ \(blocks\.0\.norm1\.bias",
    )
    refused(
        without("encoder.layer.0.output.dense.bias"),
        r'Missing key.*"text\.transformer\.encoder\.layer\.0\.output',
    )
    refused(without("text_projection"), "has no text projection")
    refused(without("text_encoder"), "has no text$")
    refused(
        {**weights, "text_projection.linear.weight": torch.ones(8, 32)},
        "size mismatch for text.proj.weight",
    )
    refused(
        weights, "--image-size 100 is not a multiple of the patches' 16 px; give 96", image_size=100
    )
    refused(weights, "is not a test_resnet", image_model="test_resnet")
    refused(weights, "is not a vit_tiny", image_model="vit_tiny_patch16_224")
    refused({"visual.proj": torch.ones(1)}, "zerovl export --model NAME")
    native = random_model(
        register(tmp_path / "configs", "convert-native", NATIVE_VISION, bert_text(bert))
    )
    refused(native.state_dict(), "are not part of an open_clip model with timm")


def test_the_command_clamps_a_temperature_as_the_released_code_does(tmp_path, bert, capsys):
    weights = {**Reference(bert).state_dict(), "loss.temperature": torch.tensor([0.9])}
    command = [str(saved(tmp_path / "hot.pth", weights)), str(tmp_path / "out"), "--verify"]
    command += ["--image-model", IMAGE_MODEL, "--text-model", str(bert)]
    statuses = [program(convert, words) for words in (command, command, [*command, "--force"])]
    assert statuses == [0, 2, 0]
    said = capsys.readouterr()
    assert "Converted, verified. Load it with" in said.out and "--force" in said.err
    model = open_clip.create_model(f"local-dir:{tmp_path / 'out'}")
    assert model.logit_scale.item() == pytest.approx(math.log(2), abs=1e-6)
