"""Decoupled gradient accumulation under sentence-transformers' trainer: its own losses, on a batch that does not fit at once.

`DecoupledLoss` is put around a loss and given to `SentenceTransformerTrainer` in its place. It imports nothing of that
library. In phase (2) it calls the loss itself, whose `model` then returns the embeddings of phase (1).

Shapes: `n` samples a batch (the trainer's `per_device_train_batch_size`), `C` columns of the data set (anchor, positive,
negatives ...), `D` width of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation

# the tokenizer's output for a column of a batch; tensors have a row a sample
Column = Mapping[str, Any]


class DecoupledLoss(nn.Module):
    """A loss of sentence-transformers with the gradient of the whole batch and the memory of one mini-batch.

        loss = DecoupledLoss(MultipleNegativesRankingLoss(model), mini_batch_size=32)
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=dataset, loss=loss)

    Args:
        loss: a loss with `model`, whose value depends on the batch's embeddings, labels and tokens (a guide model reads them,
            on the whole batch without graph): MultipleNegativesRankingLoss, GISTEmbedLoss, CoSENTLoss, MatryoshkaLoss ...
        mini_batch_size: samples of each column that are forwarded at once.
        retain: mini-batches whose graph is kept, which are not forwarded twice; "auto" for the largest number that fits.
        check: compare replayed with cached embeddings "first", "always" or "never" (see `DecoupledGradientAccumulation`).

    Raises:
        UserError: a loss without a model, one that has mini-batches of its own, or one that needs the model's layers.
    """

    def __init__(
        self,
        loss: nn.Module,
        mini_batch_size: int = 32,
        *,
        retain: int | str = 1,
        check: str = "first",
    ) -> None:
        super().__init__()
        if not isinstance(getattr(loss, "model", None), nn.Module):
            raise UserError(f"{type(loss).__name__} has no model of which it takes the embeddings.")
        for each in _with_inner_losses(loss):
            if getattr(each, "uses_gradient_cache", hasattr(each, "forward_cached")):
                raise UserError(
                    f"{type(each).__name__} has mini-batches of its own; give the loss that it computes, such as "
                    "MultipleNegativesRankingLoss in place of CachedMultipleNegativesRankingLoss."
                )
            if hasattr(each, "n_layers_per_step"):
                raise UserError(
                    f"{type(each).__name__} needs the outputs of the model's layers, not its embeddings alone; train with it "
                    "without DecoupledLoss."
                )
        self.loss = loss
        self.mini_batch_size = mini_batch_size
        self._options: dict[str, Any] = {"retain": retain, "check": check}
        self._step: tuple[Any, _Columns, DecoupledGradientAccumulation] | None = None

    @property
    def model(self) -> nn.Module:
        """Return the loss' model.

        The trainer replaces that by its DDP wrapper.
        """
        model: nn.Module = self.loss.get_submodule("model")
        return model

    def forward(self, sentence_features: Iterable[Column], labels: Tensor | None = None) -> Tensor:
        """Compute the loss of a batch, ().

        Its backward pass runs the mini-batches again (see `DecoupledGradientAccumulation.loss`).

        Args:
            sentence_features: C columns; tensors of n rows, and constants such as names.
            labels: (n, ...) or None, handed to the loss.

        Raises:
            UserError: columns that cannot be split by samples.
        """
        columns = [dict(column) for column in sentence_features]
        if len(columns) < 2:
            raise UserError(
                f"DecoupledLoss needs two columns at least, such as anchor and positive, but got {len(columns)}."
            )
        rows = _rows(columns)
        towers, step = self._made_for(self.model)
        towers.columns = columns
        towers.constants = [
            {k: v for k, v in column.items() if not isinstance(v, Tensor)} for column in columns
        ]
        tensors = [{k: v for k, v in column.items() if isinstance(v, Tensor)} for column in columns]
        starts = range(0, rows, self.mini_batch_size)
        parts = [slice(start, min(start + self.mini_batch_size, rows)) for start in starts]
        micro_batches = [
            tuple(
                [{k: v[part] for k, v in column.items()} for column in of]
                for of in (tensors[:1], tensors[1:])
            )
            for part in parts
        ]
        return step.loss(micro_batches, labels=labels)

    def _made_for(self, model: nn.Module) -> tuple[_Columns, DecoupledGradientAccumulation]:
        """Return the step on a model, made again when the trainer has wrapped or moved it."""
        key = model, next(model.parameters()).device
        if self._step is None or self._step[0] != key:
            towers = _Columns(model)
            self._step = (
                key,
                towers,
                DecoupledGradientAccumulation(towers, _Head(self.loss, towers), **self._options),
            )
        return self._step[1:]

    def get_config_dict(self) -> dict[str, Any]:
        """Return the loss' settings for the model card."""
        settings: dict[str, Any] = getattr(self.loss, "get_config_dict", dict)()
        return {
            "loss": type(self.loss).__name__,
            **settings,
            "mini_batch_size": self.mini_batch_size,
        }

    @property
    def citation(self) -> str:
        """Return the wrapped loss' citation, for the model card."""
        return getattr(self.loss, "citation", "")


