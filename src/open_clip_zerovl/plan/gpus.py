"""A table of GPUs, as their makers describe them, and the micro-batch that fits on one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from open_clip_zerovl.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """A GPU as its maker describes it.

    Attributes:
        memory_gib: as sold.
        tflops: peak of dense fp16 products summed in fp32, 10^12 a second.
        bf16: whether it multiplies bf16 natively.
    """

    label: str
    memory_gib: float
    tflops: float
    bf16: bool = True


# Makers' data sheets; figures "with sparsity" are halved.
GPUS = {
    "v100": Gpu("V100 32 GB", 32, 125, bf16=False),
    "v100-16": Gpu("V100 16 GB", 16, 125, bf16=False),
    "t4": Gpu("T4", 16, 65, bf16=False),
    "a10": Gpu("A10", 24, 125),
    "a30": Gpu("A30", 24, 165),
    "a40": Gpu("A40", 48, 150),
    "a6000": Gpu("RTX A6000", 48, 155),
    "a100": Gpu("A100 40 GB", 40, 312),
    "a100-80": Gpu("A100 80 GB", 80, 312),
    "h100": Gpu("H100 80 GB", 80, 989),
    "h200": Gpu("H200", 141, 989),
    "l4": Gpu("L4", 24, 121),
    "l40s": Gpu("L40S", 48, 362),
    "rtx3090": Gpu("RTX 3090", 24, 71),
    "rtx4090": Gpu("RTX 4090", 24, 165),
}

CPU_MICRO_BATCH = 16  # of a CPU, where nothing says another
USABLE_SHARE = 0.92  # of a GPU's memory: the rest is CUDA's context and fragmentation


def micro_batch_for(memory_gib: float) -> int:
    """The micro-batch of ViT-B/16 + BERT-base for a GPU: the paper's 128 on 32 GiB in proportion, a power of two.

    A board sold with 32 GB reports a little less, hence the tolerance of 5 %.
    """
    if memory_gib <= 0:
        raise UserError(f"a GPU with {memory_gib:g} GiB of memory holds nothing; give its memory in GiB")
    return max(1, 2 ** math.floor(math.log2(4 * memory_gib * 1.05)))


def parse_hardware(text: str) -> tuple[Gpu, int]:
    """`v100:8` -> the GPU and how many; the count is 1 where it is left out.

    Raises:
        UserError: a GPU that the table does not have, or no count.
    """
    name, _, count = text.partition(":")
    gpu = GPUS.get(name.lower().replace("_", "-"))
    if gpu is None:
        raise UserError(f"--assume {text} names no GPU of the table; give one of {', '.join(GPUS)}, as v100:8")
    if count and (not count.isdigit() or int(count) < 1):
        raise UserError(f"--assume {text} tells no number of GPUs after the colon; write {name}:8")
    return gpu, int(count or 1)
