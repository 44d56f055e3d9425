"""Small encoders in folders, pairs whose captions name the picture's colour, and an alignment of the encoders."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models._hub import save_for_hf
from transformers import (
    AutoConfig,
    AutoModel,
    BitImageProcessor,
    Dinov2Config,
    SiglipConfig,
    SiglipImageProcessor,
)

from open_clip_zerovl.align.request import AlignRequest
from support.tars import encoded, write_tar
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    random_model,
    register,
    write_bert,
    write_run,
)

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}
PICTURES = 60  # of a source


def two_colours(rng: np.random.Generator) -> tuple[bytes, list[str]]:
    """A noisy picture of one colour above another, and two captions."""
    above, below = rng.choice(list(COLOURS), 2)
    pixels = np.zeros((40, 40, 3), int)
    pixels[:20], pixels[20:] = COLOURS[above], COLOURS[below]
    noisy = np.clip(pixels + rng.integers(-30, 30, pixels.shape), 0, 255).astype(np.uint8)
    return encoded(Image.fromarray(noisy)), [
        f"a {above} house of {below} sun",
        f"the {above} tree and the {below} cat",
    ]


def write_source(folder: Path, seed: int, *, shards: int = 2, pictures: int = PICTURES) -> Path:
    rng = np.random.default_rng(seed)
    for shard in range(shards):
        members = []
        for number in range(pictures // shards):
            picture, captions = two_colours(rng)
            members += [
                (f"{shard}{number:04d}.png", picture),
                (f"{shard}{number:04d}.txt", "\n".join(captions).encode()),
            ]
        write_tar(folder / f"{shard}.tar", members)
    return folder


@pytest.fixture
def colours() -> dict[str, tuple[int, int, int]]:
    """Name -> RGB, of the two halves of a picture."""
    return COLOURS


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """Encoders: `timm`, `bert`, `bert-mean` (pools by the mean), `dinov2`, `siglip` (both towers).

    `native`: a run of open_clip's own towers.

    `a`, `b`: sources. `held`: a held-out set.
    """
    home = tmp_path_factory.mktemp("align")
    torch.manual_seed(0)
    save_for_hf(timm.create_model("test_vit.r160_in1k", pretrained=False), home / "timm")
    write_bert(home / "bert")
    AutoModel.from_config(AutoConfig.from_pretrained(home / "bert")).save_pretrained(home / "bert")
    shutil.copytree(home / "bert", home / "bert-mean")
    (home / "bert-mean" / "1_Pooling").mkdir()
    (home / "bert-mean" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**small, "image_size": 40, "patch_size": 8}  # DINOv2 resizes its positions
    AutoModel.from_config(Dinov2Config(mlp_ratio=2, **vision)).save_pretrained(home / "dinov2")
    crop = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    BitImageProcessor(**crop).save_pretrained(home / "dinov2")
    words = {
        **small,
        "intermediate_size": 64,
        "vocab_size": 50,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    both = SiglipConfig(vision_config={**vision, "intermediate_size": 64}, text_config=words)
    AutoModel.from_config(both).save_pretrained(home / "siglip")
    SiglipImageProcessor(size={"height": 40, "width": 40}, resample=2).save_pretrained(
        home / "siglip"
    )
    register(home / "configs", "align-native", NATIVE_VISION, CLIP_TEXT)
    write_run(home / "native", random_model("align-native"), {"model": "align-native"})
    for seed, name in enumerate("ab"):
        write_source(home / name, seed)
    write_source(home / "held" / "test", 2, shards=1, pictures=20)
    (home / "held" / "dataset_type.txt").write_text("retrieval\n")
    (home / "held" / "test" / "nshards.txt").write_text("1\n")
    return home


@pytest.fixture(scope="session")
def request_of(home):
    """A request for a small alignment of the folders, with changes."""

    def make(out: Path, **changes) -> AlignRequest:
        given = {
            "images": (f"timm:{home / 'timm'}",),
            "texts": (f"hf:{home / 'bert-mean'}",),
            "train_data": f"a={home / 'a'}::b={home / 'b'}",
            "held_out": f"held={home / 'held'}",
            "out": out,
            "rows": home / "rows",
            "embed_dim": 16,
            "batch_size": 16,
            "epochs": 3,
            "device": "cpu",
        }
        return AlignRequest(**{**given, **changes})

    return make