class _Columns(nn.Module):
    """The model on the columns of a mini-batch, with the embeddings of all columns but the first concatenated."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.columns: list[dict[str, Any]] = []  # of the whole batch
        self.constants: list[dict[str, Any]] = []
        self.widths: list[int] = []

    def forward(
        self, first: list[dict[str, Tensor]], others: list[dict[str, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        embeddings = [
            self.model({**column, **constants})["sentence_embedding"]
            for column, constants in zip([*first, *others], self.constants, strict=True)
        ]
        self.widths = [embedding.shape[1] for embedding in embeddings]
        return embeddings[0], torch.cat(embeddings[1:], dim=1)


class _Head(nn.Module):
    """The loss on all embeddings of the step, with those of its parameters that are not the model's."""

    def __init__(self, loss: Any, towers: _Columns) -> None:
        super().__init__()
        self._held = (loss, towers)  # a tuple, so that the model is not part of this module

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        labels: Tensor | None,
        output_dict: bool,
    ) -> Tensor:
        loss, towers = self._held
        embeddings = torch.cat([image_features, text_features], dim=1).split(towers.widths, dim=1)
        features = [
            {**column, "sentence_embedding": embedding}
            for column, embedding in zip(towers.columns, embeddings, strict=True)
        ]
        with _embedded(loss.model):
            return loss(features, labels)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        loss, towers = self._held
        models = {id(parameter) for parameter in towers.parameters()}
        return (parameter for parameter in loss.parameters(recurse) if id(parameter) not in models)


@contextmanager
def _embedded(model: nn.Module) -> Iterator[None]:
    """Make the model return what it is given within the block: features that hold their embeddings."""
    stock = vars(model).get("forward")
    model.forward = lambda features, *_, **__: dict(features)
    try:
        yield
    finally:
        del model.forward
        if stock is not None:
            model.forward = stock


def _with_inner_losses(loss: Any) -> Iterator[Any]:
    while loss is not None:
        yield loss
        loss = getattr(loss, "loss", None)


def _rows(columns: list[dict[str, Any]]) -> int:
    """Count the samples.

    Raises:
        UserError: no column, or tensors that do not have a row a sample.
    """
    rows = {
        f"column {i}'s {name}": value.shape[0] if value.ndim else 0
        for i, column in enumerate(columns)
        for name, value in column.items()
        if isinstance(value, Tensor)
    }
    if len(set(rows.values())) != 1 or 0 in rows.values():
        seen = ", ".join(f"{name} has {count}" for name, count in rows.items()) or "there are none"
        raise UserError(
            f"All tensors of a batch must have a row for each sample, to be split by samples, but {seen}."
        )
    return next(iter(rows.values()))
