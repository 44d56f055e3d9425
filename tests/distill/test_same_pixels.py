"""Teacher and student see the same pixels, and a caption's embedding is that caption's: over workers, ranks and resumed epochs.

The teacher of these tests embeds a picture as a hash of its bytes, so that an embedding which training reads is that of the
picture beside it, bit for bit, or of another one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

import open_clip_zerovl.embeddings.store as store_module
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, preserved, reseed, stream_seed
from open_clip_zerovl.data.images import crop_of
from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.mixture import Mixture, Preprocessing
from open_clip_zerovl.data.pixels import pictures
from open_clip_zerovl.data.reading import Reading
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.distill.embed import TeacherSettings, embed_sources
from open_clip_zerovl.distill.rows import TeacherRows, open_teacher_folder
from open_clip_zerovl.embeddings.sources import augmentation_of
from open_clip_zerovl.sampling.schedule import Batching, Sampling
from support.hash_teacher import WIDTH, HashEncoder, hashed, tokens_of
from support.tars import noise_jpeg, write_tar

SETTINGS = TeacherSettings(
    views=3,
    image_size=16,
    aug_cfg={"scale": (0.3, 1.0)},
    captions="one-per-epoch",
    seed=5,
    auto_augment="imagenet",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three sources, each picture with up to three captions; and how a
    teacher of the student's size and one of another size made of them."""
    folder = tmp_path_factory.mktemp("pixels")
    for name, first, shards in (("a", 0, 3), ("b", 100, 2), ("c", 200, 1)):
        for shard in range(shards):
            members = []
            for number in range(first + 8 * shard, first + 8 * shard + 8):
                lines = [f"{name} picture {number} caption {c}" for c in range(1 + number % 3)]
                members += [
                    (f"{number:04d}.jpg", noise_jpeg(number, 60 + number % 7, 50)),
                    (f"{number:04d}.txt", "\n".join(lines).encode()),
                ]
            write_tar(folder / name / f"{shard:05d}.tar", members)
    data = f"a={folder}/a::b={folder}/b::c={folder}/c"
    encoders = [HashEncoder(salt=1), HashEncoder("wide", salt=2, size_px=20, workers=2)]
    store = embed_sources(data, encoders, folder / "teacher", SETTINGS)
    return folder, data, store


def batches(
    data, store, *, rank=0, ranks=1, workers=0, dga_steps=1, epoch=0, start=0, settings=SETTINGS
):
    """(images, tokens, origin, embeddings) of one rank's epoch."""
    sources = parse_sources(data, captions=settings.captions)
    transform = settings.transform()
    rows = TeacherRows(
        open_teacher_folder(store.folder),
        sources,
        augmentation=augmentation_of(transform, settings.pixel_path),
        captions=settings.captions,
    )
    mixture = Mixture(
        sources,
        Batching(4, dga_steps, ranks, max(1, workers)),
        Preprocessing(transform, tokens_of, pixel_path=settings.pixel_path, teachers=rows),
        rank=rank,
        sampling=Sampling("debiased"),
        seed=9,
    )
    loader = MixtureLoader(mixture, workers=workers)
    loader.set_epoch(epoch, start)
    return list(loader)


def as_kept(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.float16)


@pytest.mark.parametrize(
    ("ranks", "workers", "dga_steps", "epoch", "start"),
    [(1, 0, 1, 0, 0), (1, 2, 2, 1, 0), (2, 1, 1, 2, 0), (1, 2, 1, 1, 5)],
)
def test_embeddings_are_of_the_pixels_and_captions_beside_them(
    place, ranks, workers, dga_steps, epoch, start
):
    _, data, store = place
    shown = set()
    for rank in range(ranks):
        for images, tokens, origin, embeddings in batches(
            data,
            store,
            rank=rank,
            ranks=ranks,
            workers=workers,
            dga_steps=dga_steps,
            epoch=epoch,
            start=start,
        ):
            assert [tuple(part.shape) for part in embeddings] == [(4, WIDTH)] * 4
            assert torch.equal(embeddings[0], as_kept(hashed(images, 1)))
            assert torch.equal(embeddings[1], as_kept(hashed(tokens.to(torch.uint8), 1)))
            assert torch.equal(embeddings[3], as_kept(hashed(tokens.to(torch.uint8), 2)))
            shown |= set(origin[:, 0].tolist())
    assert shown == {0, 1, 2}


