"""The data of A.5: a source in two halves that differ in context, long captions with a red frame and short ones without.

    python -m scripts.paper.context_bias DATA/cc3m DATA     writes DATA/cc3m-long and DATA/cc3m-short

Captions are ordered by words, then by characters; the half with the longer ones is `long`. Its pictures get a red frame, drawn
over 3 % of their shorter side, and are stored as JPEG of quality 95; the other half is copied byte for byte. Each shard becomes
one of either half. A call after an interruption goes on with the shards that are missing.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import ImageDraw
from tqdm import tqdm

from open_clip_zerovl.core.errors import UserError, ended
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.shards.files import SIZES_FILE, write_shard
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS, BadPicture
from open_clip_zerovl.shards.tar import Sample, ShardError, read_samples

RED = (255, 0, 0)
FRAME_SHARE = 0.03  # of the picture's shorter side; the paper gives no width

Length = tuple[int, int]


def caption_length(caption: str) -> Length:
    """Count words and characters."""
    return len(caption.split()), len(caption)


def framed(content: bytes) -> bytes:
    """Draw a red frame over a picture's edge, as a JPEG.

    Raises:
        BadPicture: it cannot be decoded.
    """
    picture = decode_image(content).convert("RGB")
    edge = (0, 0, picture.width - 1, picture.height - 1)
    width_px = max(1, round(FRAME_SHARE * min(picture.size)))
    ImageDraw.Draw(picture).rectangle(edge, outline=RED, width=width_px)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def shards_of(folder: Path) -> list[Path]:
    """List the shards of a folder in order.

    Raises:
        UserError: there are none.
    """
    if shards := sorted(folder.glob("*.tar")) or sorted(folder.glob("train/*.tar")):
        return shards
    raise UserError(f"{folder} holds no shards; zerovl data public cc3m --out {folder} writes them")


def pairs_of(shard: Path) -> Iterator[tuple[str, Sample]]:
    """Yield (caption, sample) of each sample with a caption and a picture.

    Raises:
        UserError: a shard that cannot be read.
    """
    try:
        for sample in read_samples(shard):
            caption = sample.files.get("txt", b"").decode(errors="replace").strip()
            if caption and any(extension in sample.files for extension in IMAGE_EXTENSIONS):
                yield caption, sample
    except ShardError as error:
        raise UserError(
            f"{shard} is not a readable, uncompressed tar ({error}); fetch or write it again"
        ) from error


def threshold_of(lengths: Counter[Length]) -> Length:
    """Choose the length from which on a caption is long, so that the halves are as equal as ties allow.

    Raises:
        UserError: all captions have one length.
    """
    if len(lengths) < 2:
        raise UserError("all captions have the same length, so they make no two halves")
    total, below, best = lengths.total(), 0, (float("inf"), (0, 0))
    for length in sorted(lengths):
        if below:
            best = min(best, (abs(2 * below - total), length))
        below += lengths[length]
    return best[1]


def write_halves(source: Path, out: Path, *, progress: bool = True) -> dict[str, int]:
    """Write both halves of a source, and count their pairs and the pictures that could not be decoded (`bad`).

    Raises:
        UserError: no shards, a shard that cannot be read, captions of one length, a folder that cannot be written.
    """
    halves = {name: out / f"{source.name}-{name}" for name in ("long", "short")}
    for folder in halves.values():
        check_writable(folder, folder=True)
    shards = shards_of(source)
    lengths: Counter[Length] = Counter()
    for shard in tqdm(shards, desc="captions", unit="shard", disable=not progress):
        lengths.update(caption_length(caption) for caption, _ in pairs_of(shard))
    threshold = threshold_of(lengths)
    sizes: dict[str, dict[str, int]] = {name: {} for name in halves}
    bad = 0
    for shard in tqdm(shards, desc="frames", unit="shard", disable=not progress):
        kept: dict[str, list[Sample]] = {name: [] for name in halves}
        if all((folder / shard.name).is_file() for folder in halves.values()):
            for name, folder in halves.items():
                sizes[name][shard.name] = sum(1 for _ in read_samples(folder / shard.name))
            continue
        for caption, sample in pairs_of(shard):
            if caption_length(caption) < threshold:
                kept["short"].append(sample)
                continue
            extension = next(
                extension for extension in IMAGE_EXTENSIONS if extension in sample.files
            )
            others = {
                name: content
                for name, content in sample.files.items()
                if name not in IMAGE_EXTENSIONS
            }
            try:
                kept["long"].append(
                    Sample(sample.key, {"jpg": framed(sample.files[extension]), **others})
                )
            except BadPicture:
                bad += 1
        for name, folder in halves.items():
            sizes[name][shard.name] = write_shard(folder / shard.name, kept[name])
    for name, folder in halves.items():
        write_atomically(folder / SIZES_FILE, json.dumps(sizes[name], indent=1) + "\n")
    return {
        **{name: sum(counts.values()) for name, counts in sizes.items()},
        "bad": bad,
        "long_from": threshold[0],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, help="folder of the source's shards, such as DATA/cc3m"
    )
    parser.add_argument("out", type=Path, help="folder in which NAME-long and NAME-short are made")
    options = parser.parse_args(argv)

    def run() -> None:
        done = write_halves(options.source, options.out)
        print(
            f"{done['long']:,} pairs with long captions (from {done['long_from']} words on) and a red frame, {done['short']:,} "
            f"with short ones; {done['bad']} pictures could not be decoded and were left out."
        )

    return ended(run, "context_bias.py")


if __name__ == "__main__":
    sys.exit(main())
