"""A model that encodes pictures and captions, with the flags of commands that take one.

Imports nothing heavy, so that help comes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from open_clip_zerovl.core.flags import NOT_NEGATIVE, at_least, flag

if TYPE_CHECKING:
    import torch

    from open_clip_zerovl.checkpoints.loading import ModelSpec, Preprocess, Tokenizer
    from open_clip_zerovl.models.configs import ClipModel


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
    batch_size: int = flag(64, "samples encoded at once", range=at_least(1))
    workers: int = flag(0, "loader processes a rank", range=NOT_NEGATIVE)


@dataclass(frozen=True)
class Encoder(EncoderFlags):
    """A model that encodes pictures and captions, and the settings of its loader.

    Attributes:
        model: as for `load_model`: an exported folder, a checkpoint, `NAME/pretrained`.
    """

    model: str

    def load(self, *, local_rank: int = 0) -> tuple[ClipModel, Preprocess, Tokenizer, torch.device]:
        """Load the model on its device, and return both.

        Raises:
            UserError: as `load_model`.
        """
        from open_clip_zerovl.checkpoints.loading import choose_device, load_model

        device = choose_device(self.device, local_rank=local_rank)
        return *load_model(
            self.model, model_name=self.model_name, text_model=self.text_model, device=device
        ), device

    def check(self) -> None:
        """Refuse a model that cannot be found or described.

        No weights are read, so that this comes before long work.
        """
        if not self.model.startswith("hf-hub:"):
            self.spec()

    def spec(self) -> ModelSpec:
        """Return `spec_of` the model.

        Raises:
            UserError: as there.
        """
        from open_clip_zerovl.checkpoints.loading import spec_of

        return spec_of(self.model, model_name=self.model_name, text_model=self.text_model)
