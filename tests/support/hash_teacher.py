"""A teacher whose embeddings are hashes of the very pixels and tokens that it is shown: equal only where those are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from torch.nn.functional import normalize

from open_clip_zerovl.checkpoints.loading import Encoder

WIDTH = 6


def hashed(rows: torch.Tensor, salt: int) -> torch.Tensor:
    """(b, ...) whole numbers to (b, WIDTH) unit rows."""
    digests = [
        hashlib.blake2b(
            row.contiguous().numpy().tobytes(), digest_size=4 * WIDTH, salt=bytes([salt] * 8)
        ).digest()
        for row in rows
    ]
    numbers = np.frombuffer(b"".join(digests), dtype=np.int32).astype(np.float32).reshape(-1, WIDTH)
    return normalize(torch.from_numpy(numbers / 2**31), dim=-1)


def tokens_of(captions: list[str]) -> torch.Tensor:
    """Captions as their first 40 bytes: the students' tokenizer too."""
    return torch.tensor([list(caption.encode()[:40].ljust(40)) for caption in captions])


class HashModel(torch.nn.Module):
    def __init__(self, salt: int) -> None:
        super().__init__()
        self.salt = torch.nn.Parameter(torch.tensor(float(salt)))
        self.logit_scale = torch.nn.Parameter(torch.zeros(()))
        self.pictures = 0

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        self.pictures += len(images)
        return hashed((images * 255).round().to(torch.uint8), int(self.salt))

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        return hashed(tokens.to(torch.uint8), int(self.salt))


@dataclass(frozen=True)
class HashEncoder(Encoder):
    """An `Encoder` of a HashModel.

    Attributes:
        size_px: side of the teacher's own pictures.
    """

    model: str = "hash"
    salt: int = 1
    size_px: int = 16
    batch_size: int = field(default=4, kw_only=True)

    def load(self, *, local_rank: int = 0):
        cfg = PreprocessCfg(size=self.size_px, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        return (
            HashModel(self.salt),
            image_transform_v2(cfg, is_train=False),
            tokens_of,
            torch.device("cpu"),
        )
