"""Decoding and transforms: reduced JPEGs, uint8 images, AutoAugment and the path on arrays show what PIL and open_clip show."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.transform import image_transform
from PIL import Image
from sklearn.datasets import load_sample_image
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision.transforms import (
    AutoAugment,
    AutoAugmentPolicy,
    CenterCrop,
    Compose,
    InterpolationMode,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)

from open_clip_zerovl.core.randomness import seeded
from open_clip_zerovl.data import images as pixels
from open_clip_zerovl.data.images import (
    Crop,
    ToBytes,
    collate_images,
    crop_of,
    decode_image,
    decode_pixels,
    image_transform_train,
    normalize,
    on_arrays,
    paper_eval_transform,
    split_normalize,
    with_auto_augment,
)
from open_clip_zerovl.shards.pictures import FORMATS, BadPicture
from support.tars import encoded, noise_jpeg

STOCK = image_transform(224, True, aug_cfg={"scale": (0.6, 1.0)})


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(2, 3000),
    height=st.integers(2, 3000),
    size=st.sampled_from([32, 224, 288]),
    area=st.sampled_from([0.08, 0.3, 0.6, 0.9, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_no_crop_of_a_reduced_image_is_enlarged_for_it(width, height, size, area, seed):
    ratio = (3 / 4, 4 / 3)
    scale = Crop(size, size, area, ratio).reduction(width, height)
    reduced = torch.empty(1, -(-height // scale), -(-width // scale))
    if scale == 1:
        return
    torch.manual_seed(seed)
    for _ in range(20):
        _, _, rows, columns = RandomResizedCrop.get_params(reduced, [area, 1.0], list(ratio))
        assert rows >= size and columns >= size


def test_reduction_of_usual_sizes():
    crop = crop_of(STOCK)
    assert crop == Crop(224, 224, 0.6, (3 / 4, 4 / 3))
    assert [
        crop.reduction(*size) for size in ((384, 256), (640, 480), (1280, 854), (4000, 3000))
    ] == [1, 1, 2, 8]
    whole = crop_of(image_transform(224, True))  # open_clip's default crops as little as 90 %
    assert whole is not None and whole.min_area == 0.9
    assert (
        crop_of(Compose([Resize(224), ToTensor()])) is None and crop_of(lambda image: image) is None
    )
    assert crop_of(with_auto_augment(STOCK)) == crop
    timm = image_transform(224, True, aug_cfg={"scale": (0.5, 1.0), "use_timm": True})
    assert crop_of(timm) == Crop(224, 224, 0.5, (3 / 4, 4 / 3))


def test_a_jpeg_is_decoded_at_half_its_size():
    data = noise_jpeg(3, 1280, 854)
    full, reduced = decode_image(data), decode_image(data, crop_of(STOCK))
    assert full.size == (1280, 854) and reduced.size == (640, 427)


@pytest.mark.parametrize("augmented", [False, True])
def test_normalising_later_is_the_stock_transform(augmented):
    """1e-6: one rounding of the float division and subtraction; the random draws are the same."""
    stock = with_auto_augment(STOCK) if augmented else STOCK
    to_bytes, mean, std = split_normalize(stock)
    images = [decode_image(noise_jpeg(i, 384, 256)) for i in range(6)]
    wanted, got = [], []
    for number, image in enumerate(images):
        with seeded(number):
            wanted.append(stock(image))
        with seeded(number):
            got.append(to_bytes(image))
    batch = collate_images(got)
    assert batch.dtype == torch.uint8 and batch.shape == (6, 3, 224, 224)
    assert torch.equal(batch, torch.stack(got))
    normal = normalize(batch, mean, std)
    assert normal.is_contiguous() and normal.dtype == torch.float32
    assert (normal - torch.stack(wanted)).abs().max() < 1e-6
    assert (batch.float() / 255 - torch.stack(wanted)).abs().max() > 0.1  # negative control


def test_images_of_different_sizes_are_not_broadcast():
    with pytest.raises(ValueError, match=r"images of .3, 4, 4. and .3, 1, 1.; they must be alike"):
        collate_images([torch.zeros(3, 4, 4), torch.zeros(3, 1, 1)])
    assert collate_images([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    grey = torch.arange(8, dtype=torch.uint8).view(1, 2, 4)
    assert torch.equal(collate_images([grey, grey]), torch.stack([grey, grey]))


def test_formats_that_start_other_programs_are_not_opened(monkeypatch):
    """Pillow takes a `.jpg` that holds EPS for EPS, and starts Ghostscript for it."""
    started = []
    monkeypatch.setattr(
        "PIL.EpsImagePlugin.Ghostscript", lambda *args, **options: started.append(args)
    )
    for data in (
        encoded(Image.new("RGB", (8, 8)), "EPS"),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
    ):
        with pytest.raises(BadPicture, match="UnidentifiedImageError") as raised:
            decode_image(data)
        assert raised.value.reason == "undecodable image"
    assert not started and not {"EPS", "DDS", "WMF", "PSD", "HDF5"} & set(FORMATS)


with_decoder = pytest.mark.skipif(pixels.simplejpeg is None, reason="simplejpeg has no wheel here")


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


@with_decoder
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_picture(photographs, kind):
    """At most 2 grey levels in 99.9 % of the pixels of a picture, 0.5 in the mean: each transform and each size."""
    transforms = list(TRANSFORMS.items())
    for number, size in enumerate(SIZES):
        name, make = transforms[(number + KINDS.index(kind)) % len(transforms)]
        picture = photographs[number % 2].resize(size)
        off = difference(file_of(picture, kind), make(), seed=number)
        assert (off <= 2).mean() >= 0.999 and off.mean() < 0.5, (name, size)


@with_decoder
def test_the_comparison_can_fail(photographs):
    """Negative control: a resize without antialiasing."""
    data = file_of(photographs[0].resize((1280, 854)), "jpeg")
    plain = torch.nn.functional.interpolate(
        torch.from_numpy(decode_pixels(data)).permute(2, 0, 1)[None].float(), (224, 224)
    )
    aliased = np.abs(
        plain[0].numpy()
        - np.asarray(Image.open(io.BytesIO(data)).resize((224, 224), 3)).transpose(2, 0, 1)
    )
    assert (aliased <= 2).mean() < 0.9


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1, 2, 4])
def test_the_decoder_is_exactly_pils(photographs, size, scale, monkeypatch):
    """Reduced sizes too: the two share libjpeg-turbo."""
    crop = crop_of(training())
    monkeypatch.setattr(type(crop), "reduction", lambda *_: scale)
    for kind in ("jpeg", "4:4:4", "progressive", "grey"):
        data = file_of(photographs[1].resize(size), kind)
        expected = np.asarray(decode_image(data, crop)).astype(int)
        found = decode_pixels(data, crop)
        assert found.shape == expected.shape and np.abs(found - expected).max() <= 2


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


@with_decoder
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


# ------------------------------------------------------------------------------------------------ the paper's transforms


def image(seed=0, size=(90, 70), mode="RGB"):
    pixels = np.random.default_rng(seed).integers(
        0, 256, size=(size[1], size[0], 3), dtype=np.uint8
    )
    return Image.fromarray(pixels).convert(mode)


def test_the_policy_goes_right_after_the_crop():
    stock = image_transform(
        32, is_train=True, aug_cfg={"scale": (0.6, 1.0), "color_jitter_prob": None}
    )
    transform = with_auto_augment(stock)
    assert [type(step).__name__ for step in transform.transforms] == [
        "RandomResizedCrop",
        "MaybeConvertMode",
        "AutoAugment",
        "MaybeToTensor",
        "Normalize",
    ]
    timm = image_transform(32, is_train=True, aug_cfg={"scale": (0.6, 1.0), "use_timm": True})
    assert isinstance(with_auto_augment(timm).transforms[1], AutoAugment)
    assert with_auto_augment(timm)(image()).shape == (3, 32, 32)
    shown = []
    for shows in (transform, transform, stock):
        with seeded(3):
            shown.append(shows(image(mode="P")))  # a palette image: the policy works on RGB
    assert torch.equal(shown[0], shown[1]) and not torch.equal(shown[0], shown[2])


def test_the_papers_training_transform():
    crop, _, policy, *_ = image_transform_train(32, auto_augment="imagenet").transforms
    drawn = (crop.size, crop.scale, crop.ratio, crop.interpolation)
    assert drawn == ((32, 32), (0.6, 1.0), (0.75, 4 / 3), InterpolationMode.BILINEAR)
    assert isinstance(policy, AutoAugment)


def test_the_papers_evaluation_transform_squashes():
    transform = paper_eval_transform(224)
    picture = image(size=(300, 200))
    expected = Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)(
        ToTensor()(CenterCrop(224)(Resize((256, 256))(picture)))
    )
    assert torch.equal(transform(picture), expected)
    assert transform.transforms[1].size == (256, 256)
    assert paper_eval_transform(112).transforms[1].size == (128, 128)
    # Negative control: open_clip's default keeps the aspect ratio.
    stock = image_transform(
        224,
        is_train=False,
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        interpolation="bilinear",
    )
    assert (stock(picture) - expected).abs().max() > 0.1
