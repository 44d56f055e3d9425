"""Shards in DataCompDR's layout: the stored augmentation is repeated, embeddings are those of the view and caption shown."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image, ImageEnhance, ImageOps
from torch.nn.functional import normalize

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.images import split_normalize
from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.mixture import Mixture, Preprocessing
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.data.transforms import with_auto_augment
from open_clip_zerovl.distill.shards import InShards, open_teachers, parse_widths
from open_clip_zerovl.sampling.schedule import Batching, Sampling
from support.reinforced import AUGMENTATIONS, WIDTHS, embeddings_of, members_of, packed
from support.tars import noise_jpeg, write_tar

SIZE = 16
CAPTIONS = "txt=0.5,syn.json:syn_text=0.5"


def by_hand(picture: Image.Image, number: int) -> np.ndarray:
    """The augmented picture (3, S, S), by PIL alone."""
    top, left, height, width = AUGMENTATIONS[number][0]
    picture = picture.crop((left, top, left + width, top + height)).resize(
        (SIZE, SIZE), Image.Resampling.BICUBIC
    )
    if number == 0:
        picture = ImageOps.solarize(ImageEnhance.Brightness(picture).enhance(1.27), 170)
    if number == 1:
        picture = picture.rotate(-8.1, Image.Resampling.NEAREST)
    if number == 3:
        picture = ImageOps.posterize(ImageOps.autocontrast(picture), 6)
    return np.asarray(picture).transpose(2, 0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("dr")
    for shard, kind in enumerate(("whole", "apart", "pth.gz")):
        write_tar(
            place / f"{shard:05d}.tar",
            [m for n in range(8 * shard, 8 * shard + 8) for m in members_of(n, kind)],
        )
    return place


def tokens_of(captions: list[str]) -> torch.Tensor:
    return torch.tensor([list(caption.encode()[:16].ljust(16)) for caption in captions])


def batches(folder, *, captions=CAPTIONS, epoch=0, start=0, workers=0, on_bad_sample="fail"):
    transform = split_normalize(image_transform_v2(PreprocessCfg(size=SIZE), is_train=True))[0]
    teachers = InShards(WIDTHS, captions)
    mixture = Mixture(
        parse_sources(f"dr={folder}", captions=captions),
        Batching(4, 1, 1, max(1, workers)),
        Preprocessing(transform, tokens_of, teachers=teachers, shard_teachers=teachers),
        sampling=Sampling("random"),
        seed=1,
        on_bad_sample=on_bad_sample,
    )
    loader = MixtureLoader(mixture, workers=workers, max_bad_share=1.0)
    loader.set_epoch(epoch, start)
    return list(loader)


def unit(rows: np.ndarray, teacher: int) -> torch.Tensor:
    begin = sum(WIDTHS[:teacher])
    part = torch.from_numpy(rows.astype(np.float32))[..., begin : begin + WIDTHS[teacher]]
    return normalize(part, dim=-1).to(torch.float16)


@pytest.mark.parametrize(("workers", "start"), [(0, 0), (2, 3)])
def test_pictures_are_the_stored_views_and_embeddings_are_of_them(folder, workers, start):
    views, shown = set(), set()
    for images, texts, origin, embeddings in batches(folder, epoch=1, start=start, workers=workers):
        assert [part.shape[1] for part in embeddings] == [4, 4, 3, 3]
        for row in range(4):
            number = int(origin[row, 1]) % 24
            stored = embeddings_of(number)
            found = [
                v
                for v in range(4)
                if torch.equal(embeddings[0][row], unit(stored["image_emb"][v], 0))
            ]
            assert len(found) == 1  # views differ: which one is beside the picture is known
            assert torch.equal(embeddings[2][row], unit(stored["image_emb"][found[0]], 1))
            with Image.open(io.BytesIO(noise_jpeg(number, 180, 150))) as picture:
                assert np.array_equal(
                    images[row].numpy(), by_hand(picture.convert("RGB"), found[0])
                )
            caption = bytes(texts[row].tolist()).decode().strip()
            place = [f"caption {number}", f"syn {number} a", f"syn {number} b"].index(caption)
            assert all(
                torch.equal(embeddings[1 + 2 * t][row], unit(stored["text_emb"][place], t))
                for t in (0, 1)
            )
            views.add(found[0])
            shown.add(caption.split()[0])
    assert shown == {"caption", "syn"} and len(views) > 1


@pytest.mark.parametrize(
    ("captions", "words"), [(None, {"caption"}), ("syn.json:syn_text=1", {"syn"})]
)
def test_one_kind_of_caption_alone(folder, captions, words):
    for _, texts, origin, embeddings in batches(folder, captions=captions):
        for row in range(4):
            number = int(origin[row, 1]) % 24
            caption = bytes(texts[row].tolist()).decode().strip()
            assert caption.split()[0] in words
            place = [f"caption {number}", f"syn {number} a", f"syn {number} b"].index(caption)
            assert torch.equal(
                embeddings[1][row], unit(embeddings_of(number)["text_emb"][place], 0)
            )


def views_of(augmentation: bytes) -> bytes:
    """A paug.json of four times this view."""
    return b'{"param_aug": [' + b", ".join([augmentation] * 4) + b"]}"


def npz_with_nan() -> bytes:
    arrays, buffer = embeddings_of(3), io.BytesIO()
    arrays["text_emb"][1, 2] = np.nan
    np.savez(buffer, **arrays)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("member", "content", "detail"),
    [
        ("npz", None, "no member pth.gz"),
        ("npz", b"PK", "no teachers' embeddings that can be read"),
        ("npz", packed(3, "whole")[1][:-40], "no teachers' embeddings that can be read"),
        ("npz", npz_with_nan(), "its embeddings are not finite"),
        (
            "paug.json",
            b'{"param_aug": [[[0, 0, 9, 9], null]]}',
            "are not of 1 augmentations and width 7",
        ),
        ("paug.json", b"{}", "'param_aug'"),
        ("paug.json", views_of(b"[[0, 0, Infinity, 9], null]"), "infinity"),
        (
            "paug.json",
            views_of(b"[[0, 0, 9, 9], [[10, NaN]]]"),
            "a magnitude of its augmentation is not finite",
        ),
        ("txt", None, "the first embedding is of no caption"),
        ("syn.json", b'{"syn_text": [null, "syn 3 a"]}', "syn_text is not a list of 2 captions"),
    ],
)
def test_samples_without_what_is_needed_are_bad_samples(tmp_path, member, content, detail):
    members = [m for number in range(8) for m in members_of(number, "whole")]
    place = next(i for i, (name, _) in enumerate(members) if name == f"0003.{member}")
    members[place : place + 1] = [] if content is None else [(f"0003.{member}", content)]
    write_tar(tmp_path / "00000.tar", members)
    with pytest.raises(UserError, match=rf"sample '0003'.*{detail}"):
        batches(tmp_path)
    positions = [
        int(p) for *_, origin, _ in batches(tmp_path, on_bad_sample="replace") for p in origin[:, 1]
    ]
    assert len(positions) == 8 and 3 not in positions


def test_a_sample_without_a_single_view_is_a_bad_sample():
    packed = io.BytesIO()
    np.savez(packed, image_emb=np.zeros((0, sum(WIDTHS))), text_emb=np.zeros((3, sum(WIDTHS))))
    members = {"paug.json": b'{"param_aug": []}', "npz": packed.getvalue()}
    assert InShards(WIDTHS, None).stored_view(members, 5).reason == "no teacher"


def test_pictures_of_another_size_get_a_sentence(tmp_path):
    members = [m for number in range(4) for m in members_of(number, "whole")]
    write_tar(
        tmp_path / "00000.tar",
        [(n, noise_jpeg(1, 60, 50) if n.endswith("jpg") else c) for n, c in members],
    )
    with pytest.raises(
        UserError, match=r"the stored crop .* does not fit its picture of 60 x 50 pixels"
    ):
        batches(tmp_path)


def test_what_does_not_go_with_stored_augmentations_is_refused_by_name():
    assert parse_widths("shards:768,768") == (768, 768)
    with pytest.raises(UserError, match="--teacher shards: names no widths"):
        parse_widths("shards:")
    with pytest.raises(
        UserError, match="--captions one-per-epoch does not work with --teacher shards"
    ):
        InShards(WIDTHS, "one-per-epoch")
    assert open_teachers("shards:4,3", None).widths == WIDTHS
    transform = with_auto_augment(image_transform_v2(PreprocessCfg(size=SIZE), is_train=True))
    with pytest.raises(
        UserError, match="repeats the stored augmentation, and this run has its own"
    ):
        InShards(WIDTHS, None).check(split_normalize(transform)[0])
