"""`zerovl data check`: shards that are there, every sample read, or counted into `sizes.json`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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


class Check(NamedTuple):
    """The number of faults in a folder, and the report that lists them by shard."""

    faults: int
    report: str


def _faults(members: Mapping[str, Member], decode: bool) -> Iterator[str]:
    """Yield the faults of a sample."""
    if TEXT_EXTENSION not in members:
        yield "no caption"
    if image_of(members) is None:
        yield "no picture"
    for extension, member in members.items():
        whole = True
        try:
            if extension == TEXT_EXTENSION:
                for line in caption_lines(member.content()) or [b""]:
                    caption_of(line)
            elif extension in IMAGE_EXTENSIONS:
                content = member.content()
                first, last = PICTURE_MARKS.get(extension, (b"", b""))
                whole = content.endswith(last, len(first))
                if not content.startswith(first):
                    yield f"picture is not a {extension}"
                elif decode or not whole:  # phones write more behind the end of a picture
                    decoded(content, lambda image: image.load())
        except BadCaption as error:
            yield "caption is empty" if error.reason == EMPTY else "caption is not UTF-8"
        except BadPicture as error:
            cause = f"picture cannot be decoded ({type(error.__cause__).__name__})"
            yield cause if whole else "picture is cut off"


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
) -> Check:
    """Check every sample of every shard of a local folder.

    Faults that are found:

    - shards that are cut off or are not tars, and keys that come twice in a shard
    - samples without picture or caption, captions that are empty or not UTF-8
    - pictures that do not begin as their format does, or are cut off
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

    def check(name: str) -> tuple[int, int, dict[str, list[str]]]:
        """Return samples, bytes, and fault -> keys of the samples that have it, [""] for one of the shard."""
        file, samples = path / name, 0
        faults: defaultdict[str, list[str]] = defaultdict(list)
        seen: set[str] = set()
        if not file.is_file():
            return 0, 0, {"shard missing": [""]}
        try:
            for key, members in locate_samples(file, whole=True):
                samples += 1
                if key in seen:
                    faults["key comes twice"].append(key)
                seen.add(key)
                for fault in _faults(members, decode):
                    faults[fault].append(key)
        except ShardError as error:
            faults[f"broken: {error}"] = [""]
        if hashes and sha256_of(file) != manifest.get(name, {}).get("sha256"):
            faults["hash differs from the manifest's"] = [""]
        if sizes is not None and name not in sizes:
            faults["not in sizes.json"] = [""]
        elif sizes is not None and sizes[name] != samples:
            faults[f"holds {samples} samples, and {sizes[name]} in sizes.json"] = [""]
        return samples, file.stat().st_size, faults

    counts, size_bytes, faults = zip(*_each(check, names, threads, progress), strict=True)
    lines = [
        f"{sum(counts):,} samples in {len(names):,} shards, {sum(size_bytes) / 1e9:.2f} GB read"
    ]
    for name, of_shard in zip(names, faults, strict=True):
        for kind, keys in of_shard.items():
            shown = ", ".join(keys[:_EXAMPLES]) + ", ..." * (len(keys) > _EXAMPLES)
            lines.append(f"{name}: {kind}" + (f": {len(keys)} ({shown})" if keys != [""] else ""))
    total = sum(len(keys) for of_shard in faults for keys in of_shard.values())
    lines.append(f"{total} faults." if total else "No faults.")
    return Check(total, "\n".join(map(printable, lines)))
