"""Settings of the commands that write shards, which are also their flags. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.flags import FROM_0_TO_1, SEED, at_least, flag

FORMATS = ("folder", "classes", "table", "json", "parquet", "arrow", "webdataset")
JPEG_QUALITY = 95  # of pictures that cannot keep their bytes
MOST_PIXELS = 150_000_000  # a larger width times height is refused before it is decoded


@dataclass(frozen=True)
class Limits:
    """Limits of one transfer.

    Attributes:
        idle_seconds: longest wait for a connection, or for the next bytes.
        total_seconds: longest time of one attempt, redirects included.
        max_bytes: longest answer.
        private_redirects: follow redirects to addresses of this machine and its network. Without, a list of addresses from
            elsewhere reaches only the private addresses that it names itself.
        user_agent: the name that hosts see. Some refuse Python's.
    """

    idle_seconds: float = 10.0
    total_seconds: float = flag(30.0, "seconds a picture may take", option="--timeout")
    max_bytes: int = 50_000_000
    private_redirects: bool = False
    user_agent: str = "Mozilla/5.0 (compatible; open_clip_zerovl; research dataset download)"


@dataclass(frozen=True)
class Work:
    """Threads, retries and progress of a call, on which the shards do not depend.

    Attributes:
        threads: pictures fetched and encoded at the same time.
        attempts: attempts at a picture whose failure is transient.
        backoff_seconds: pause after the first failed attempt, doubled after each further one.
        retry_failed: try the rows again that failed for a transient reason, of finished shards too.
        progress: print a progress bar and a last line.
    """

    threads: int = flag(32, "pictures at the same time", range=at_least(1))
    attempts: int = 3
    backoff_seconds: float = 0.5
    retry_failed: bool = flag(False, "try rows again that failed for a passing reason")
    progress: bool = flag(True, "no progress bar, no last line", option="--quiet")


@dataclass(frozen=True)
class PackWork(Work):
    """Work on pictures that mostly lie on this disk."""

    threads: int = flag(
        max(8, 2 * (os.cpu_count() or 1)), "pictures at the same time", range=at_least(1)
    )


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Annotations of a public dataset, and the size of its shards."""

    source: tuple[str, ...] | None = flag(
        None,
        "local annotation files, and folders or zips of pictures (default: fetch them)",
        nargs="+",
        metavar="FILE",
    )
    shard_size: int = flag(10_000, "pictures a shard", range=at_least(1))


@dataclass(frozen=True)
class Columns:
    """Columns as the command line names them, None for those that are guessed.

    Attributes:
        picture: the column of the picture.
        captions: columns of captions, all of them used.
        source: the column whose values are the sources.
        pictures_in: the folder that relative paths are relative to. None for that of the file.
        separator: between the columns of a table.
    """

    picture: str | None = flag(
        None, "path, address or bytes of the picture", option="--picture-column", metavar="COL"
    )
    captions: tuple[str, ...] | None = flag(
        None,
        "caption; several: all of them are captions",
        option="--caption-column",
        nargs="+",
        metavar="COL",
    )
    source: str | None = flag(
        None,
        "one source for each value (folder: each first folder on the pictures' paths)",
        option="--source-column",
        metavar="COL",
    )
    pictures_in: Path | None = flag(
        None, "folder that relative paths lead from (default: the table's)", metavar="DIR"
    )
    separator: str | None = flag(
        None, "character between columns (default: found in the first line)", metavar="CHAR"
    )


@dataclass(frozen=True)
class PackSettings:
    """Settings that decide the contents of the shards, besides the inputs.

    Attributes:
        form: the form of all inputs (FORMATS). None detects each.
        columns: names of columns, and the folder of relative paths.
        templates: the templates of the captions of classes. None for `rows.TEMPLATE`.
        max_side_px: larger pictures are shrunk to this longer side. None keeps them.
        shorter_side_px: larger training pictures are shrunk to this shorter side. None keeps them. Held-out ones stay, since
            shrunk pictures change the scores.
        min_side_px: smaller pictures are refused.
        test_share: share of the pictures that is held out.
        shard_size: samples a shard at most.
        seed: the seed of the order and of the choice of held-out pictures.
        exclusion: pictures to leave out (`store.Exclusion`).
    """

    form: str | None = flag(
        None, "form of the inputs (default: detected)", option="--format", choices=FORMATS
    )
    columns: Columns = field(default_factory=Columns)
    templates: tuple[str, ...] | None = flag(
        None,
        'captions of pictures in folders of classes, {} for the class (default: "a photo of a {}.")',
        option="--template",
        nargs="+",
        metavar="TEXT",
    )
    max_side_px: int | None = flag(
        None,
        "shrink larger pictures to this longer side",
        option="--max-side",
        range=at_least(1),
        metavar="PX",
    )
    shorter_side_px: int | None = None
    min_side_px: int = flag(
        16, "refuse smaller pictures", option="--min-side", range=at_least(1), metavar="PX"
    )
    test_share: float = flag(
        0.0,
        "hold out this share of the pictures (default: 0, none)",
        range=FROM_0_TO_1,
        metavar="SHARE",
    )
    shard_size: int = flag(10_000, "pictures a shard", range=at_least(1))
    seed: int = flag(0, "seed of the order and of the choice of held-out pictures", range=SEED)
    exclusion: Any = None

    def described(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return {
            "format": self.form,
            **asdict(self.columns),
            "templates": self.templates,
            "pictures_in": self.columns.pictures_in and str(self.columns.pictures_in),
            "test_share": self.test_share,
            "shard_size": self.shard_size,
            "seed": self.seed,
            "encoding": {
                "shorter_side_px": self.shorter_side_px,
                "quality": JPEG_QUALITY,
                "min_side_px": self.min_side_px,
                "max_pixels": MOST_PIXELS,
                "longer_side_px": self.max_side_px,
                "upright": True,
            },
            "left_out": [[each.reason, each.settings] for each in (self.exclusion,) if each],
        }
