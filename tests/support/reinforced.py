"""Samples in DataCompDR's layout: picture, captions, augmentations and teachers' embeddings side by side in a shard."""

from __future__ import annotations

import gzip
import io
import json

import numpy as np
import torch

from support.tars import noise_jpeg

WIDTHS = (4, 3)
# Operations by number: 5 rotate, 6 brightness, 9 sharpness, 10 posterize, 11 solarize, 12 auto contrast, 0 none.
AUGMENTATIONS = [
    [[0, 0, 150, 180], [[6, 0.27], [11, 170.0]]],
    [[12, 20, 70, 60], [[5, -8.1], [0, 0.0]]],
    [[3, 1, 90, 100], None],
    [[40, 30, 100, 90], [[12, 0.0], [10, 6.0]]],
]


def embeddings_of(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    return {
        "image_emb": rng.normal(size=(len(AUGMENTATIONS), sum(WIDTHS))).astype(np.float16),
        "text_emb": rng.normal(size=(3, sum(WIDTHS))).astype(np.float16),
    }


def packed(number: int, kind: str) -> tuple[str, bytes]:
    """Three ways in which such data sets were published."""
    arrays, buffer = embeddings_of(number), io.BytesIO()
    if kind == "apart":
        arrays = {
            "image_emb": arrays["image_emb"],
            "text_emb": arrays["text_emb"][:1],
            "syn_text_emb": arrays["text_emb"][1:],
        }
    if kind == "pth.gz":
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, buffer)
        return "pth.gz", gzip.compress(buffer.getvalue())
    np.savez_compressed(buffer, **arrays)
    return "npz", buffer.getvalue()


def members_of(number: int, kind: str) -> list[tuple[str, bytes]]:
    name, content = packed(number, kind)
    augmentations = json.dumps(AUGMENTATIONS) if kind == "pth.gz" else AUGMENTATIONS
    return [
        (f"{number:04d}.jpg", noise_jpeg(number, 180, 150)),
        (f"{number:04d}.txt", f"caption {number}".encode()),
        (f"{number:04d}.url.txt", b"http://example.com/a.jpg"),
        (f"{number:04d}.paug.json", json.dumps({"param_aug": augmentations}).encode()),
        (
            f"{number:04d}.syn.json",
            json.dumps({"syn_text": [f"syn {number} a", f"syn {number} b"]}).encode(),
        ),
        (f"{number:04d}.{name}", content),
    ]
