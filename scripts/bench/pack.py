"""CPU time of `zerovl data pack` beside decoding, resizing and encoding alone, on the same pictures in one thread.

    python -m scripts.bench.pack [--photographs TAR] [--pictures 3781] [--max-side 224] [--small 10000]

The second table packs many tiny pictures, whose time is that of everything but the pictures, and states the seconds from the
last picture to the end of the call.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from PIL import Image

from open_clip_zerovl.prepare.pack import packing
from open_clip_zerovl.prepare.public.gather import Work
from open_clip_zerovl.prepare.public.pictures import Encoding, encode_picture
from open_clip_zerovl.shards.members import image_of, read_samples
from scripts.bench.near import encoded, fractal


def alone(pictures: Sequence[bytes], longer_side_px: int | None) -> dict[str, float]:
    """Pictures a second of CPU time: decoded; decoded, resized and encoded; and with the hash of their pixels, as pack does."""
    encoding = Encoding(shorter_side_px=None, longer_side_px=longer_side_px, upright=True)

    def plain(content: bytes) -> None:
        image = Image.open(io.BytesIO(content)).convert("RGB")
        scale = (longer_side_px or max(image.size)) / max(image.size)
        if scale < 1:
            size = round(image.width * scale), round(image.height * scale)
            image.resize((max(1, size[0]), max(1, size[1])), Image.Resampling.LANCZOS).save(
                io.BytesIO(), "JPEG", quality=encoding.quality
            )

    kinds: dict[str, Callable[[bytes], object]] = {
        "decoded, resized, encoded": plain,
        "with the hash of the pixels": lambda content: encode_picture(content, encoding, hashed=True),
    }
    found = {}
    for name, use in kinds.items():
        begin = time.process_time()
        for content in pictures:
            use(content)
        found[name] = len(pictures) / (time.process_time() - begin)
    return found


def packed(folder: Path, out: Path, longer_side_px: int | None, threads: int) -> tuple[float, float, float]:
    """CPU seconds of a call; seconds, and CPU seconds, from the last picture to its end."""
    ends: list[tuple[float, float]] = []
    collected = packing.Collecting.run

    def timed(self: packing.Collecting) -> None:
        collected(self)
        ends.append((time.perf_counter(), time.process_time()))

    packing.Collecting.run = timed  # type: ignore[method-assign]
    begin = time.process_time()
    try:
        settings = packing.PackSettings(max_side_px=longer_side_px, test_share=0.1)
        packing.pack([str(folder)], out, settings, work=Work(threads=threads, progress=False))
    finally:
        packing.Collecting.run = collected  # type: ignore[method-assign]
    (last, last_cpu), cpu = ends[0], time.process_time()
    return cpu - begin, time.perf_counter() - last, cpu - last_cpu


def unique(number: int) -> bytes:
    """A tiny picture that no other number has."""
    content = io.BytesIO()
    Image.new("RGB", (16, 16), (number % 256, number // 256 % 256, number // 65536)).save(content, "PNG")
    return content.getvalue()


def write_folder(folder: Path, pictures: Sequence[bytes]) -> Path:
    """Pictures with a caption beside each."""
    folder.mkdir()
    for number, content in enumerate(pictures):
        (folder / f"{number:05d}.jpg").write_bytes(content)
        (folder / f"{number:05d}.txt").write_text(f"a photo of thing {number}, one of many", encoding="utf-8")
    return folder


def main() -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path, help="a tar of pictures")
    parser.add_argument("--pictures", type=int, default=3781)
    parser.add_argument("--max-side", type=int, default=224)
    parser.add_argument("--small", type=int, default=10_000, help="tiny pictures of the second table")
    parser.add_argument("--threads", type=int, default=8)
    chosen = parser.parse_args()
    if chosen.photographs is None:
        pictures = [encoded(fractal(seed)) for seed in range(chosen.pictures)]
    else:
        contents = (image_of(sample.files) for sample in read_samples(chosen.photographs))
        pictures = list(islice((content for content in contents if content is not None), chosen.pictures))
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_folder(Path(scratch, "in"), pictures)
        print("| pictures per second of CPU time | alone | with the hash of the pixels | pack, all of it | share |")
        print("|---|--:|--:|--:|--:|")
        for side in (None, chosen.max_side):
            plain, hashed = alone(pictures, side).values()
            cpu_seconds, _, _ = packed(folder, Path(scratch, f"out-{side}"), side, chosen.threads)
            whole = len(pictures) / cpu_seconds
            name = "bytes kept" if side is None else f"shrunk to {side} px"
            print(f"| {name} | {plain:,.0f} | {hashed:,.0f} | {whole:,.0f} | {whole / plain:.0%} |", flush=True)
        tiny = [unique(number) for number in range(chosen.small)]
        cpu_seconds, seconds, last_cpu = packed(
            write_folder(Path(scratch, "small"), tiny), Path(scratch, "all"), None, chosen.threads
        )
        print(f"\n{chosen.small:,} tiny pictures: {1e3 * cpu_seconds / chosen.small:.2f} ms of CPU time each, ", end="")
        print(f"{seconds:.1f} s ({last_cpu:.1f} s of CPU time) from the last picture to the end")


if __name__ == "__main__":
    main()
