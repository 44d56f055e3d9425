"""Karpathy's splits of MS-COCO and Flickr30K: `images` with `filename`, `split`, ids and `sentences`, as one JSON file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.splits import split_of_word
from open_clip_zerovl.shards.archives import json_array, open_member


@dataclass(frozen=True)
class CaptionedImage:
    """One image of Karpathy's file; `split` is train, val or test."""

    filename: str
    split: str
    image_id: int
    captions: tuple[str, ...]
    caption_ids: tuple[int, ...]


def read_karpathy(path: Path, name: str) -> list[CaptionedImage]:
    """The images of a Karpathy file, in its order.

    Raises:
        UserError: an entry of another form, a split that is unknown, or an image without captions.
    """
    images = []
    with open_member(path, name) as stream:
        for number, entry in enumerate(json_array(stream, str(path), key="images")):
            try:
                # MS-COCO's own id if there is one, as in published results.
                image_id = int(entry["cocoid"] if "cocoid" in entry else entry["imgid"])
                sentences = [
                    (" ".join(s["raw"].split()), int(s["sentid"])) for s in entry["sentences"]
                ]
                sentences = [(caption, i) for caption, i in sentences if caption]
                split = split_of_word(entry["split"])
                if split is None:
                    raise ValueError(f"unknown split {entry['split']!r}")
                image = CaptionedImage(
                    str(entry["filename"]),
                    split,
                    image_id,
                    tuple(caption for caption, _ in sentences),
                    tuple(i for _, i in sentences),
                )
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise UserError(
                    f"entry {number} of {path} does not have the form of Karpathy's images ({type(error).__name__} {error}): "
                    "give dataset_coco.json or dataset_flickr30k.json."
                ) from error
            if not image.captions:
                raise UserError(
                    f"entry {number} of {path}, {image.filename}, has no caption: give the official file."
                )
            images.append(image)
    return images
