"""The flags of commands that encode with a model. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

from dataclasses import dataclass

from open_clip_zerovl.core.flags import flag, natural, positive


@dataclass(frozen=True, kw_only=True)
class EncoderFlags:
    """Flags that describe a model without a `params.txt` beside its checkpoint, and flags of its encoding.

    Attributes:
        device: see `choose_device`.
        batch_size: samples at once, on each rank.
        workers: loader processes of each rank.
    """

    model_name: str | None = flag(
        None,
        "model of a checkpoint without params.txt beside it, or one's own model, as in training",
        metavar="NAME|FILE.json",
    )
    text_model: str | None = flag(
        None, "folder of the HF text tower of training checkpoints", metavar="DIR"
    )
    device: str = flag("auto", "cpu, cuda, ... (default: cuda if available)")
    batch_size: int = flag(64, "samples encoded at once", kind=positive)
    workers: int = flag(0, "loader processes a rank", kind=natural)
