"""Cached features of a frozen tower equal computed ones, train alike, and are thrown away when anything changes."""

import errno
import logging
import os
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.transform import image_transform

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.embeddings.store import Manifest, Store
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.frozen_cache import FrozenCache, require_deterministic
from open_clip_zerovl.recipe.mixup import CoinFlipMixup, Mix
from open_clip_zerovl.recipe.step import RecipeStep
from open_clip_zerovl.recipe.towers import freeze
from support.dga_reference import TOLERANCE, batches, bert_clip, error, gradients, vit

WIDTH = 16


def sources(*sizes):
    return [
        Source(name=f"s{i}", shards=(f"/d/s{i}/0.tar",), sizes=(size,))
        for i, size in enumerate(sizes)
    ]


def cache(folder, *, sizes=(7, 5), mark="a", tower="text"):
    return FrozenCache(folder, sources(*sizes), tower=tower, width=WIDTH, fingerprint=mark)


def frozen_model(dtype=torch.float32):
    model = bert_clip(dtype)
    freeze(model, ["text"])
    return model.train()


def calls_of(model):
    calls = []
    model.text.transformer.register_forward_hook(lambda *_: calls.append(1))
    return calls


ORIGIN = torch.tensor([[0, 3], [1, 4], [0, 6], [1, 0]])


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_over_epochs_and_processes(tmp_path):
    first = cache(tmp_path)
    features = torch.randn(4, WIDTH)
    assert first.get(ORIGIN) is None and len(first) == 0
    first.put(ORIGIN, features)
    assert torch.equal(first.get(ORIGIN), features) and len(first) == 4
    later = ORIGIN + torch.tensor(
        [[0, 14], [0, 5], [0, 7], [0, 10]]
    )  # positions go on in later epochs
    assert torch.equal(first.get(later), features)
    assert first.get(torch.tensor([[0, 3], [0, 0]])) is None  # one is missing: none
    other = cache(tmp_path)  # opened before the marks were written: its rows are not believed yet
    assert other.get(ORIGIN) is None
    other.put(torch.tensor([[0, 0]]), features[:1])
    first.flush()
    other.flush()
    assert torch.equal(other.get(ORIGIN), features)
    first.flush()
    assert torch.equal(first.get(torch.tensor([[0, 0]])), features[:1])
    assert torch.equal(cache(tmp_path).get(ORIGIN), features)


@pytest.mark.parametrize("change", [{"mark": "b"}, {"tower": "image"}])
def test_a_change_throws_the_cache_away_and_says_so(tmp_path, change, caplog):
    first = cache(tmp_path)
    first.put(ORIGIN, torch.ones(4, WIDTH))
    first.flush()
    with caplog.at_level(logging.WARNING):
        assert len(cache(tmp_path)) == 4 and not caplog.records
        assert len(cache(tmp_path, **change)) == 0
    assert "made anew" in caplog.text
    (tmp_path / "embeddings.json").write_text("{")  # not finished
    assert len(cache(tmp_path)) == 0


