"""Which micro-batches of a step keep their graph, and the order of the backward passes."""

from __future__ import annotations

from dataclasses import dataclass

from open_clip_zerovl.dga.objective import TEXTS


@dataclass(frozen=True)
class StepPlan:
    """Which of a step's K micro-batches keep their graph of the first pass, and in which order all are backpropagated.

    K = 5, R = 2:  forwarded 0 1 2 3 4, with graph 3 4; backpropagated 3 4 0 1 2, synchronised in 2
    K = 2, R = 2:  forwarded 0 1, with graph 0 1; backpropagated 0 1, synchronised in 1

    Attributes:
        sizes: samples of each micro-batch.
        graphs: R.
        texts_per_image: C.
    """

    sizes: list[int]
    graphs: int
    texts_per_image: int = 1

    def rows(self, modality: str) -> list[int]:
        """Rows of each micro-batch's features, of FEATURES."""
        return [size * self.texts_per_image for size in self.sizes] if modality == TEXTS else self.sizes

    @property
    def retained(self) -> range:
        """The micro-batches whose graph is kept: the last R."""
        return range(len(self.sizes) - self.graphs, len(self.sizes))

    @property
    def replayed(self) -> range:
        """The others, which are forwarded twice."""
        return range(len(self.sizes) - self.graphs)

    @property
    def backward_order(self) -> list[int]:
        """Retained ones first, which frees their memory for the replays."""
        return [*self.retained, *self.replayed]

    @property
    def synchronises(self) -> int:
        """The micro-batch in whose backward pass DDP averages gradients: the last."""
        return self.backward_order[-1]
