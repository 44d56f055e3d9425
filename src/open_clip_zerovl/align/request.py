"""The flags of `zerovl align`. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Requirement,
    flag,
    key_value,
    natural,
    part,
    positive,
    redeclared,
    seed,
)
from open_clip_zerovl.losses.names import POSITIVES
from open_clip_zerovl.recipe.flags import TeacherFlags

HEADS = ("linear", "mlp", "glu")
POOLS = ("cls", "mean", "lasttoken")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Training settings of heads."""

    head: str = flag(
        "linear",
        "linear projections; mlp: two layers, as open_clip's timm and Hugging Face towers have them; glu: gated, as SAIL's, "
        "which stock open_clip cannot hold",
        choices=HEADS,
    )
    embed_dim: int = flag(512, "width of the shared space", kind=positive, metavar="D")
    loss: str = flag(
        "clip", "softmax over the batch, or a sigmoid for each pair", choices=("clip", "siglip")
    )
    debiased_sampling: bool = flag(False, "each step's pairs come from one source")
    positives: str = flag(
        "pair", "pairs with the same caption or picture count as positives", choices=POSITIVES
    )
    cross_source_weight: float = flag(
        1.0,
        "how often a negative of another source counts",
        range=NOT_NEGATIVE,
        metavar="W",
        needs=(
            Requirement(
                "batches of several sources: no --debiased-sampling",
                lambda g: not g.debiased_sampling,
            ),
        ),
    )
    feature_mixup: float = flag(
        0.0,
        "FuseMix: mix the features of one half of a batch with the other's, both sides by one weight of each step from "
        "Beta(A, A); 0: none",
        range=NOT_NEGATIVE,
        metavar="A",
        needs=(
            Requirement(
                "--positives pair, --cross-source-weight 1 and no --teacher: a mixed pair has two of each",
                lambda g: (
                    g.positives == "pair" and g.cross_source_weight == 1 and g.teacher is None
                ),
            ),
        ),
    )
    teacher: str | None = flag(
        None,
        "learn from the embeddings that `zerovl teacher --captions one-per-epoch` has stored in DIR, on its views",
        metavar="DIR",
    )
    distill_weight: float = redeclared(TeacherFlags, "distill_weight", 1.0)
    distill_temperature: float = redeclared(TeacherFlags, "distill_temperature", 0.01)
    batch_size: int = flag(
        0,
        "pairs in a step (default: 32,768 on a GPU; on a CPU as many as cost no more than the heads)",
        kind=positive,
        metavar="N",
    )
    epochs: int = flag(
        0, "at most (default: as many as make 2,000 steps, 10 to 200)", kind=positive
    )
    lr: float = flag(1e-3, "peak learning rate of AdamW", range=POSITIVE)
    wd: float = flag(1e-4, "weight decay of the heads' matrices", range=NOT_NEGATIVE)
    warmup_share: float = flag(
        0.05, "share of the steps in which the learning rate rises", range=SHARE
    )
    patience: int = flag(
        5,
        "end when the held-out recall has not risen in N of at most 20 checks; 0: never",
        kind=natural,
    )
    seed: int = flag(0, "seed of the held-out pictures, the heads and the order", kind=seed)

    @property
    def sampling(self) -> str:
        """Of `sampling.STRATEGIES`."""
        return "debiased" if self.debiased_sampling else "random"


@dataclass(frozen=True, kw_only=True)
class AlignFlags(Recipe):
    """Settings of an alignment of two frozen encoders."""

    seeds: int = flag(
        1, "heads trained, with seeds from --seed on; the best is kept", kind=positive
    )
    held_out_share: float = flag(
        0.1, "share of the pictures that is held out, at most 1,000", range=SHARE
    )
    views: int = flag(
        1,
        "train on V augmented views of each picture in place of the picture as it is",
        kind=positive,
        metavar="V",
        needs=(
            Requirement("no --teacher, which brings its own views", lambda g: g.teacher is None),
        ),
    )
    aug_cfg: dict[str, Any] = flag(
        dict,
        "augmentation of the views: open_clip's, such as scale=(0.4,1.0)",
        kind=key_value,
        nargs="*",
        metavar="KEY=VALUE",
        needs=(
            Requirement("--views or --teacher", lambda g: g.views > 1 or g.teacher is not None),
        ),
    )
    text_pool: str | None = flag(
        None,
        "pooling of an hf: encoder (default: that of its sentence-transformers config, else lasttoken of a decoder, cls of "
        "another)",
        choices=POOLS,
    )
    context_length: int | None = flag(
        None, "tokens of an hf: encoder's texts (default: its own, at most 77)", kind=positive
    )
    rows: Path | None = flag(
        None, "folder of the stored features (default: OUT/rows)", kind=Path, metavar="DIR"
    )
    dtype: str = flag(
        "float16", "number format of the stored features", choices=("float16", "float32")
    )
    encode_batch: int = flag(64, "samples encoded at once", kind=positive)
    workers: int = flag(0, "loader processes while encoding", kind=natural)
    device: str = flag("auto", "cpu, cuda, ... (default: cuda if available)")
    amp: bool = flag(False, "encode in bf16")
    part: tuple[int, int] = flag(
        (0, 1),
        "encode every N-th part alone and end: N calls share the work",
        kind=part,
        metavar="I/N",
    )


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
