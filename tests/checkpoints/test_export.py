"""Export and loading: what training leaves behind opens in stock open_clip, in a process that does not know us."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError

from open_clip_zerovl.checkpoints import export as export_module
from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.loading import load_model, read_model_spec
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from support import warm
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    TIMM_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_run,
)

EMBEDDING = 1e-6  # largest difference of an embedding's entry, the bound
TEXTS = ["a small red cat", "The BIG round house, with a tree", "xyz 猫"]

# Run by a bare interpreter: open_clip alone, no network. It prints the embeddings of a given image and texts.
STRANGER = """
import json, sys
import open_clip, torch
from PIL import Image
folder, image, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model, _, preprocess = open_clip.create_model_and_transforms("local-dir:" + folder)
tokenizer = open_clip.get_tokenizer("local-dir:" + folder)
assert not any(name.startswith("open_clip_zerovl") for name in sys.modules)
model.eval()
with torch.no_grad():
    image = model.encode_image(preprocess(Image.open(image))[None])
    text = model.encode_text(tokenizer(texts))
print(json.dumps({"image": image.tolist(), "text": text.tolist(), "scale": float(model.logit_scale)}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Registered models: `native-bert`, `timm-bert`, `native-clip`, and an image."""
    home = tmp_path_factory.mktemp("home")
    bert = write_bert(home / "bert")
    register(home / "configs", "native-bert", NATIVE_VISION, bert_text(bert), init_logit_scale=3.9)
    register(home / "configs", "timm-bert", TIMM_VISION, bert_text(bert))
    register(home / "configs", "native-clip", NATIVE_VISION, CLIP_TEXT)
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(home / "image.png")
    return home


def embeddings(model, preprocess, tokenizer, image: Path) -> dict[str, torch.Tensor]:
    model.eval()
    with torch.no_grad():
        return {
            "image": model.encode_image(preprocess(Image.open(image))[None]),
            "text": model.encode_text(tokenizer(TEXTS)),
        }


# slow: a process of imports each
@pytest.mark.parametrize(
    "name",
    [
        "timm-bert",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("native-bert", "native-clip")),
    ],
)
def test_a_stranger_loads_the_export_and_sees_the_same_embeddings(tmp_path, home, name):
    model = random_model(name)
    params = {
        "model": name,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": None,
        "image_resize_mode": "squash",
    }
    checkpoint = write_run(tmp_path / "run", model, params, prefix="module.")
    folder = export_local_dir(checkpoint, tmp_path / "export")
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()}
    assert len(set(modes.values())) == 1, (
        modes
    )  # the weights, too, are readable for whom the config is

    # The training process itself would have computed this.
    _, _, preprocess = open_clip.create_model_and_transforms(
        name, pretrained_text=False, image_mean=(0.1, 0.2, 0.3), image_resize_mode="squash"
    )
    expected = embeddings(model, preprocess, open_clip.get_tokenizer(name), home / "image.png")

    # The run, its checkpoint and the text tower's folder are out of reach, the hub too; only the export is there.
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "no-cache"),
        "PYTHONPATH": "",
    }
    shutil.move(tmp_path / "run", tmp_path / "hidden")
    shutil.move(home / "bert", home / "hidden-bert")
    try:
        done = subprocess.run(
            [
                warm.python(),
                "-c",
                STRANGER,
                str(folder),
                str(home / "image.png"),
                json.dumps(TEXTS),
            ],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        shutil.move(home / "hidden-bert", home / "bert")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for tower in ("image", "text"):
        assert torch.allclose(torch.tensor(found[tower]), expected[tower], rtol=0, atol=EMBEDDING)
    assert found["scale"] == pytest.approx(model.logit_scale.item(), abs=1e-7)

    # Negative control: the comparison would see another model's weights.
    other = embeddings(
        random_model(name, seed=1), preprocess, open_clip.get_tokenizer(name), home / "image.png"
    )
    assert not torch.allclose(other["image"], expected["image"], atol=1e-2)
    assert not torch.allclose(other["text"], expected["text"], atol=1e-2)


def test_arguments_of_the_run_reach_the_export(tmp_path, home):
    """Each `params.txt` entry that changes the model or its preprocessing."""
    forced = {
        "force_image_size": 48,
        "force_quick_gelu": True,
        "force_custom_text": True,
        "force_context_length": 20,
    }
    siglip = {"init_logit_scale": float(np.log(10)), "init_logit_bias": -10}
    model = random_model("native-clip", **forced, **siglip)
    params = {
        **forced,
        "force_image_size": [48],
        "force_patch_dropout": 0.5,
        "model": "native-clip",
        "siglip": True,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": (0.2, 0.2, 0.2),
        "image_interpolation": "bilinear",
        "image_resize_mode": "longest",
        "logs": "/somewhere: else",
    }
    checkpoint = write_run(tmp_path / "run", model, params)
    spec = read_model_spec(checkpoint)
    assert "patch_dropout" not in spec.model_cfg["vision_cfg"]  # of the training, not of the model

    folder = export_local_dir(checkpoint, tmp_path / "export")
    stock, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    assert type(stock) is type(model)
    assert stock.visual.image_size == (48, 48)
    assert stock.logit_bias.item() == pytest.approx(model.logit_bias.item())
    assert open_clip.get_tokenizer(f"local-dir:{folder}")(TEXTS).shape == (3, 20)
    cfg = stock.visual.preprocess_cfg
    assert (list(cfg["mean"]), list(cfg["std"])) == ([0.5, 0.4, 0.3], [0.2, 0.2, 0.2])
    assert (cfg["interpolation"], cfg["resize_mode"]) == ("bilinear", "longest")
    model.eval()
    stock.eval()
    image, tokens = torch.randn(2, 3, 48, 48), torch.randint(1, 400, (2, 20))
    with torch.no_grad():
        assert torch.allclose(
            stock.encode_image(image), model.encode_image(image), rtol=0, atol=EMBEDDING
        )
        assert torch.allclose(
            stock.encode_text(tokens), model.encode_text(tokens), rtol=0, atol=EMBEDDING
        )


def test_a_pretrained_tags_preprocessing_is_kept(tmp_path):
    """A run that started from a tag normalises as the tag does, not as open_clip's default; a flag outranks the tag."""
    (tmp_path / "params.txt").write_text(
        "model: ViT-B-16-SigLIP\npretrained: webli\nimage_std: [0.1, 0.2, 0.3]\n"
    )
    cfg = read_model_spec(tmp_path / "checkpoints" / "epoch_1.pt").preprocess_cfg
    assert tuple(cfg["mean"]) == (0.5, 0.5, 0.5)
    assert cfg["resize_mode"] == "squash"
    assert cfg["std"] == [0.1, 0.2, 0.3]


def test_the_text_towers_folder_may_be_given(tmp_path, home):
    """`--text-model` of the run, or of the export where the folder has moved."""
    bert = write_bert(tmp_path / "other-bert", words=["only", "three", "words"])
    register(tmp_path / "configs", "moved-bert", NATIVE_VISION, bert_text(bert))
    model = random_model("moved-bert")
    checkpoint = write_run(tmp_path / "run", model, {"model": "native-bert", "text_model": bert})
    for folder, text_model in (("a", None), ("b", bert)):
        export = export_local_dir(
            checkpoint, tmp_path / folder, text_model=text_model and str(text_model)
        )
        tokens = open_clip.get_tokenizer(f"local-dir:{export}")(TEXTS)
        assert torch.equal(tokens, open_clip.get_tokenizer("moved-bert")(TEXTS))
    with pytest.raises(UserError, match=r"text\.transformer\.embeddings\.word_embeddings\.weight"):
        export_local_dir(checkpoint, tmp_path / "c", text_model=str(home / "bert"))


def test_half_precision_weights_load_as_float32(tmp_path, home):
    checkpoint = write_run(tmp_path / "run", random_model("native-clip"), {"model": "native-clip"})
    half = tmp_path / "half"
    assert main(["export", str(checkpoint), str(half), "--fp16"]) == 0
    whole = export_local_dir(checkpoint, tmp_path / "whole")
    reference = open_clip.create_model(f"local-dir:{whole}").state_dict()
    for key, value in open_clip.create_model(f"local-dir:{half}").state_dict().items():
        assert value.dtype == reference[key].dtype
        assert torch.equal(value, reference[key].half().to(value.dtype))


def test_an_existing_folder_is_only_replaced_on_demand(tmp_path, home):
    params = {"model": "native-clip"}
    first = write_run(tmp_path / "first", random_model("native-clip", seed=1), params)
    second = write_run(tmp_path / "second", random_model("native-clip", seed=2), params)
    folder = export_local_dir(first, tmp_path / "export")
    with pytest.raises(UserError, match="already holds an export"):
        export_local_dir(second, folder)
    export_local_dir(second, folder, force=True)
    scale = torch.load(second, weights_only=True)["state_dict"]["logit_scale"]
    assert torch.equal(open_clip.create_model(f"local-dir:{folder}").logit_scale, scale)
    # Somebody's own folder is not an export, --force or not.
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="is not an earlier export"):
        export_local_dir(second, tmp_path / "precious", force=True)


def test_an_export_without_room_gets_a_sentence_and_keeps_the_earlier_one(
    tmp_path, home, monkeypatch
):
    """safetensors has an error of its own for a full disk; a process killed between two renames leaves the earlier export."""
    checkpoint = write_run(tmp_path / "run", random_model("native-clip"), {"model": "native-clip"})
    folder = export_local_dir(checkpoint, tmp_path / "export")
    config = (folder / "open_clip_config.json").read_bytes()

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: File too large (os error 27)")

    monkeypatch.setattr(export_module, "save_file", full)
    (tmp_path / ".export.killed").mkdir()
    folder.rename(tmp_path / ".export.killed" / "replaced")
    with pytest.raises(SafetensorError):
        export_local_dir(checkpoint, folder)
    assert (folder / "open_clip_config.json").read_bytes() == config


def test_weights_that_an_export_would_not_give_back_are_refused(tmp_path, home):
    """Also those of another model, and a text tower that the model would not have."""
    weights = random_model("native-clip").state_dict()
    nan = {"text_projection": weights["text_projection"] * float("nan")}
    cases = [
        ({}, "native-clip has open_clip's own text tower", {"text_model": str(home / "bert")}),
        ({"visual.proj": torch.ones(2, 3)}, "size mismatch for visual.proj", {}),
        ({"visual.proj": None}, 'Missing key.*"visual.proj"', {}),  # it would be random
        (nan, "'text_projection' of native-clip holds NaN or infinite numbers", {}),
        ({"logit_scale": torch.tensor(1e6)}, r"'logit_scale' has values up to 1e\+06, too large for", {"precision": "fp16"}),
    ]  # fmt: skip
    run = tmp_path / "run"
    checkpoint = write_run(run, random_model("native-clip"), {"model": "native-clip"})
    for changed, sentence, options in cases:
        stored = {key: value for key, value in (weights | changed).items() if value is not None}
        torch.save({"state_dict": stored}, checkpoint)
        with pytest.raises(UserError, match=sentence):
            export_local_dir(checkpoint, tmp_path / "export", **options)
        assert [*tmp_path.iterdir()] == [run]  # nothing is left behind


def test_what_would_be_another_model_or_a_random_one_is_refused(tmp_path, home):
    checkpoint = write_run(tmp_path / "run", random_model("native-clip"), {"model": "native-clip"})
    folder = export_local_dir(checkpoint, tmp_path / "aligned" / "model")
    (folder / "open_clip_model.safetensors").unlink()
    for source, sentence in (
        ("ViT-B-32", "names no weights: write ViT-B-32/TAG, with a tag of .*laion2b_s34b_b79k"),
        ("ViT-B-32/openai", "trained with QuickGELU, which ViT-B-32 lacks: write ViT-B-32-quickgelu/openai"),
        (tmp_path / "run", rf"missing\); give {checkpoint}$"),
        (tmp_path / "aligned", rf"missing\); give {folder}$"),
        (folder, "holds no weights"),  # open_clip would go on with random ones
    ):  # fmt: skip
        with pytest.raises(UserError, match=sentence):
            load_model(source)
    with pytest.raises(UserError, match="is given for a training checkpoint only"):
        load_model("hf-hub:a/b", model_name="ViT-B-32")
