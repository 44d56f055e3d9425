"""Styles of photographs and of their captions, and frozen encoders' features of both, stored once.

    python -m scripts.photographs.styles --tars DIR --features DIR     # DIR holds flickr8k.tar and products.tar; 6 CPU minutes

A style is a transform of the picture and one of the captions of a photograph, as a source of the web has its own look and its
own way of writing. A.5 of the paper is `framed` against `plain` with the longest and the shortest caption. Each part of
Flickr8k (`flickr8k_split`) is encoded in each style that the protocol needs; features are those of EfficientNet-Lite0
at 96 px (1,280 numbers) and MiniLM-L6 (384). No other program of this study reads the pictures.
"""

from __future__ import annotations

import csv
import hashlib
import io
import sys
import tarfile
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated as A

import numpy as np
import timm
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageOps

from open_clip_zerovl.align.encoders import open_tower
from open_clip_zerovl.core.files import save_atomically
from scripts.encoders import fetch_encoders
from scripts.program import program

Picture = Image.Image
HELD_OUT = 1000  # photographs of each held-out set
IMAGE_PX = 96
AT_ONCE = 8  # pictures; glibc returns larger blocks to the kernel and faults them in again
TOKENS = 48


def flickr8k_split(names: Sequence[str]) -> dict[str, list[str]]:
    """Divide photographs into test, validation and train by the SHA-256 of the file name."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return {
        "test": ordered[:HELD_OUT],
        "validation": ordered[HELD_OUT : 2 * HELD_OUT],
        "train": ordered[2 * HELD_OUT :],
    }


def _framed(picture: Picture) -> Picture:
    """Draw a red frame of four pixels."""
    picture = picture.copy()
    for inset in range(4):
        edge = IMAGE_PX - 1 - inset
        ImageDraw.Draw(picture).rectangle((inset, inset, edge, edge), outline=(255, 0, 0))
    return picture


def _warm(picture: Picture) -> Picture:
    """Redden and blur."""
    pixels = np.asarray(picture).astype(float) * [1.25, 1.0, 0.6]
    warm = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    return warm.filter(ImageFilter.GaussianBlur(1.2))


def _poster(picture: Picture) -> Picture:
    """Mirror a poor JPEG of half the size, in eight levels a channel."""
    file = io.BytesIO()
    half = (IMAGE_PX // 2, IMAGE_PX // 2)
    picture.resize(half, Image.Resampling.BILINEAR).save(file, "JPEG", quality=20)
    again = Image.open(file).convert("RGB").resize(picture.size, Image.Resampling.BILINEAR)
    return ImageOps.posterize(ImageOps.mirror(again), 3)


def _zoomed(picture: Picture) -> Picture:
    """Enlarge the middle half of each side."""
    quarter = IMAGE_PX // 4
    middle = picture.crop((quarter, quarter, 3 * quarter, 3 * quarter))
    return middle.resize(picture.size, Image.Resampling.BILINEAR)


#: Style -> how a photograph looks in it.
PICTURES: dict[str, Callable[[Picture], Picture]] = {
    "plain": lambda picture: picture,
    "framed": _framed,
    "grey": lambda picture: ImageOps.grayscale(picture).convert("RGB"),
    "warm": _warm,
    "zoomed": _zoomed,
    "poster": _poster,
}
#: Style -> the caption of a photograph in it, from the photograph's five captions.
CAPTIONS: dict[str, Callable[[Sequence[str]], str]] = {
    "first": lambda captions: captions[0],
    "longest": lambda captions: max(captions, key=len),
    "shortest": lambda captions: min(captions, key=len),
    "stock": lambda captions: f"vintage black and white stock photo of {_words(captions).lower()}",
    "wallpaper": lambda captions: f"{_words(captions)}, free hd wallpaper download",
    "agency": lambda captions: (
        f"close-up: {_words(captions)} (photo by an agency, all rights reserved)"
    ),
}


def _words(captions: Sequence[str]) -> str:
    return captions[0].rstrip(" .")


class Pictures:
    """The features of pictures by a model in evaluation mode."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    @torch.inference_mode()
    def __call__(self, pictures: Sequence[Picture]) -> torch.Tensor:
        parts = []
        for begin in range(0, len(pictures), AT_ONCE):
            block = np.stack([np.asarray(each) for each in pictures[begin : begin + AT_ONCE]])
            pixels = torch.from_numpy(block).permute(0, 3, 1, 2).float().div(127.5).sub(1)
            parts.append(self.model(pixels.contiguous(memory_format=torch.channels_last)))
        return torch.cat(parts).clone()


