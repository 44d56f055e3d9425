"""Micro-batch, DGA steps and graphs kept of a recipe on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

USABLE_SHARE = 0.92  # of a GPU's memory; the rest is CUDA's context and fragmentation


GIB = 2**30
GRAPHS_SHARE = 0.9  # of the usable memory that `--dga-retain auto` fills (dga.retain.AUTO_SHARE)
SMALLEST_MICRO_BATCH = (
    128  # below it a fast GPU waits for the host to launch the thousand kernels of a forward pass
)
NEARLY_FASTEST = (
    1.01  # micro-batches within 1 % of the least cost count as equal; the largest is taken
)
# Largest relative difference of the effective batch from the one asked for, where the micro-batch does not divide it.
NEAR_BATCH = 1 / 8


@dataclass(frozen=True)
class BatchSplit:
    """A rank's part of a step: `micro_batch` B, `dga_steps` K, `retained` R."""

    micro_batch: int
    dga_steps: int
    retained: int

    @property
    def relative_time(self) -> float:
        """Time of a step in units of plain training, whose forward pass is a third of its time: 1 + (K-R)/(3K)."""
        return 1 + (self.dga_steps - self.retained) / (3 * self.dga_steps)


def fastest_batch(
    effective_batch: int,
    ranks: int,
    memory_bytes: float,
    sample_bytes: float,
    fixed_bytes: float,
    *,
    most: int = 0,
) -> BatchSplit:
    """B, K and R together for the least time within a GPU's memory.

    R graphs of B samples fit; the other K-R micro-batches are forwarded twice. Small micro-batches fill the memory better, and
    over ranks the one replay that DDP needs is smaller; large ones use the GPU better. Eight ranks, N = 16,384:

        256 x 8, 7 kept: 1.042        128 x 16, 15 kept: 1.021        128 x 16, 1 kept: 1.313

    Args:
        memory_bytes: for graphs and all else.
        sample_bytes: bytes of a graph, for each sample.
        fixed_bytes: weights, optimizer, gradients, the loss.
        most: largest number of graphs; 0: all that fit.

    Returns:
        A micro-batch that is a power of two, or a rank's whole share; 1 if nothing fits.
    """
    share = max(1, effective_batch // ranks)
    sizes = sorted({2**power for power in range(share.bit_length()) if 2**power <= share} | {share})
    splits = []
    for size in sizes:
        fitting = int((memory_bytes - fixed_bytes) // (size * sample_bytes))
        steps = max(1, round(effective_batch / (size * ranks)))
        graphs = min(fitting, steps - (ranks > 1 and steps > 1), most or steps)
        # Large micro-batches need room for two graphs, so that the run still fits if graphs are larger than counted.
        if fitting >= (1 if size <= SMALLEST_MICRO_BATCH else 2):
            splits.append(BatchSplit(size, steps, graphs))
    if not splits:
        return BatchSplit(1, share, 0)

    def missed(batch: BatchSplit) -> float:
        return abs(batch.micro_batch * batch.dga_steps * ranks - effective_batch) / effective_batch

    close_splits = [batch for batch in splits if missed(batch) <= NEAR_BATCH] or [
        min(splits, key=missed)
    ]
    large = [
        batch for batch in close_splits if batch.micro_batch >= SMALLEST_MICRO_BATCH
    ] or close_splits[-1:]
    least = min(batch.relative_time for batch in large)
    return [batch for batch in large if batch.relative_time <= NEARLY_FASTEST * least][-1]


def graphs_room(memory_gib: float) -> float:
    """Bytes of a GPU's memory that a step with `--dga-retain auto` fills."""
    return GRAPHS_SHARE * USABLE_SHARE * memory_gib * GIB
