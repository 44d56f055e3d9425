"""Settings of the evaluations, which are also their commands' flags. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.core.files import check_writable
from open_clip_zerovl.core.flags import FROM_0_TO_1, Range, at_least, flag


def _captions(text: str) -> int | None:
    return None if text == "all" else int(text)


@dataclass(frozen=True)
class RetrievalSettings:
    """Settings of retrieval.

    Attributes:
        captions_per_image: number of captions counted for an image, the first ones. None for all. The papers count
            five (COCO's test set has 25,010 captions in all).
        paper_transform: with the checkpoint's mean and standard deviation, scaled to the model's size (A.9).
    """

    split: str = flag("test", "split of the sets")
    captions_per_image: int | None = flag(
        5,
        "captions kept of each image (default 5, as the papers count COCO; CLIP_benchmark: all)",
        option="--captions",
        kind=_captions,
        range=at_least(1),
        metavar="N|all",
    )
    paper_transform: bool = flag(
        False,
        "squash to 256 and crop 224 as in the paper (A.9) instead of the checkpoint's own transform",
    )


@dataclass(frozen=True)
class RetrievalFiles:
    """Files to write, None for those not requested."""

    json: Path | None = flag(
        None, "also write the metrics as JSON", option="--output", metavar="FILE.json"
    )
    gallery: Path | None = flag(
        None, "also show hits and misses as one HTML page", metavar="FILE.html"
    )

    def check(self) -> None:
        """Refuse files that cannot be written."""
        for path in (self.json, self.gallery):
            if path is not None:
                check_writable(path)


@dataclass(frozen=True, kw_only=True)
class ZeroShotSettings:
    """Settings of zero-shot classification.

    Attributes:
        template: captions with `{}` in the place of the class, or files of them. (): the set's own, else CLIP's short list.
        class_names: words for the classes. None: the set's own, or its labels with blanks for underscores.
        cache: where pictures' embeddings are kept for a later call. None: nowhere.
    """

    template: tuple[str, ...] = flag(
        (),
        "caption with {} in the place of the class, or a file of them, a line each; several are averaged (default: the set's, "
        "else CLIP's short list of seven)",
        metavar="TEXT|FILE",
    )
    class_names: Path | None = flag(
        None,
        "names of the classes: a line each in the order of the labels, or JSON of label and name",
        metavar="FILE",
    )
    split: str = flag(
        "test",
        "folder of the split, if the set has one; also chooses the split of a dataset with its own",
    )
    label: str = flag(
        "cls", "where shards keep the class: cls or json:FIELD", metavar="cls|json:FIELD"
    )
    cache: Path | None = flag(
        None, "keep the pictures' embeddings here: other templates then take seconds", metavar="DIR"
    )
    output: Path | None = flag(None, "also write all results as JSON", metavar="FILE.json")


@dataclass(frozen=True)
class SearchSettings:
    """A query (a text, a picture, or both), the number of hits, and files to write."""

    words: str = ""
    image: Path | None = flag(
        None, "search for pictures like this one, combined with the words", metavar="FILE"
    )
    best: int = flag(10, "pictures to show", range=at_least(1), metavar="K")
    cache: Path | None = flag(
        None, "folder of stored embeddings (default ~/.cache/zerovl/search)", metavar="DIR"
    )
    page: Path | None = flag(None, "also write a page with thumbnails", metavar="FILE.html")
    output: Path | None = flag(None, "also write the hits as JSON", metavar="FILE.json")


@dataclass(frozen=True)
class ServeSettings:
    """A page of searches on this machine."""

    serve: bool = flag(
        False, "search in a browser, by words or a dropped picture; needs the extra [app]"
    )
    host: str = flag(
        "127.0.0.1", "with --serve: address to answer at; 0.0.0.0 answers the whole network"
    )
    port: int = flag(7860, "with --serve: port to answer at", range=at_least(1))


RULES = ("kept", "mean", "new")  # by which a point between two models is chosen


def _alphas(text: str) -> tuple[float, ...]:
    return tuple(float(alpha) for alpha in text.split(","))


@dataclass(frozen=True, kw_only=True)
class CurveFlags:
    """Points between two models to score beside 0 and 1, and the rule that chooses one (see `choose`)."""

    alphas: Sequence[float] = flag(
        tuple(i / 10 for i in range(11)),
        "points to score, besides 0 and 1 (default 0 to 1 in steps of 0.1)",
        kind=_alphas,
        range=Range("shares from 0 to 1", lambda value, _: all(0 <= each <= 1 for each in value)),
        metavar="A,A,...",
    )
    rule: str | None = flag(
        None,
        "kept: the best on the new sets of the points that keep --keep of the score on the kept sets; mean: the best mean of "
        "both; new: the best on the new sets (default: kept with --kept, else new)",
        choices=RULES,
    )
    kept_share: float = flag(
        0.99,
        "share of BEFORE's score on the kept sets that must remain",
        option="--keep",
        range=FROM_0_TO_1,
        metavar="SHARE",
    )
