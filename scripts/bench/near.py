"""How far copies and distinct pictures are apart by `datasets.near`, and how fast hashes are made and compared.

    python -m scripts.bench.near [--photographs TAR] [--pictures 300] [--test 25000] [--training 50000]

Pictures are those of a tar; without one, noise whose amplitude falls with its frequency, as a photograph's does. Prints a row
for each kind of copy: quantiles of the distance, and the share within NEAR.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from open_clip_zerovl.prepare.dedup.near import NEAR, Hashes, NearIndex, picture_hashes
from open_clip_zerovl.report.tables import markdown_table
from open_clip_zerovl.shards.members import image_of, read_samples


def fractal(seed: int, width: int = 400, height: int = 300) -> Image.Image:
    """Noise with an amplitude of frequency to the power of -1.2, in colours that go together."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    spectrum = (rng.normal(size=(3, *frequency.shape)) + 1j * rng.normal(size=(3, *frequency.shape))) / frequency**1.2
    spectrum[:, 0, 0] = 0
    pixels = np.fft.irfft2(spectrum, (height, width))
    pixels = pixels[:1] + 0.3 * pixels
    return Image.fromarray((128 + 45 * pixels / pixels.std()).clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


def encoded(image: Image.Image, quality: int = 90) -> bytes:
    """The picture as JPEG."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def resized(image: Image.Image, factor: float) -> Image.Image:
    """The picture with its sides times a factor."""
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


def cropped(image: Image.Image, share: float, corner: bool = False) -> Image.Image:
    """The picture without a share of its width and height: half of it on each side, or all of it at the right and below."""
    x, y = (0.0, 0.0) if corner else (image.width * share / 2, image.height * share / 2)
    return image.crop((round(x), round(y), round(x + image.width * (1 - share)), round(y + image.height * (1 - share))))


def bordered(image: Image.Image, colour: str) -> Image.Image:
    """The picture in a border of 3 % of its longer side."""
    return ImageOps.expand(image, round(0.03 * max(image.size)), colour)


def captioned(image: Image.Image) -> Image.Image:
    """The picture with a line of text near its lower edge."""
    copy = image.copy()
    place = (round(0.05 * image.width), round(0.88 * image.height))
    ImageDraw.Draw(copy).text(place, "a shop of photographs", "white", font_size=image.height / 16)
    return copy


def photographs(tar: str, count: int) -> list[Image.Image]:
    """The first pictures of a tar, no larger than 640 pixels."""
    found: list[Image.Image] = []
    for sample in read_samples(tar):
        content = image_of(sample.files)
        if content is not None and len(found) < count:
            image = Image.open(io.BytesIO(content)).convert("RGB")
            image.thumbnail((640, 640))
            found.append(image)
    return found


COPIES: dict[str, Callable[[Image.Image], bytes]] = {
    "JPEG, quality 75": lambda image: encoded(image, 75),
    "JPEG, quality 30": lambda image: encoded(image, 30),
    "half size": lambda image: encoded(resized(image, 0.5), 75),
    "a quarter of the size": lambda image: encoded(resized(image, 0.25), 60),
    "double size": lambda image: encoded(resized(image, 2)),
    "squashed to 224 x 224": lambda image: encoded(image.resize((224, 224), Image.Resampling.BICUBIC)),
    "grey": lambda image: encoded(image.convert("L")),
    "brighter by 20 %": lambda image: encoded(ImageEnhance.Brightness(image).enhance(1.2)),
    "cropped by 2 %": lambda image: encoded(cropped(image, 0.02)),
    "cropped by 2 % at one corner": lambda image: encoded(cropped(image, 0.02, corner=True)),
    "cropped by 5 %": lambda image: encoded(cropped(image, 0.05)),
    "cropped by 5 %, half size": lambda image: encoded(resized(cropped(image, 0.05), 0.5), 60),
    "cropped by 5 % at one corner": lambda image: encoded(cropped(image, 0.05, corner=True)),
    "mirrored": lambda image: encoded(ImageOps.mirror(image), 75),
    "mirrored, half size": lambda image: encoded(resized(ImageOps.mirror(image), 0.5), 75),
    "white border of 3 %": lambda image: encoded(bordered(image, "white"), 75),
    "black border of 3 %, half size": lambda image: encoded(resized(bordered(image, "black"), 0.5), 75),
    "rotated by 2 degrees": lambda image: encoded(image.rotate(2, Image.Resampling.BICUBIC)),
    "a line of text": lambda image: encoded(captioned(image)),
    "cropped by 10 %": lambda image: encoded(cropped(image, 0.10)),
}


def false_pairs(every: list[Hashes]) -> set[tuple[int, int]]:
    """Numbers of different pictures that `zerovl data near` takes for copies of each other."""
    asked = np.repeat(np.arange(len(every)), [len(own) for own in every])
    held = np.repeat(np.arange(len(every)), [len(own[::2]) for own in every])
    tests = np.concatenate([own[::2] for own in every])
    found: set[tuple[int, int]] = set()
    for number, hashes in zip(asked.tolist(), np.concatenate(every), strict=True):
        near = held[np.bitwise_count(tests ^ hashes).sum(axis=-1) <= NEAR]
        found.update((min(number, other), max(number, other)) for other in near.tolist() if other != number)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", metavar="TAR")
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--test", type=int, default=25_000)
    parser.add_argument("--training", type=int, default=50_000)
    arguments = parser.parse_args()
    if arguments.photographs:
        pictures = photographs(arguments.photographs, arguments.pictures)
    else:
        pictures = [fractal(seed) for seed in range(arguments.pictures)]
    contents = [encoded(image) for image in pictures]
    start = time.process_time()
    every = [picture_hashes(content) for content in contents]
    milliseconds = 1000 * (time.process_time() - start) / len(contents)
    rows = []
    for name, copy in COPIES.items():
        pairs = zip(every, (picture_hashes(copy(image)) for image in pictures), strict=True)
        distances = np.array([np.bitwise_count(own[::2, None] ^ other).sum(axis=-1).min() for own, other in pairs])
        low, high = np.quantile(distances, (0.5, 0.95))
        rows.append(
            [name, f"{low:.0f}", f"{high:.0f}", f"{distances.max()}", f"{100 * (distances <= NEAR).mean():.1f} %"]
        )
    print(markdown_table(["copy", "median", "95 %", "most", f"within {NEAR}"], rows))
    hashes = np.stack([own[0] for own in every])
    between = np.bitwise_count(hashes[:, None] ^ hashes).sum(axis=-1)[np.triu_indices(len(hashes), 1)]
    print(
        f"distinct pictures, {len(between):,} pairs: mean {between.mean():.1f}, deviation {between.std():.1f}, least "
        f"{between.min()}, within {NEAR}: {(between <= NEAR).sum()}; where borders and mirror images count: "
        f"{len(false_pairs(every))}"
    )
    rng = np.random.default_rng(0)
    index = NearIndex(rng.integers(0, 2**63, (arguments.test, 4), dtype=np.uint64))
    asked = rng.integers(0, 2**63, (arguments.training, 4), dtype=np.uint64)
    start = time.process_time()
    index.nearest(asked)
    seconds = time.process_time() - start
    print(f"hashing: {milliseconds:.1f} ms of CPU time a picture of {pictures[-1].width} x {pictures[-1].height}")
    print(
        f"comparing {arguments.training:,} with {arguments.test:,}: {seconds:.1f} s of CPU time, "
        f"{1e9 * seconds / arguments.training / arguments.test:.2f} ns a pair"
    )


if __name__ == "__main__":
    main()