def test_embeddings_of_another_use_are_never_thrown_away(tmp_path):
    made = Manifest({"use": "teachers"}, [], {"0.images": ("float16", (2, 4))})
    Store.create(tmp_path, made).rows["0.images"][:] = torch.ones(2, 4)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        UserError,
        match="holds embeddings for teachers, which are not replaced; give another folder",
    ):
        cache(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def written(folder, *contents, captions=None):
    """A source of one sample a shard."""
    shards = []
    folder.mkdir(exist_ok=True)
    for index, content in enumerate(contents):
        (folder / f"{index}.tar").write_bytes(content)
        shards.append(str(folder / f"{index}.tar"))
    return Source(name="s", shards=tuple(shards), sizes=(1,) * len(shards), captions=captions)


def of(folder, source):
    return FrozenCache(folder, [source], tower="text", width=WIDTH, fingerprint="a")


def test_other_data_under_the_same_names_is_noticed_and_the_rest_kept(tmp_path, caplog):
    source = written(tmp_path / "data", b"one", b"two")
    folder = tmp_path / "cache"
    made = of(folder, source)
    features = torch.randn(2, WIDTH)
    made.put(torch.tensor([[0, 0], [0, 1]]), features)
    made.flush()
    assert len(of(folder, source)) == 2 and not caplog.records
    first, second = map(Path, source.shards)
    then = second.stat().st_mtime_ns
    second.write_bytes(b"longer")
    os.utime(second, ns=(0, then))
    with caplog.at_level(logging.INFO):
        found = of(folder, source)
    assert torch.equal(found.get(torch.tensor([[0, 0]])), features[:1]) and len(found) == 1
    assert (
        "other data: they are of other data: shard 1.tar of 's' differs, or was not there: its embeddings are kept of 1 samples"
        in caplog.text
    )
    os.utime(first, ns=(0, 1))  # the same size, another time
    assert len(of(folder, source)) == 0
    longer = written(tmp_path / "data", b"new", b"one", b"longer")
    assert len(of(folder, longer)) == 0


def test_a_full_disk_is_reported_before_training(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):  # a sentence at the boundary
        cache(tmp_path)
    monkeypatch.undo()
    cache(tmp_path)
    assert (tmp_path / "features.npy").stat().st_blocks > 0  # taken already: no bus error later


# --- in a model ------------------------------------------------------------------------------------------------------


def test_training_with_the_cache_is_training_without(tmp_path):
    """Two epochs: the same gradients, the tower run in the first only."""
    sizes = [3, 4]
    micro_batches = batches(sizes, torch.float32)
    origins = [torch.tensor([[0, k] for k in range(3)]), torch.tensor([[1, k] for k in range(4)])]
    plain, cached = frozen_model(), frozen_model()
    store = cache(tmp_path)
    store.attach(cached)
    calls = calls_of(cached)
    with_origin = [(*pair, origin) for pair, origin in zip(micro_batches, origins, strict=True)]
    for epoch in range(2):
        found = []
        for model, inputs, prepare in (
            (plain, micro_batches, None),
            (cached, with_origin, store.prepare),
        ):
            torch.manual_seed(epoch)
            DecoupledGradientAccumulation(model, ContrastiveLoss(), check="always").backward(
                inputs, prepare=prepare
            )
            found.append(gradients(model))
        assert error(found[1], found[0]) < TOLERANCE[torch.float32]
        assert len(calls) == 2
    assert len(store) == 7


@pytest.mark.parametrize("compiled", [False, True])
def test_features_are_equal_to_1e6_and_evaluation_goes_past_the_cache(tmp_path, compiled):
    model = frozen_model()
    model.visual.eval()
    images, texts = batches([4], torch.float32)[0]
    expected = model(images, texts)["text_features"]
    store = cache(tmp_path)
    store.attach(model)
    calls = calls_of(model)
    called = torch.compile(model, backend="eager") if compiled else model
    for _ in range(2):
        assert store.prepare(images, texts, ORIGIN) == (images, texts)
        assert (called(images, texts)["text_features"] - expected).abs().max() < 1e-6
    assert len(calls) == 1 and len(store) == 4
    other = texts.flip(0)
    assert (
        torch.allclose(model.encode_text(other, normalize=True), expected.flip(0), atol=1e-6)
        and len(calls) == 2
    )


def test_evaluation_after_a_step_goes_past_the_cache(tmp_path):
    """The replay announces its samples, and the frozen tower, which is not run again, takes no notice of them."""
    model, micro_batches = frozen_model(), batches([3, 4], torch.float32)
    other = batches([3], torch.float32, seed=2)[0][1]
    expected = model.encode_text(other)
    store = cache(tmp_path)
    store.attach(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    step = RecipeStep(model, ContrastiveLoss(), optimizer, precision="fp32", cache=store)
    origins = [torch.tensor([[source, k] for k in range(3 + source)]) for source in range(2)]
    step.take([(*pair, origin) for pair, origin in zip(micro_batches, origins, strict=True)], 0)
    assert torch.allclose(model.encode_text(other), expected, atol=1e-6) and len(store) == 7


def test_mixup_applies_to_what_was_looked_up(tmp_path):
    model = frozen_model()
    texts = batches([4], torch.float32)[0][1]
    plain = model.encode_text(texts)
    store, mixup = cache(tmp_path), CoinFlipMixup()
    store.attach(model)
    mixup.attach(model)
    for _ in range(2):
        store.prepare(texts, texts, ORIGIN)
        with mixup.applied(Mix(False, 0.3)):
            mixed = model.encode_text(texts)
        torch.testing.assert_close(mixed, 0.3 * plain + 0.7 * plain.flip(0))
    torch.testing.assert_close(store.get(ORIGIN), plain)  # unmixed


TEXT = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}


# --- its key ---------------------------------------------------------------------------------------------------------


def test_augmented_images_are_refused():
    require_deterministic(image_transform(32, is_train=False))
    with pytest.raises(UserError, match="augmented images"):
        require_deterministic(image_transform(32, is_train=True))


def test_a_tower_that_is_not_a_module_is_refused(tmp_path):
    plain = open_clip.CLIP(embed_dim=WIDTH, vision_cfg=vit(), text_cfg=TEXT)
    with pytest.raises(UserError, match="--force-custom-text"):
        cache(tmp_path).attach(plain)
