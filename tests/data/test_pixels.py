"""The pixel path on arrays shows PIL's picture: for the same draws, on photographs of many kinds, and in the loader."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from open_clip.transform import image_transform
from PIL import Image
from sklearn.datasets import load_sample_image
from torchvision.transforms import (
    AutoAugment,
    AutoAugmentPolicy,
    Compose,
    RandomHorizontalFlip,
    RandomResizedCrop,
)

from open_clip_zerovl.core.randomness import seeded
from open_clip_zerovl.data import images as pixels
from open_clip_zerovl.data.images import (
    ToBytes,
    crop_of,
    decode_image,
    decode_pixels,
    image_transform_train,
    on_arrays,
    paper_eval_transform,
    split_normalize,
)
from open_clip_zerovl.shards.pictures import BadPicture
from support.tars import encoded

pytestmark = pytest.mark.skipif(pixels.simplejpeg is None, reason="simplejpeg has no wheel here")


@pytest.fixture(scope="module")
def photographs() -> list[Image.Image]:
    return [
        Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")
    ]  # 640 x 427


def file_of(picture: Image.Image, kind: str) -> bytes:
    if kind == "palette":
        return encoded(picture.quantize(200))
    if kind == "webp":
        return encoded(picture, "WEBP", quality=80)
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    options = {
        "4:4:4": {"subsampling": 0},
        "progressive": {"progressive": True},
        "exif": {"exif": exif},
    }
    mode = {"grey": "L", "cmyk": "CMYK"}.get(kind, "RGB")
    return encoded(picture.convert(mode), "JPEG", quality=85, **options.get(kind, {}))


def training() -> Compose:
    return split_normalize(image_transform(224, True, aug_cfg={"scale": (0.6, 1.0)}))[0]


TRANSFORMS = {
    "training": training,
    "bilinear": lambda: split_normalize(image_transform_train(224))[0],
    "flipped": lambda: Compose(
        [RandomResizedCrop(96, scale=(0.3, 1.0)), RandomHorizontalFlip(), ToBytes()]
    ),
    "evaluation": lambda: split_normalize(image_transform(224, False))[0],
    "paper evaluation": lambda: split_normalize(paper_eval_transform(224))[0],
}
KINDS = ("jpeg", "4:4:4", "progressive", "grey", "cmyk", "exif", "palette", "webp")
SIZES = ((200, 133), (384, 256), (640, 427), (1280, 854), (427, 640), (301, 299))


def difference(data: bytes, transform: Compose, seed: int) -> np.ndarray:
    """Grey levels between the two paths' pictures of encoded bytes for the same draws."""
    crop = crop_of(transform)
    arrays = on_arrays(transform)
    assert arrays is not None and crop_of(arrays) == crop
    with seeded(seed):
        expected, drawn = transform(decode_image(data, crop)), torch.rand(1)
    with seeded(seed):
        found = arrays(decode_pixels(data, crop))
        assert torch.equal(torch.rand(1), drawn)  # as many draws
    assert found.dtype == torch.uint8 and found.shape == expected.shape and found.stride(0) == 1
    return np.abs(found.numpy().astype(int) - expected.numpy().astype(int))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_picture(photographs, kind):
    """At most 2 grey levels in 99.9 % of the pixels of a picture, 0.5 in the mean: each transform and each size."""
    transforms = list(TRANSFORMS.items())
    for number, size in enumerate(SIZES):
        name, make = transforms[(number + KINDS.index(kind)) % len(transforms)]
        picture = photographs[number % 2].resize(size)
        off = difference(file_of(picture, kind), make(), seed=number)
        assert (off <= 2).mean() >= 0.999 and off.mean() < 0.5, (name, size)


