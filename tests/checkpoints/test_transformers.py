"""Export for transformers: the folder loads in a process that can import neither open_clip nor this package."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.checkpoints.transformers_folder import (
    TOLERANCE,
    export_transformers,
)
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

TEXTS = ["a small red cat", "The BIG round house, with a tree", "xyz 猫", "one two three " * 40]
# Sizes (width, height) whose resized pictures lose an even number of pixels to the crop, where both libraries cut alike.
SIZES = [(90, 30), (40, 40), (30, 90), (48, 40)]

# A process for which open_clip and this package are not there. Arguments:
# pictures, texts, and for each model its folder, a tensor of pixels, and the file to write.
STRANGER = """
import importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("open_clip", "open_clip_train", "open_clip_zerovl", "training"):
            raise ImportError(name + " is not here")

sys.meta_path.insert(0, Absent())
try:
    import open_clip_zerovl
    raise SystemExit("the package is here")
except ImportError:
    pass
import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor
pictures, texts = sys.argv[1].split(","), json.loads(sys.argv[2])
pictures = [Image.open(picture) for picture in pictures]
for folder, pixels, out in zip(sys.argv[3::3], sys.argv[4::3], sys.argv[5::3]):
    model, found = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"], found
    processor = AutoProcessor.from_pretrained(folder)
    results = {"class": type(model).__name__, "scale": model.logit_scale.exp().item(), "dtype": str(model.dtype)}
    model.eval()
    with torch.no_grad():
        for name, padding in (("short", True), ("full", "max_length")):
            inputs = processor(text=texts, padding=padding, truncation=True, return_tensors="pt")
            output = model(**inputs, pixel_values=torch.load(pixels))
            results[name] = output.text_embeds
    results["image"] = output.image_embeds
    results["logits"] = output.logits_per_image
    results["pixels"] = [processor(images=picture, return_tensors="pt")["pixel_values"][0] for picture in pictures]
    torch.save(results, out)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Registered models of every kind that transformers can hold, and pictures."""
    home = tmp_path_factory.mktemp("home")
    bert = write_bert(home / "bert")
    plain = {**NATIVE_VISION, "no_ln_pre": True, "norm_kwargs": {"eps": 1e-6}}
    register(home / "configs", "tf-timm-bert", TIMM_VISION, bert_text(bert), init_logit_scale=3.9)
    register(home / "configs", "tf-plain-bert", plain, bert_text(bert))
    register(home / "configs", "tf-native-bert", NATIVE_VISION, bert_text(bert))
    register(
        home / "configs",
        "tf-tanh-bert",
        NATIVE_VISION,
        {**bert_text(bert), "hf_pooler_type": "cls_pooler"},
    )
    register(home / "configs", "tf-clip", NATIVE_VISION, CLIP_TEXT)
    register(
        home / "configs",
        "tf-quick-clip",
        NATIVE_VISION,
        CLIP_TEXT,
        quick_gelu=True,
        custom_text=True,
    )
    rng = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        pixels = rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(home / f"{number}.png")
    return home


def ask_stranger(home: Path, jobs: list[tuple[Path, torch.Tensor]]) -> list[dict]:
    """Results of a process with transformers alone that opens folders."""
    arguments = [
        ",".join(str(home / f"{number}.png") for number in range(len(SIZES))),
        json.dumps(TEXTS),
    ]
    for folder, pixels in jobs:
        torch.save(pixels, folder.parent / "pixels.pt")
        arguments += [
            str(folder),
            str(folder.parent / "pixels.pt"),
            str(folder.parent / "found.pt"),
        ]
    done = subprocess.run(
        [warm.python(), "-c", STRANGER, *arguments],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(home / "no-cache"),
            "PYTHONPATH": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [torch.load(folder.parent / "found.pt") for folder, _ in jobs]


def embeddings(model, pixels: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {
            "image": F.normalize(model.encode_image(pixels), dim=-1),
            "text": F.normalize(model.encode_text(tokens), dim=-1),
        }


STRANGERS = {
    "tf-timm-bert": (
        "VisionTextDualEncoderModel",
        {"image_resize_mode": "squash", "image_interpolation": "bilinear"},
    ),
    "tf-native-bert": ("VisionTextDualEncoderModel", {}),
    "tf-clip": ("CLIPModel", {"image_mean": [0.1, 0.2, 0.3]}),
}


def test_a_stranger_loads_the_exports_and_sees_the_same_embeddings(tmp_path, home):
    """One process without open_clip and without this package, for all models; by PIL the pixels are equal."""
    from transformers import AutoProcessor

    pictures = [Image.open(home / f"{number}.png") for number in range(len(SIZES))]
    jobs, models = [], []
    for name, (_, params) in STRANGERS.items():
        models.append(random_model(name))
        checkpoint = write_run(
            tmp_path / name / "run", models[-1], {"model": name, **params}, prefix="module."
        )
        _, transform, tokenizer = load_model(checkpoint)
        folder = export_transformers(checkpoint, tmp_path / name / "export")
        pixels = torch.stack([transform(picture) for picture in pictures])
        jobs.append((folder, pixels, tokenizer(TEXTS)))
        exact = AutoProcessor.from_pretrained(folder, backend="pil")
        found = [exact(images=picture, return_tensors="pt")["pixel_values"] for picture in pictures]
        torch.testing.assert_close(torch.cat(found), pixels, rtol=0, atol=1e-6)
        files = "".join(
            path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".md")
        )
        assert str(tmp_path) not in files and str(home) not in files
    answers = ask_stranger(home, [job[:2] for job in jobs])
    for (name, (kind, _)), model, (_, ours, tokens), found in zip(
        STRANGERS.items(), models, jobs, answers, strict=True
    ):
        assert found["class"] == kind and found["dtype"] == "torch.float32"
        assert found["scale"] == pytest.approx(model.logit_scale.exp().item(), rel=1e-6)
        expected = embeddings(model, ours, tokens)
        torch.testing.assert_close(found["image"], expected["image"], rtol=0, atol=TOLERANCE)
        for padding in ("short", "full"):
            torch.testing.assert_close(found[padding], expected["text"], rtol=0, atol=TOLERANCE)
        logits = model.logit_scale.exp() * expected["image"] @ expected["text"].T
        torch.testing.assert_close(found["logits"], logits.detach(), rtol=0, atol=50 * TOLERANCE)
        # Negative control: another model's embeddings are far away.
        other = embeddings(random_model(name, seed=1), ours, tokens)
        assert (other["image"] - found["image"]).abs().max() > 1e-2 and (
            other["text"] - found["full"]
        ).abs().max() > 1e-2
        # The pictures by its own processor, in steps of 1/255.
        deviation = torch.tensor(model.visual.preprocess_cfg["std"]).reshape(3, 1, 1)
        differences = [
            ((a - b) * deviation * 255).abs() for a, b in zip(ours, found["pixels"], strict=True)
        ]
        assert max(difference.max() for difference in differences) < 2.01
        assert max((difference > 0.01).float().mean() for difference in differences) < 0.05


@pytest.mark.parametrize("name", ["tf-clip", "tf-plain-bert", "tf-tanh-bert", "tf-quick-clip"])
def test_an_export_can_be_trained_or_its_card_and_message_name_the_one_that_can(
    tmp_path, home, name, caplog, monkeypatch
):
    """One AdamW step at 1e-6 keeps every embedding; BERT's raw [CLS] has no place that can be trained.

    The towers: a ViT without `ln_pre`, BERT's own pooler, QuickGELU with a text module; the export compares embeddings itself.
    """
    from transformers import AutoModel, AutoProcessor

    monkeypatch.setattr(
        logging.getLogger("open_clip_zerovl.checkpoints"), "propagate", True
    )  # the command's is off
    checkpoint = write_run(tmp_path / "run", random_model(name), {"model": name})
    folder = export_transformers(checkpoint, tmp_path / "export", precision="fp16")
    stored = load_file(folder / "model.safetensors").values()
    assert {tensor.dtype for tensor in stored} == {torch.float16}
    model = AutoModel.from_pretrained(folder).float()
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(text=TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    inputs["pixel_values"] = torch.randn(
        len(TEXTS), 3, 32, 32, generator=torch.Generator().manual_seed(0)
    )

    def embeds():
        with torch.no_grad():
            output = model.eval()(**inputs)
        return output.image_embeds, output.text_embeds

    before = embeds()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    model.train()(**inputs, return_loss=True).loss.backward()
    optimizer.step()
    images, texts = (F.cosine_similarity(a, b).min() for a, b in zip(before, embeds(), strict=True))
    said = [
        "or inference only" in text and "export for open_clip" in text
        for text in ((folder / "README.md").read_text(), caplog.text)
    ]
    destroyed = name == "tf-plain-bert"  # the text's pooler is a tiny multiple of the identity
    assert images > 0.999 and (texts < 0.999) == destroyed and said == [destroyed, destroyed]


def test_the_exports_check_finds_a_tensor_that_was_misplaced(tmp_path, home, monkeypatch):
    from open_clip_zerovl.checkpoints import transformers_towers

    first, *others = transformers_towers._IN_BLOCK
    swapped = tuple((*row[:2], first[2], row[3]) if row[1] == "ln_2." else row for row in others)
    monkeypatch.setattr(
        transformers_towers, "_IN_BLOCK", ((*first[:2], "layer_norm2.", first[3]), *swapped)
    )
    checkpoint = write_run(
        tmp_path / "run", random_model("tf-native-bert"), {"model": "tf-native-bert"}
    )
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"its image tower computes something else \(\d"):
        export_transformers(checkpoint, tmp_path / "export")
    assert sorted(tmp_path.iterdir()) == before


def test_what_transformers_cannot_hold_is_refused(tmp_path, home):
    """By the part that it lacks, or because the embeddings differ."""
    bert = bert_text(home / "bert")
    timm = {**TIMM_VISION, "timm_model_name": "test_vit"}
    plain = NATIVE_VISION
    cases = [
        ("an MLP", plain, {**bert, "hf_proj_type": "mlp"}, {}),
        ("by MeanPooler .hf_pooler_type", plain, {**bert, "hf_pooler_type": "mean_pooler"}, {}),
        ("attn_pool", {**plain, "attentional_pool": True}, bert, {}),
        ("ls_1.gamma", {**plain, "ls_init_value": 0.1}, bert, {}),
        ("image tower computes something else", {**timm, "timm_pool": "avg"}, bert, {}),
        ("have other parts", {**timm, "timm_proj": "mlp"}, bert, {}),
        ("bias", {**timm, "timm_proj_bias": True}, bert, {}),
        *(
            (
                rf"cannot hold this model: its image tower {kind} is not a plain ViT; the format open_clip",
                {**timm, "timm_model_name": tower, "timm_pool": "avg"},
                bert,
                {},
            )
            for kind, tower in {"ConvNeXt": "test_convnext", "ByobNet": "test_byobnet"}.items()
        ),
        ("beside CLIP's text tower", timm, CLIP_TEXT, {}),
        (
            "text tower computes",
            plain,
            {**CLIP_TEXT, "no_causal_mask": True},
            {"custom_text": True},
        ),
        ("32 x 64 px, and transformers' are", {**plain, "image_size": [32, 64]}, bert, {}),
        ("logit_bias", plain, bert, {"init_logit_bias": -10}),
    ]
    for number, (words, vision, text, extra) in enumerate(cases):
        name = register(tmp_path / "configs", f"tf-odd-{number}", vision, text, **extra)
        checkpoint = write_run(tmp_path / name, random_model(name), {"model": name})
        with pytest.raises(UserError, match=words) as caught:
            export_transformers(checkpoint, tmp_path / "export")
        assert "\n" not in str(caught.value) and not (tmp_path / "export").exists()
    params = {"model": "tf-native-bert", "image_resize_mode": "longest"}
    checkpoint = write_run(tmp_path / "run", random_model("tf-native-bert"), params)
    with pytest.raises(UserError, match="image_resize_mode 'longest'"):
        export_transformers(checkpoint, tmp_path / "export")


def test_the_command_takes_an_exported_folder_and_carries_its_card(tmp_path, home, capsys):
    params = {
        "model": "tf-plain-bert",
        "name": "my-run",
        "sampling": "debiased",
        "train_data": "sbu=/secret/sbu",
    }
    checkpoint = write_run(tmp_path / "run", random_model("tf-plain-bert"), params)
    folder = export_local_dir(checkpoint, tmp_path / "open", licence="cc-by-4.0")
    out = tmp_path / "tf"
    assert (
        main(["export", str(folder), str(out), "--format", "transformers", "--license", "mit"]) == 0
    )
    card = (out / "README.md").read_text()
    assert "library_name: transformers\n" in card and "license: mit" in card and "cc-by" not in card
    assert (
        "# my-run (tf-plain-bert)" in card
        and "- `--sampling`: debiased" in card
        and "- sbu" in card
    )
    # One export is not replaced by another without --force, and a folder for open_clip is not one for transformers.
    command = ["export", str(checkpoint), str(out), "--format", "transformers"]
    assert main(command) == 2 and "replace it with --force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert (
        main(["export", str(checkpoint), str(folder), "--format", "transformers", "--force"]) == 2
    )
    assert "not an earlier export for transformers" in capsys.readouterr().err
