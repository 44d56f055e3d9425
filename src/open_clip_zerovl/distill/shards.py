"""Shards that carry their own teachers, in the layout of DataCompDR (MobileCLIP, CVPR 2024): embeddings beside each sample.

    000.jpg           the picture
    000.txt           its caption
    000.syn.json      {"syn_text": [S synthetic captions]}
    000.paug.json     {"param_aug": [A augmentations]}: each [[top, left, height, width], [[operation, magnitude], ...]]: a crop
                      of the picture, then RandAugment's operations by their number in OPERATIONS; null if it has none
    000.npz           image_emb (A, D), text_emb (1 + S, D): the caption first; or syn_text_emb (S, D) apart from it.
                      000.pth.gz is the same as a gzipped torch file (the bfloat16 release)

D is the sum of the teachers' widths, whose embeddings lie side by side: 768 + 768 in the data sets that were published. The
public repository apple/ml-mobileclip reads the same layout (`training/dr`, its patch of open_clip).

The student sees picture i through stored augmentation v, at its own size and interpolation, beside embedding v.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.autoaugment import _apply_op
from torchvision.transforms.functional import resized_crop

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import UNREADABLE
from open_clip_zerovl.data.images import ToBytes
from open_clip_zerovl.data.names import field_names
from open_clip_zerovl.data.reading import RawSample
from open_clip_zerovl.data.stats import Fault
from open_clip_zerovl.distill.rows import open_teacher_folder
from open_clip_zerovl.embeddings.store import Store

PREFIX = "shards:"  # of a `--teacher` value
SYNTHETIC = "syn.json:syn_text"
# of `--captions` whose embeddings are stored
FIELDS = ((), ("txt",), ("txt", SYNTHETIC), (SYNTHETIC,))
OPERATIONS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness",
    "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip

# Errors of json, numpy, zip, gzip and torch on a damaged member.
_UNREADABLE = (*UNREADABLE, pickle.UnpicklingError)


@dataclass(frozen=True)
class StoredView:
    """A sample's drawn view and its embeddings, kept until the sample is shown.

    Attributes:
        crop: (top, left, height, width) in pixels of the picture.
        operations: (name, magnitude) of each, in order.
        image: (D,) embedding of this view.
        texts: (T, D) embeddings of the caption and the synthetic ones.
    """

    crop: tuple[int, int, int, int]
    operations: tuple[tuple[str, float], ...]
    image: np.ndarray
    texts: np.ndarray


class InShards:
    """The teachers of such shards, for a mixture: `data.reading.ShardTeachers` and `data.views.StoredTeachers`.

    Args:
        widths: the teachers' widths, in the order of their embeddings.
        captions: the run's `--captions`: None, or `txt` and `syn.json:syn_text`, one of them drawn or both in each step.

    Raises:
        UserError: captions whose embeddings are not stored.
    """

    members = ("paug.json", "syn.json", "npz", "pth.gz")

    def __init__(self, widths: Sequence[int], captions: str | None) -> None:
        names = field_names(captions)
        if names not in FIELDS or (captions is not None and not names):
            raise UserError(
                f"--captions {captions} does not work with --teacher {PREFIX}...: embeddings are stored of the txt, then of "
                f"{SYNTHETIC}; give --captions txt+{SYNTHETIC} (both in each step), txt=0.5,{SYNTHETIC}=0.5, or leave it out"
            )
        self.widths = tuple(widths)
        self.digest = f"{PREFIX}{','.join(map(str, widths))}"
        self._first_text = 1 if names == (SYNTHETIC,) else 0
        self._names = names

    def check(self, transform: Callable[[Any], Tensor]) -> None:
        """UserError if the run's training transform has random steps besides its crop."""
        _crop_of(transform)

    def stored_view(self, members: Mapping[str, bytes | None], draw: int) -> StoredView | Fault:
        """See `data.reading.ShardTeachers`."""
        try:
            view = _view_of(members, draw, sum(self.widths))
            self._require_captions(members, len(view.texts) - 1)
            return view
        except _UNREADABLE as error:
            return Fault(
                "no teacher",
                f"has no teachers' embeddings that can be read ({error or type(error).__name__})",
            )

    def _require_captions(self, members: Mapping[str, bytes | None], synthetic: int) -> None:
        """ValueError where a caption's number would not be its embedding's: captions are numbered as far as there are any.

        Args:
            synthetic: how many synthetic captions have embeddings.
        """
        if "txt" in self._names and members.get("txt") is None:
            raise ValueError("without txt, the first embedding is of no caption")
        if SYNTHETIC in self._names and members.get("syn.json") is not None:
            texts = json.loads(_member(members, "syn.json"))["syn_text"]
            texts = [texts] if isinstance(texts, str) else texts
            if (
                not isinstance(texts, list)
                or len(texts) > synthetic
                or not all(isinstance(text, str) for text in texts)
            ):
                raise ValueError(f"syn_text is not a list of {synthetic} captions")

    def show(
        self, sample: RawSample, image: Image.Image, transform: Callable[[Any], Tensor], draw: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `data.views.StoredTeachers`; the view was drawn when the sample was read."""
        view: StoredView = sample.stored
        top, left, height, width = view.crop
        if (
            top < 0
            or left < 0
            or height < 1
            or width < 1
            or top + height > image.height
            or left + width > image.width
        ):
            raise UserError(
                f"the stored crop {view.crop} of sample {sample.key!r} in {sample.shard} does not fit its picture of "
                f"{image.width} x {image.height} pixels: the teachers saw pictures of another size; fetch them as they were"
            )
        crop = _crop_of(transform)
        picture = resized_crop(image, top, left, height, width, list(crop.size), crop.interpolation)
        for name, magnitude in view.operations:
            picture = _apply_op(
                picture, name, magnitude, interpolation=InterpolationMode.NEAREST, fill=None
            )
        numbers = [self._first_text + number for number, _ in sample.shown]
        shown = [
            self._split(embedding)
            for embedding in (view.image, *(view.texts[number] for number in numbers))
        ]
        return ToBytes()(picture), tuple(
            part for of_teacher in zip(*shown, strict=True) for part in of_teacher
        )

    def _split(self, embedding: np.ndarray) -> list[Tensor]:
        """(D_t,) of each teacher, of unit length, in float16."""
        parts = torch.from_numpy(np.array(embedding, dtype=np.float32)).split(list(self.widths))
        return [normalize(part, dim=0).to(torch.float16) for part in parts]


def parse_widths(text: str) -> tuple[int, ...]:
    """The teachers' widths in a `--teacher shards:768,768`.

    Raises:
        UserError: anything but whole numbers of 1 or more.
    """
    words = text.removeprefix(PREFIX).split(",")
    if not all(word.isdecimal() and 0 < int(word) < 1 << 20 for word in words):
        raise UserError(
            f"--teacher {text} names no widths; give those of the teachers, as in --teacher {PREFIX}768,768"
        )
    return tuple(int(word) for word in words)


def _crop_of(transform: Any) -> RandomResizedCrop:
    """The crop of the student's training transform, whose size and interpolation the stored crop takes.

    Raises:
        UserError: a transform with another random step, which the teachers' pictures had not.
    """
    steps = [
        step
        for step in getattr(transform, "transforms", ())
        if type(step).__name__ not in ("MaybeConvertMode", "ToBytes")
    ]
    if len(steps) != 1 or not isinstance(steps[0], RandomResizedCrop):
        names = ", ".join(type(step).__name__ for step in steps) or type(transform).__name__
        raise UserError(
            f"--teacher {PREFIX}... repeats the stored augmentation, and this run has its own ({names}); leave --auto-augment "
            "and further steps of --aug-cfg out"
        )
    return steps[0]


def _view_of(members: Mapping[str, bytes | None], draw: int, width: int) -> StoredView:
    """Raises one of _UNREADABLE where a member is missing or not as the module's text says."""
    augmentations = json.loads(_member(members, "paug.json"))["param_aug"]
    if isinstance(augmentations, str):  # a string of JSON in the tables of the hub
        augmentations = json.loads(augmentations)
    arrays = _arrays(members)
    images, texts = np.asarray(arrays["image_emb"]), np.asarray(arrays["text_emb"])
    if "syn_text_emb" in arrays:
        texts = np.concatenate([texts[:1], np.asarray(arrays["syn_text_emb"])])
    if images.shape != (len(augmentations), width) or texts.ndim != 2 or texts.shape[1] != width:
        raise ValueError(
            f"image_emb {images.shape} and text_emb {texts.shape} are not of {len(augmentations)} augmentations and width "
            f"{width}"
        )
    view = draw % len(augmentations)
    crop, operations = (
        augmentations[view][:2] if len(augmentations[view]) > 1 else (augmentations[view][0], None)
    )
    top, left, height, wide = (int(number) for number in crop)
    if not (
        np.isfinite(images[view].astype(np.float32)).all()
        and np.isfinite(texts.astype(np.float32)).all()
    ):
        raise ValueError("its embeddings are not finite")
    named = tuple(
        (OPERATIONS[int(number)], float(magnitude)) for number, magnitude in operations or ()
    )
    if not all(math.isfinite(magnitude) for _, magnitude in named):
        raise ValueError("a magnitude of its augmentation is not finite")
    return StoredView((top, left, height, wide), named, np.array(images[view]), np.array(texts))


def _member(members: Mapping[str, bytes | None], name: str) -> bytes:
    content = members.get(name)
    if content is None:
        raise KeyError(f"no member {name}")
    return content


def _arrays(members: Mapping[str, bytes | None]) -> dict[str, Any]:
    """The arrays of the npz, or of the pth.gz in float32, which has no bfloat16 for numpy."""
    packed = members.get("npz")
    if packed is not None:
        with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    embeddings = torch.load(
        io.BytesIO(gzip.decompress(_member(members, "pth.gz"))),
        map_location="cpu",
        weights_only=True,
    )
    return {
        name: value.float().numpy()
        if isinstance(value, Tensor)
        else np.asarray(torch.stack(value).float())
        for name, value in embeddings.items()
        if name.endswith("_emb")
    }


def open_teachers(teacher: str | None, captions: str | None) -> Store | InShards | None:
    """The teachers of a run: a folder of embeddings, or shards with them.

    Args:
        teacher, captions: the flags of these names.

    Raises:
        UserError: embeddings that are not there or not finished, or captions of which none are stored.
    """
    if teacher is None:
        return None
    if not teacher.startswith(PREFIX):
        return open_teacher_folder(teacher)
    return InShards(parse_widths(teacher), captions)