def test_a_view_is_the_draw_of_its_own_number_and_the_step_shows_the_drawn_one(place):
    """Picture and embedding of view v + 1 would fit each other, too."""
    _, data, store = place
    sources = parse_sources(data, captions=SETTINGS.captions)
    transform, decode = pictures(SETTINGS.transform(), SETTINGS.pixel_path)
    augmentation = augmentation_of(SETTINGS.transform(), SETTINGS.pixel_path)
    rows = TeacherRows(store, sources, augmentation=augmentation, captions=SETTINGS.captions)
    for number, sample in enumerate(islice(Reading(sources[0], 0).samples(1, 0, 8), 3)):
        image = decode(sample.image, crop_of(SETTINGS.transform()))
        for view in range(3):
            with preserved():
                reseed(stream_seed(SETTINGS.seed, Purpose.VIEW_IMAGE, 0, 8 + number, view))
                expected = hashed(transform(image)[None], 1)[0]
                picture, embeddings = rows.show(sample, image, transform, 3 * 7 + view)
            assert torch.equal(store.rows["0.images"][8 + number, view], as_kept(expected))
            assert torch.equal(embeddings[0], as_kept(expected)) and torch.equal(
                hashed(picture[None], 1)[0], expected
            )


def test_a_teacher_of_another_size_sees_the_view_resized(place):
    _, data, store = place
    picture_transform = HashEncoder("wide", size_px=20).load()[1]
    images, _, _, embeddings = batches(data, store)[0]
    for image, stored in zip(images, embeddings[2], strict=True):
        seen = (
            (picture_transform(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())) * 255)
            .round()
            .to(torch.uint8)
        )
        assert seen.shape == (3, 20, 20)
        assert torch.equal(stored, as_kept(hashed(seen[None], 2))[0])


def test_captions_of_two_fields_in_a_step_have_their_embeddings(tmp_path):
    """Also where the store was made for drawing between the fields; not for the fields in another order."""
    members = []
    for number in range(8):
        captions = {"syn": [f"synthetic {number} {c}" for c in range(1 + number % 3)]}
        members += [
            (f"{number:04d}.jpg", noise_jpeg(number, 60, 50)),
            (f"{number:04d}.txt", f"picture {number}".encode()),
            (f"{number:04d}.json", json.dumps(captions).encode()),
        ]
    write_tar(tmp_path / "a" / "00000.tar", members)
    data, settings = f"a={tmp_path}/a", replace(SETTINGS, captions="txt=0.5,syn=0.5")
    encoders = [HashEncoder(salt=1), HashEncoder("other", salt=2)]
    store = embed_sources(data, encoders, tmp_path / "teacher", settings)
    together = replace(SETTINGS, captions="txt+syn")
    for images, tokens, _, embeddings in batches(data, store, settings=together):
        assert len(tokens) == 2 * len(images) and len(embeddings) == 6
        assert [bytes(row.tolist()).split()[0] for row in tokens[::4]] == [b"picture", b"synthetic"]
        for teacher, salt in ((0, 1), (1, 2)):
            of_images, *of_texts = embeddings[3 * teacher : 3 * teacher + 3]
            assert torch.equal(of_images, as_kept(hashed(images, salt)))
            assert torch.equal(torch.cat(of_texts), as_kept(hashed(tokens.to(torch.uint8), salt)))
    with pytest.raises(
        UserError, match="read captions with --captions txt=0.5,syn=0.5, and this run has syn\\+txt"
    ):
        batches(data, store, settings=replace(SETTINGS, captions="syn+txt"))


def test_views_change_over_epochs_and_each_is_seen(place):
    """The control of the tests above: views of one picture differ, so that an embedding of another view would not fit."""
    _, data, store = place
    rows = store.rows["0.images"].array
    assert all(len({bytes(view) for view in picture}) == 3 for picture in rows)
    seen: dict[int, set[bytes]] = {}
    for epoch in range(8):
        for images, _, origin, _ in batches(data, store, epoch=epoch):
            for (source, position), image in zip(origin.tolist(), images, strict=True):
                if source == 0:
                    seen.setdefault(position % 24, set()).add(bytes(image.contiguous().numpy()))
    assert all(1 < len(pictures) <= 3 for pictures in seen.values())
    assert sum(len(pictures) for pictures in seen.values()) > 2.5 * 24


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_rows_stop_a_training_that_reads_them(place, tmp_path, monkeypatch, workers):
    """Rows between those that are looked at on opening; the other teacher is not blamed."""
    _, data, store = place
    shutil.copytree(store.folder, tmp_path / "teacher")
    rows = np.load(tmp_path / "teacher" / "1.images.npy", mmap_mode="r+")
    rows[1:-1, :, 3] = np.inf
    rows.flush()
    monkeypatch.setattr(
        store_module, "_SAMPLED_ROWS", 2
    )  # the first and the last, as if the file were long
    damaged = open_teacher_folder(tmp_path / "teacher")
    with pytest.raises(
        UserError,
        match=r"teacher/1\.images\.npy holds rows that were damaged .*make the embeddings",
    ):
        batches(data, damaged, workers=workers)


def test_a_damaged_table_of_captions_gets_a_sentence(place, tmp_path):
    _, _, store = place
    shutil.copytree(store.folder, tmp_path / "teacher")
    starts = np.load(tmp_path / "teacher" / "starts.npy", mmap_mode="r+")
    starts[10:] = 0  # a copy that ended early in a file of full length
    starts.flush()
    with pytest.raises(UserError, match=r"starts\.npy holds rows that were damaged"):
        open_teacher_folder(tmp_path / "teacher")
