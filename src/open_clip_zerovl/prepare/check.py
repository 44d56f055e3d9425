"""`zerovl data check`: shards that are there, every sample read, or counted into `sizes.json`.

`check_shards` reads every sample; pictures are decoded only on request. `write_sizes` reads tar headers only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError, printable
from open_clip_zerovl.core.files import check_writable, sha256_of, write_atomically
from open_clip_zerovl.prepare.pack import read_manifest
from open_clip_zerovl.shards.files import SIZES_FILE, read_sizes
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS, BadPicture, decoded
from open_clip_zerovl.shards.tar import (
    TEXT_EXTENSION,
    Member,
    ShardError,
    image_of,
    locate_samples,
)
from open_clip_zerovl.shards.texts import EMPTY, BadCaption, caption_lines, caption_of

#: First and last bytes of a whole picture, by extension of `pictures.IMAGE_EXTENSIONS`.
PICTURE_MARKS = {
    "jpg": (b"\xff\xd8\xff", b"\xff\xd9"),
    "jpeg": (b"\xff\xd8\xff", b"\xff\xd9"),
    "png": (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"),
    "webp": (b"RIFF", b""),
}
_EXAMPLES = 5
Result = TypeVar("Result")


@dataclass
class ShardCheck:
    """The result of checking one shard.

    Attributes:
        shard: file name of the shard.
        faults: kind of fault -> how many.
        examples: kind of fault -> the first keys that have it.
    """

    shard: str
    samples: int = 0
    size_bytes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def fault(self, kind: str, key: str = "") -> None:
        """Count a fault, of the sample with this key."""
        self.faults[kind] += 1
        if key and len(self.examples.setdefault(kind, [])) < _EXAMPLES:
            self.examples[kind].append(key)


@dataclass(frozen=True)
class FolderCheck:
    """The result of checking the shards of a folder."""

    shards: list[ShardCheck]

    @property
    def faults(self) -> Counter[str]:
        """Count the faults of all shards by their kind."""
        return sum((shard.faults for shard in self.shards), Counter())


def check_report(result: FolderCheck) -> str:
    """Format the result as text: totals, then the faults of each shard."""
    samples = sum(shard.samples for shard in result.shards)
    size = sum(shard.size_bytes for shard in result.shards)
    lines = [f"{samples:,} samples in {len(result.shards):,} shards, {size / 1e9:.2f} GB read"]
    for shard in result.shards:
        for kind, count in shard.faults.items():
            keys = shard.examples.get(kind, [])
            shown = ", ".join(keys) + (", ..." if count > len(keys) else "")
            lines.append(f"{shard.shard}: {kind}" + (f": {count} ({shown})" if keys else ""))
    lines.append("No faults." if not result.faults else f"{sum(result.faults.values())} faults.")
    return "\n".join(map(printable, lines))


def _faults(members: Mapping[str, Member], decode: bool) -> Iterator[str]:
    """Yield the faults of a sample."""
    if TEXT_EXTENSION not in members:
        yield "no caption"
    if image_of(members) is None:
        yield "no picture"
    for extension, member in members.items():
        try:
            if extension == TEXT_EXTENSION:
                for line in caption_lines(member.content()) or [b""]:
                    caption_of(line)
            elif extension in IMAGE_EXTENSIONS:
                content = member.content()
                first, last = PICTURE_MARKS.get(extension, (b"", b""))
                if not content.startswith(first):
                    yield f"picture is not a {extension}"
                elif not content.endswith(last, len(first)):
                    yield "picture is cut off"
                elif decode:
                    decoded(content, Image.Image.load)
        except BadCaption as error:
            yield "caption is empty" if error.reason == EMPTY else "caption is not UTF-8"
        except BadPicture as error:
            yield f"picture cannot be decoded ({type(error.__cause__).__name__})"


def _each(
    function: Callable[[Any], Result], shards: Sequence[Any], threads: int, progress: bool
) -> list[Result]:
    """Call a function of each shard in some threads, with a bar."""
    with ThreadPoolExecutor(threads) as pool:
        done = pool.map(function, shards)
        return list(tqdm(done, total=len(shards), unit=" shards", disable=not progress))


def write_sizes(folder: str | Path, *, threads: int = 4, progress: bool = True) -> dict[str, int]:
    """Count the samples of every `*.tar` of a folder, as training does, and write `sizes.json` beside them.

    Args:
        threads: shards counted at the same time.

    Raises:
        UserError: no shards in the folder, a shard that cannot be read, a file that cannot be written.
    """
    path = Path(folder).expanduser()
    shards = sorted(path.glob("*.tar"))
    if not shards:
        raise UserError(f"{folder} holds no *.tar shards; give a source's own folder")
    check_writable(path / SIZES_FILE)

    def count(shard: Path) -> int:
        try:
            return sum(1 for _ in locate_samples(shard, whole=True))
        except ShardError as error:
            raise UserError(f"{shard} is broken: {error}; fetch or write it again") from error

    counts = _each(count, shards, threads, progress)
    sizes = {shard.name: count for shard, count in zip(shards, counts, strict=True)}
    write_atomically(path / SIZES_FILE, json.dumps(sizes, indent=1) + "\n")
    return sizes


def check_shards(
    folder: str | Path,
    *,
    threads: int = 4,
    hashes: bool = False,
    decode: bool = False,
    progress: bool = True,
) -> FolderCheck:
    """Check every sample of every shard of a local folder.

    Faults that are found:

    - shards that are cut off or are not tars, and keys that come twice in a shard
    - samples without picture or caption, captions that are empty or not UTF-8
    - pictures that do not begin or end as their format does
    - shards that `sizes.json` or the manifest lists and that are missing
    - shards that `sizes.json` does not list, or lists with another number of samples

    Args:
        threads: shards read at the same time.
        hashes: also compare each shard's SHA-256 with the manifest's.
        decode: also decode every picture. Slow, since it is limited by the processor and not by the disk.

    Raises:
        UserError: no such folder, no shards in it, or `hashes` without a manifest that has them.
    """
    path = Path(folder).expanduser()
    sizes = read_sizes(path)
    manifest = read_manifest(path).get("shards", {})
    if hashes and not manifest:
        raise UserError(f"{folder} has no manifest.json with hashes: check it without --hash.")
    names = sorted({p.name for p in path.glob("*.tar")} | set(sizes or {}) | set(manifest))
    if not names:
        raise UserError(f"{folder} holds no *.tar shards: give a source's own folder.")

    def check(name: str) -> ShardCheck:
        result = ShardCheck(name)
        file = path / name
        seen: set[str] = set()
        if not file.is_file():
            result.fault("shard missing")
            return result
        result.size_bytes = file.stat().st_size
        try:
            for key, members in locate_samples(file, whole=True):
                result.samples += 1
                if key in seen:
                    result.fault("key comes twice", key)
                seen.add(key)
                for fault in _faults(members, decode):
                    result.fault(fault, key)
        except ShardError as error:
            result.fault(f"broken: {error}")
        if hashes and sha256_of(file) != manifest.get(name, {}).get("sha256"):
            result.fault("hash differs from the manifest's")
        if sizes is not None and name not in sizes:
            result.fault("not in sizes.json")
        elif sizes is not None and sizes[name] != result.samples:
            result.fault(f"holds {result.samples} samples, and {sizes[name]} in sizes.json")
        return result

    return FolderCheck(_each(check, names, threads, progress))