def test_the_comparison_can_fail(photographs):
    """Negative control: another draw, and a resize without antialiasing."""
    data = file_of(photographs[0].resize((1280, 854)), "jpeg")
    transform, arrays = training(), on_arrays(training())
    with seeded(1):
        expected = transform(decode_image(data)).numpy().astype(int)
    with seeded(2):
        assert np.abs(arrays(decode_pixels(data)).numpy() - expected).mean() > 5
    plain = torch.nn.functional.interpolate(
        torch.from_numpy(decode_pixels(data)).permute(2, 0, 1)[None].float(), (224, 224)
    )
    aliased = np.abs(
        plain[0].numpy()
        - np.asarray(Image.open(io.BytesIO(data)).resize((224, 224), 3)).transpose(2, 0, 1)
    )
    assert (aliased <= 2).mean() < 0.9


@pytest.mark.parametrize(
    ("area", "ratio"),
    [((0.6, 1.0), (3 / 4, 4 / 3)), ((0.9, 1.0), (1.0, 1.0)), ((0.08, 1.0), (3 / 4, 4 / 3))],
)
def test_crops_are_torchvisions(area, ratio):
    """The same box from the same numbers, and the generator is left in the same place."""
    step = RandomResizedCrop(224, scale=area, ratio=ratio)
    (crop,) = on_arrays(step).steps
    for height, width in ((256, 384), (480, 640), (1000, 100), (33, 500), (224, 224)):
        picture = torch.zeros(3, height, width, dtype=torch.uint8)
        for seed in range(80):
            torch.manual_seed(seed)
            expected, following = step.get_params(picture, step.scale, step.ratio), torch.rand(1)
            torch.manual_seed(seed)
            assert (crop.box(height, width), torch.rand(1)) == (tuple(expected), following), (
                height,
                width,
                seed,
            )


@pytest.mark.parametrize("policy", AutoAugmentPolicy)
def test_every_policy_is_pils(photographs, policy):
    """Bit for bit, on a photograph, a picture of one colour and one with fewer pixels than grey levels."""
    step = AutoAugment(policy)
    (arrays,) = on_arrays(step).steps
    pictures = [
        photographs[1].resize((60, 40)),
        Image.new("RGB", (30, 30), (7, 7, 200)),
        photographs[0].resize((9, 9)),
    ]
    changed = 0
    for seed in range(240):
        picture = pictures[seed % 3]
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        before = pixels.clone()
        torch.manual_seed(seed)
        expected, following = np.array(step(picture)), torch.rand(1)
        torch.manual_seed(seed)
        found = arrays(pixels).permute(1, 2, 0).numpy()
        assert np.array_equal(found, expected) and torch.equal(torch.rand(1), following), seed
        assert torch.equal(pixels, before)  # the input is unchanged
        changed += not np.array_equal(found, np.asarray(picture))
    assert changed > 120


def test_undecodable_pictures_raise_the_error_of_pil(photographs):
    whole = file_of(photographs[0], "jpeg")
    for data in (
        b"",
        b"rotten",
        whole[:20],
        whole[: len(whole) // 2],
        whole[:2] + b"x" * 50,
        file_of(photographs[0].resize((1, 9)), "jpeg"),
    ):
        with pytest.raises(BadPicture) as expected:
            decode_image(data)
        with pytest.raises(BadPicture) as found:
            decode_pixels(data)
        assert (found.value.reason, found.value.detail) == (
            expected.value.reason,
            expected.value.detail,
        )


def test_a_step_of_ones_own_stays_with_pil():
    assert on_arrays(Compose([RandomResizedCrop(6), lambda picture: picture, ToBytes()])) is None


def test_without_the_decoder_one_line(monkeypatch, caplog):
    monkeypatch.setattr(pixels, "simplejpeg", None)
    pixels.has_decoder.cache_clear()
    assert not pixels.has_decoder() and not pixels.has_decoder()
    pixels.has_decoder.cache_clear()
    assert [
        record.message
        for record in caplog.records
        if "simplejpeg is not installed" in record.message
    ] == [caplog.messages[0]]
