"""The flags of `zerovl align`. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.core.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    at_least,
    flag,
)
from open_clip_zerovl.recipe.flags import POSITIVES


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Training settings of heads."""

    embed_dim: int = flag(512, "width of the shared space", range=at_least(1), metavar="D")
    positives: str | None = flag(
        None,
        "pairs with the same caption or picture count as positives (default: caption where many pictures share one, else pair)",
        choices=POSITIVES,
    )
    batch_size: int = flag(
        0,
        "pairs in a step (default: 32,768 on a GPU; on a CPU as many as cost no more than the heads)",
        range=at_least(1),
        metavar="N",
    )
    epochs: int = flag(
        0, "at most (default: as many as make 2,000 steps, 10 to 200)", range=at_least(1)
    )
    lr: float = flag(1e-3, "peak learning rate of AdamW", range=POSITIVE)
    seed: int = flag(0, "seed of the held-out pictures, the heads and the order", range=SEED)

    wd: float = 1e-4  # weight decay of the heads' matrices
    warmup_share: float = 0.05  # of the steps, in which the learning rate rises
    patience: int = 5  # of at most 20 checks without a higher held-out recall; 0: no limit


@dataclass(frozen=True, kw_only=True)
class AlignFlags(Recipe):
    """Settings of an alignment of two frozen encoders."""

    seeds: int = flag(
        1, "heads trained, with seeds from --seed on; the best is kept", range=at_least(1)
    )
    context_length: int | None = flag(
        None, "tokens of an hf: encoder's texts (default: its own, at most 77)", range=at_least(1)
    )
    rows: Path | None = flag(
        None, "folder of the stored features (default: OUT/rows)", kind=Path, metavar="DIR"
    )
    dtype: str = flag(
        "float16", "number format of the stored features", choices=("float16", "float32")
    )
    workers: int = flag(0, "loader processes while encoding", range=NOT_NEGATIVE)
    device: str = flag("auto", "cpu, cuda, ... (default: cuda if available)")
    encode_batch: int = 64  # samples encoded at once
    held_out_share: float = 0.1  # of the pictures, at most 1,000
    part: tuple[int, int] = (0, 1)  # (rank, ranks) of torchrun, which share the encoding


@dataclass(frozen=True, kw_only=True)
class AlignRequest(AlignFlags):
    """A request for an alignment: encoders, data, output and settings.

    Attributes:
        images, texts: encoders, named as for `encoders.open_tower`.
        train_data: sources, as `--train-data` takes them.
        held_out: retrieval sets in CLIP_benchmark's layout, `name=folder::...`; "" holds out a part of the sources.
        out: folder to write.
    """

    images: tuple[str, ...]
    texts: tuple[str, ...]
    train_data: str
    held_out: str = ""
    out: Path