def image_tower(encoders: Path) -> torch.nn.Module:
    """Open EfficientNet-Lite0 in evaluation mode."""
    name = f"local-dir:{encoders / 'effnet_lite0'}"
    model = timm.create_model(name, pretrained=True, num_classes=0).eval()
    return model.to(memory_format=torch.channels_last)


class Texts:
    """The features of captions by MiniLM-L6, which encodes captions of similar length together."""

    def __init__(self, encoder: Path) -> None:
        tower = open_tower(f"hf:{encoder}", "text", context_length=TOKENS)
        self.model = tower.frozen(torch.device("cpu"))

    @torch.inference_mode()
    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        order = sorted(range(len(captions)), key=lambda number: len(captions[number]))
        blocks = [order[begin : begin + 32] for begin in range(0, len(order), 32)]
        parts = [self.model.texts([captions[number] for number in block]) for block in blocks]
        return torch.cat(parts)[torch.tensor(order).argsort()].clone()


def read_pictures(tar: Path, names: Sequence[str]) -> list[Picture]:
    """Read pictures of a tar as squares."""
    made: dict[str, Picture] = {}
    wanted = set(names)
    with tarfile.open(tar) as file:
        for member in file:
            if member.name in wanted:
                picture = Image.open(io.BytesIO(file.extractfile(member).read()))  # type: ignore[union-attr]
                size = (IMAGE_PX, IMAGE_PX)
                made[member.name] = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    return [made[name] for name in names]


def _rows(tar: Path, member: str) -> list[dict[str, str]]:
    with tarfile.open(tar) as file:
        text = file.extractfile(member).read().decode()  # type: ignore[union-attr]
    return list(csv.DictReader(io.StringIO(text)))


def read_captions(tar: Path) -> dict[str, list[str]]:
    """Read the captions of each photograph of Flickr8k."""
    captions: dict[str, list[str]] = {}
    for row in _rows(tar, "flickr8k/captions.csv"):
        captions.setdefault(row["image"], []).append(row["caption"].strip())
    return captions


#: Part of Flickr8k -> the styles of pictures and of captions that the protocol needs of it.
NEEDED: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "test": (list(PICTURES), list(CAPTIONS)),
    "validation": (["plain"], []),
    "train": ([style for style in PICTURES if style != "poster"], list(CAPTIONS)),
}


def encode_flickr8k(tar: Path, encode: Pictures, texts: Texts, out: Path) -> None:
    """Write PART.pt: `pictures` and `styled`, {style: (n, F)} each, and `captions` (n, 5, F)."""
    captions = read_captions(tar)
    for part, names in flickr8k_split(list(captions)).items():
        if (out / f"{part}.pt").is_file():
            continue
        looks, words = NEEDED[part]
        pictures = read_pictures(tar, [f"flickr8k/images/{name}" for name in names])
        lists = {"": [caption for name in names for caption in captions[name]]}
        lists |= {style: [CAPTIONS[style](captions[name]) for name in names] for style in words}
        number = {text: row for row, text in enumerate(dict.fromkeys(chain(*lists.values())))}
        features = texts(list(number))
        rows = {style: features[[number[text] for text in each]] for style, each in lists.items()}
        tables = {
            "pictures": {
                look: encode([PICTURES[look](each) for each in pictures]) for look in looks
            },
            "captions": rows.pop("").view(len(names), 5, -1),
            "styled": rows,
        }
        save_atomically(tables, out / f"{part}.pt")
        print(f"{part}: {len(names):,} photographs", flush=True)


def encode_products(tar: Path, encode: Pictures, texts: Texts, out: Path) -> None:
    """Write products.pt: `pictures` and `captions` (n, F) in the order of the file names' SHA-256."""
    if (out / "products.pt").is_file():
        return
    rows = _rows(tar, "products/pairs.csv")
    rows.sort(key=lambda row: hashlib.sha256(row["image"].encode()).hexdigest())
    pictures = encode(read_pictures(tar, [f"products/{row['image']}" for row in rows]))
    captions = texts([row["caption"].strip() for row in rows])
    save_atomically({"pictures": pictures, "captions": captions}, out / "products.pt")
    print(f"products: {len(rows):,} pairs", flush=True)


def styles(
    *, tars: A[Path, "folder of the tars", "DIR"], features: A[Path, "folder to write", "DIR"]
) -> None:
    """Write the features of the photographs and products in each style."""
    torch.set_num_threads(1)
    features.mkdir(parents=True, exist_ok=True)
    encoders = fetch_encoders(features / "encoders")
    encode, texts = Pictures(image_tower(encoders)), Texts(encoders / "minilm")
    encode_flickr8k(tars / "flickr8k.tar", encode, texts, features)
    encode_products(tars / "products.tar", encode, texts, features)


if __name__ == "__main__":
    sys.exit(program(styles))
