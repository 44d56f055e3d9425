"""Decoding and transport: reduced JPEGs keep a crop's details, uint8 images become what open_clip's transform makes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.transform import image_transform
from PIL import Image
from torchvision.transforms import Compose, RandomResizedCrop, Resize, ToTensor

from open_clip_zerovl.core.randomness import seeded
from open_clip_zerovl.data.images import (
    Crop,
    collate_images,
    crop_of,
    decode_image,
    image_transform_train,
    normalize,
    split_normalize,
    with_auto_augment,
)
from open_clip_zerovl.shards.pictures import FORMATS, BadPicture
from support.loading import loader_of
from support.tars import encoded, noise_jpeg, write_source

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
    assert crop_of(image_transform_train(224)) == Crop(224, 224, 0.6, (3 / 4, 4 / 3))
    assert crop_of(with_auto_augment(STOCK)) == crop
    timm = image_transform(224, True, aug_cfg={"scale": (0.5, 1.0), "use_timm": True})
    assert crop_of(timm) == Crop(224, 224, 0.5, (3 / 4, 4 / 3))


def test_a_reduced_jpeg_shows_the_same_picture():
    data = noise_jpeg(3, 1280, 854)
    full, reduced = decode_image(data), decode_image(data, crop_of(STOCK))
    assert full.size == (1280, 854) and reduced.size == (640, 427)
    box = (64, 85, 576, 405)
    crops = []
    for image, scale in ((full, 2), (reduced, 1)):
        cut = image.crop(tuple(scale * side for side in box))
        crops.append(np.asarray(cut.resize((224, 224), Image.Resampling.BICUBIC), dtype=float))
    error = np.sqrt(np.mean((crops[0] - crops[1]) ** 2))
    assert error < 2.5  # of 255: below JPEG's own error
    shifted = np.roll(crops[0], 2, axis=1)
    assert np.sqrt(np.mean((shifted - crops[1]) ** 2)) > 2 * error  # negative control


def test_sixteen_bits_are_scaled_and_not_clipped():
    for dtype, format in ((np.uint16, "PNG"), (np.uint16, "TIFF"), (np.int32, "TIFF")):
        data = encoded(
            Image.fromarray(np.arange(0, 65536, 1024, dtype=dtype).reshape(8, 8)), format
        )
        assert np.asarray(decode_image(data))[..., 0].ravel().tolist() == list(range(0, 256, 4))


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


def test_memory_does_not_grow_over_an_epoch(tmp_path):
    """After the shuffle window has filled, an epoch ten windows long needs no more than a window more."""
    write_source(tmp_path / "s", 0, 1000, 250)
    window, picture = 100, 16 << 10
    loader = loader_of(f"s={tmp_path}/s", 10, shuffle_window_samples=window)
    peaks = []
    tracemalloc.start()
    try:
        for number, _ in enumerate(loader):
            if number % 25 == 24:
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    assert len(peaks) == 4 and max(peaks[1:]) < peaks[0] + picture * 20, peaks


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


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM"])
def test_formats_of_the_web_are_opened(form):
    try:
        data = encoded(Image.new("RGB", (24, 24), (200, 100, 50)), form)
    except (KeyError, OSError):
        pytest.skip(f"this Pillow does not write {form}")
    assert np.abs(np.asarray(decode_image(data)).astype(int) - (200, 100, 50)).max() < 12
