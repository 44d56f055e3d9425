"""CPU milliseconds a picture from bytes to the transform's picture: PIL's path and the path on arrays, one thread.

    OMP_NUM_THREADS=1 python scripts/bench/pixels.py [--sizes 384x256,640x427,1280x854] [--rounds 12]

Two photographs (scikit-learn's) as JPEGs of quality 85, open_clip's training transform with a crop of 60-100 % of the area to
224 px, with and without AutoAugment. "stock" is open_clip's way: PIL decodes at full size. The ways take turns in every round,
by the process's CPU clock; medians. "decode" is decoding only.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from open_clip.transform import image_transform
from PIL import Image
from sklearn.datasets import load_sample_image

from open_clip_zerovl.core.randomness import seeded
from open_clip_zerovl.data.images import crop_of, decode_image, split_normalize
from open_clip_zerovl.data.pixels import pictures
from open_clip_zerovl.data.transforms import with_auto_augment

WAYS = ("stock", "pil", "arrays", "decode, pil", "decode, arrays")


def jpeg(name: str, size: tuple[int, int]) -> bytes:
    """A photograph's bytes at a size."""
    buffer = io.BytesIO()
    Image.fromarray(load_sample_image(name)).resize(size).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def measure(size: tuple[int, int], augment: bool, rounds: int) -> dict[str, float]:
    """Median milliseconds of each way."""
    photographs = [jpeg(name, size) for name in ("china.jpg", "flower.jpg")]
    transform = split_normalize(image_transform(224, True, aug_cfg={"scale": (0.6, 1.0)}))[0]
    if augment:
        transform = with_auto_augment(transform)
    crop = crop_of(transform)
    arrays, decode_arrays = pictures(transform, "arrays")
    ways: dict[str, Callable[[bytes], object]] = dict(
        zip(
            WAYS,
            (
                lambda data: transform(decode_image(data)),
                lambda data: transform(decode_image(data, crop)),
                lambda data: arrays(decode_arrays(data, crop)),
                partial(decode_image, crop=crop),
                lambda data: decode_arrays(data, crop),
            ),
            strict=True,
        )
    )
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way, run in ways.items():
            with seeded(number):
                begin = time.process_time()
                for _ in range(4):
                    for data in photographs:
                        run(data)
                times[way].append((time.process_time() - begin) / (4 * len(photographs)) * 1000)
    return {way: statistics.median(values) for way, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="384x256,640x427,1280x854", help="of the JPEGs, in pixels")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"| JPEG | AutoAugment | {' | '.join(WAYS)} | stock / arrays | pil / arrays |\n|---|---|{'--:|' * (len(WAYS) + 2)}"
    )
    for augment in (False, True):
        for word in args.sizes.split(","):
            width, height = map(int, word.split("x"))
            found = measure((width, height), augment, args.rounds)
            cells = [f"{found[way]:.2f}" for way in WAYS]
            ratios = [f"{found[way] / found['arrays']:.2f}" for way in ("stock", "pil")]
            print(f"| {word} | {'yes' if augment else 'no'} | {' | '.join(cells + ratios)} |", flush=True)


if __name__ == "__main__":
    main()
