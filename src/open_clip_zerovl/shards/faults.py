"""Faults of captions and pictures, and the result of checking a source.

`prepare.check` checks shards.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from PIL import Image

from open_clip_zerovl.core.errors import printable
from open_clip_zerovl.shards.pictures import BadPicture, decoded
from open_clip_zerovl.shards.texts import EMPTY, BadCaption, caption_lines, caption_of

#: First and last bytes of a whole picture, by extension of `pictures.IMAGE_EXTENSIONS`.
PICTURE_MARKS = {
    "jpg": (b"\xff\xd8\xff", b"\xff\xd9"),
    "jpeg": (b"\xff\xd8\xff", b"\xff\xd9"),
    "png": (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"),
    "webp": (b"RIFF", b""),
}
_EXAMPLES = 5


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
    """The result of checking the shards of a folder, and the time that it took."""

    shards: list[ShardCheck]
    seconds: float

    @property
    def samples(self) -> int:
        """Samples of all shards."""
        return sum(shard.samples for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def faults(self) -> Counter[str]:
        """Kind of fault -> how many, in all shards."""
        return sum((shard.faults for shard in self.shards), Counter())


def check_report(result: FolderCheck) -> str:
    """The result as text: totals and rate, then the faults of each shard."""
    lines = [
        f"{result.samples:,} samples in {len(result.shards):,} shards, {result.size_bytes / 1e9:.2f} GB read in "
        f"{result.seconds:.1f} s ({result.size_bytes / 1e6 / max(result.seconds, 1e-9):,.0f} MB/s)"
    ]
    for shard in result.shards:
        for kind, count in shard.faults.items():
            keys = shard.examples.get(kind, [])
            shown = printable(", ".join(keys)) + (", ..." if count > len(keys) else "")
            lines.append(
                printable(f"{shard.shard}: {kind}") + (f": {count} ({shown})" if keys else "")
            )
    lines.append("No faults." if not result.faults else f"{sum(result.faults.values())} faults.")
    return "\n".join(lines)


def caption_fault(content: bytes) -> str:
    """Return the fault of a text of captions, "" for none."""
    try:
        for line in caption_lines(content) or [b""]:
            caption_of(line)
    except BadCaption as error:
        return "caption is empty" if error.reason == EMPTY else "caption is not UTF-8"
    return ""


def picture_fault(content: bytes, extension: str | None = None, *, decode: bool = False) -> str:
    """The fault of an encoded picture, or "".

    Args:
        extension: its kind in PICTURE_MARKS; None to know it by its first bytes, where other formats are opened.
        decode: also decode it; without this only the first and last bytes of a kind in PICTURE_MARKS are checked.
    """
    starts = (kind for kind, (first, _) in PICTURE_MARKS.items() if content.startswith(first))
    kind = extension or next(starts, None)
    if kind in PICTURE_MARKS:
        first, last = PICTURE_MARKS[kind]
        if not content.startswith(first):
            return f"picture is not a {kind}"
        if not content.endswith(last, len(first)):
            return "picture is cut off"
        if not decode:
            return ""
    try:
        decoded(content, Image.Image.load if decode else Image.Image.getbands)
    except BadPicture as error:
        return f"picture cannot be decoded ({type(error.__cause__).__name__})"
    return ""
