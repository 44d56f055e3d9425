"""Cached features of a frozen tower equal computed ones, train alike, and are thrown away when anything changes."""

import copy
import dataclasses
import errno
import json
import logging
import os

import numpy as np
import open_clip
import pytest
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transform import image_transform

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.frozen_cache import FrozenCache, fingerprint, require_deterministic
from open_clip_zerovl.recipe.mixup import CoinFlipMixup, Mix
from open_clip_zerovl.recipe.step import RecipeStep
from open_clip_zerovl.recipe.towers import freeze
from support.dga_reference import TOLERANCE, batches, bert_clip, error, gradients
from support.tiny_clip import WORDS, write_bert

WIDTH = 16


def sources(*sizes):
    return [Source(name=f"s{i}", shards=(f"/d/s{i}/0.tar",), sizes=(size,)) for i, size in enumerate(sizes)]


def cache(folder, *, sizes=(7, 5), mark="a", dtype="float32", tower="text"):
    return FrozenCache(folder, sources(*sizes), tower=tower, width=WIDTH, fingerprint=mark, dtype=dtype)


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
    later = ORIGIN + torch.tensor([[0, 14], [0, 5], [0, 7], [0, 10]])  # positions go on in later epochs
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


def test_float16_takes_half_the_space(tmp_path):
    half = cache(tmp_path / "half", dtype="float16")
    features = torch.randn(4, WIDTH)
    half.put(ORIGIN, features)
    assert (half.get(ORIGIN) - features).abs().max() < 5e-4 * features.abs().max()
    cache(tmp_path / "whole")
    sizes = [(tmp_path / kind / "0.features").stat().st_size for kind in ("half", "whole")]
    assert sizes == [7 * WIDTH * 2, 7 * WIDTH * 4]


@pytest.mark.parametrize("change", [{"mark": "b"}, {"sizes": (7, 6)}, {"dtype": "float16"}])
def test_a_change_throws_the_cache_away_and_says_so(tmp_path, change, caplog):
    first = cache(tmp_path)
    first.put(ORIGIN, torch.ones(4, WIDTH))
    first.flush()
    with caplog.at_level(logging.WARNING):
        assert len(cache(tmp_path)) == 4 and not caplog.records
        assert len(cache(tmp_path, **change)) == 0
    assert "made anew" in caplog.text


def test_a_cache_that_was_not_finished_is_made_anew(tmp_path):
    cache(tmp_path).flush()
    (tmp_path / "cache.json").write_text("{")
    assert len(cache(tmp_path)) == 0


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


def filled(folder, source):
    found = of(folder, source)
    found.put(torch.tensor([[0, 0]]), torch.ones(1, WIDTH))
    found.flush()
    return folder


def test_other_data_under_the_same_names_is_noticed(tmp_path, caplog):
    source = written(tmp_path / "data", b"one", b"two")
    folder = filled(tmp_path / "cache", source)
    assert len(of(folder, source)) == 1 and not caplog.records
    elsewhere = written(tmp_path / "elsewhere", b"one", b"TWO")  # same names and sizes
    assert len(of(folder, elsewhere)) == 0
    assert "other data (0.tar has another size or modification time): made anew" in caplog.text
    filled(folder, elsewhere)
    longer = written(tmp_path / "elsewhere", b"one", b"longer")
    os.utime(longer.shards[0], ns=(0, json.loads((folder / "shards.json").read_text())[0][0][2]))
    assert len(of(folder, longer)) == 0 and "other data (1.tar has another size" in caplog.text


def test_a_cache_without_a_record_of_its_data_is_taken_if_nothing_was_written_since(tmp_path, caplog):
    source = written(tmp_path / "data", b"one")
    folder = filled(tmp_path / "cache", source)
    (folder / "shards.json").unlink()
    with caplog.at_level(logging.INFO):
        assert len(of(folder, source)) == 1
    assert "without a record of the data" in caplog.text and (folder / "shards.json").is_file()
    (folder / "shards.json").unlink()
    later = (folder / "cache.json").stat().st_mtime_ns + 10**9
    os.utime(source.shards[0], ns=(later, later))
    assert len(of(folder, source)) == 0
    assert "other data (0.tar was written after them): made anew" in caplog.text


def test_captions_that_change_with_the_epoch_are_refused(tmp_path):
    source = written(tmp_path / "data", b"one", captions="one-per-epoch")
    with pytest.raises(UserError, match="'s' shows another caption of an image in each epoch .*--captions all"):
        of(tmp_path / "cache", source)
    FrozenCache(tmp_path / "images", [source], tower="image", width=WIDTH, fingerprint="a")
    of(tmp_path / "cache", written(tmp_path / "data", b"one", captions="all"))


def test_a_disk_without_space_is_told_before_training(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="cannot be written .*No space left"):
        cache(tmp_path)
    monkeypatch.undo()
    cache(tmp_path)
    assert (tmp_path / "0.features").stat().st_blocks > 0  # taken already: no bus error later


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
    with_origin = [(*micro_batch, origin) for micro_batch, origin in zip(micro_batches, origins, strict=True)]
    for epoch in range(2):
        found = {}
        for name, model, inputs, prepare in (
            ("plain", plain, micro_batches, None),
            ("cached", cached, with_origin, store.prepare),
        ):
            torch.manual_seed(epoch)
            dga = DecoupledGradientAccumulation(model, ContrastiveLoss(), check="always")
            dga.backward(inputs, prepare=prepare)
            found[name] = gradients(model)
        assert error(found["cached"], found["plain"]) < TOLERANCE[torch.float32]
        assert len(calls) == 2
    assert len(store) == 7


def test_features_are_equal_to_1e6_and_evaluation_goes_past_the_cache(tmp_path):
    model = frozen_model()
    texts = batches([4], torch.float32)[0][1]
    expected = model.encode_text(texts)
    store = cache(tmp_path)
    store.attach(model)
    calls = calls_of(model)
    for _ in range(2):
        assert store.prepare(texts, texts, ORIGIN) == (texts, texts)
        assert (model.encode_text(texts) - expected).abs().max() < 1e-6
    assert len(calls) == 1
    other = texts.flip(0)
    assert torch.allclose(model.encode_text(other), expected.flip(0), atol=1e-6) and len(calls) == 2  # not announced
    store.prepare(texts, texts, ORIGIN)
    with pytest.raises(UserError, match="4 samples were announced to the cache, 3 came"):
        model.encode_text(texts[:3])


def test_features_in_float16_are_the_same_from_the_tower_and_from_the_disk(tmp_path):
    """To the bit, so that a run that is resumed with a cache half full trains as one that was not interrupted."""
    model = frozen_model()
    texts = batches([4], torch.float32)[0][1]
    exact = model.encode_text(texts)
    store = cache(tmp_path, dtype="float16")
    store.attach(model)
    found = []
    for _ in range(2):
        store.prepare(texts, texts, ORIGIN)
        found.append(model.encode_text(texts))
    assert torch.equal(*found) and not torch.equal(found[0], exact)


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


def test_only_a_frozen_tower_is_cached(tmp_path):
    store = cache(tmp_path)
    with pytest.raises(UserError, match="freeze the text tower first"):
        store.attach(bert_clip(torch.float32))
    model = bert_clip(torch.float32)
    model.text.requires_grad_(False)
    with pytest.raises(UserError, match="training mode"):
        store.attach(model)
    partly = bert_clip(torch.float32)
    freeze(partly, ["text"], projection=False)
    with pytest.raises(UserError, match="freeze the text tower first"):
        store.attach(partly)
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
    with pytest.raises(UserError, match="--force-custom-text"):
        store.attach(open_clip.CLIP(embed_dim=WIDTH, vision_cfg=vision, text_cfg=text))
    store.attach(frozen_model())
    with pytest.raises(UserError, match="already"):
        store.attach(frozen_model())
    with pytest.raises(UserError, match=r"must be \(4, 16\)"):
        store.put(ORIGIN, torch.zeros(4, 8))
    with pytest.raises(UserError, match="origin must be"):
        store.prepare(torch.zeros(3), torch.zeros(3, 12, dtype=torch.long), ORIGIN)
    for options, message in (({"tower": "sound"}, "no tower"), ({"dtype": "int8"}, "int8")):
        with pytest.raises(UserError, match=message):
            cache(tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        cache(tmp_path / "file")


# --- what it depends on ----------------------------------------------------------------------------------------------


def test_the_fingerprint_changes_with_weights_tokenizer_data_and_precision(tmp_path):
    folder = write_bert(tmp_path / "bert")
    tokenizer = HFTokenizer(str(folder), context_length=12)
    model, data = frozen_model(), sources(7, 5)
    first = fingerprint(model, "text", data, inputs=tokenizer)
    tokenizer(["a cat"])  # leaves a length to cut and to pad to in the tokenizer
    assert fingerprint(model, "text", data, inputs=tokenizer) == first
    assert fingerprint(frozen_model(), "text", data, inputs=HFTokenizer(str(folder), context_length=12)) == first
    image_only = copy.deepcopy(model)
    with torch.no_grad():
        image_only.visual.proj.add_(1)
        image_only.logit_scale.add_(1)
    assert fingerprint(image_only, "text", data, inputs=tokenizer) == first
    assert fingerprint(model, "text", data, inputs=tokenizer, pixel_path="arrays") == first
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.text.proj.weight[0, 0] += 1e-6
    smaller = write_bert(tmp_path / "smaller", words=WORDS[:-1])
    others = [
        fingerprint(changed, "text", data, inputs=tokenizer),
        fingerprint(model, "image", data, inputs=tokenizer),
        fingerprint(model, "image", data, inputs=tokenizer, pixel_path="arrays"),
        fingerprint(model, "text", sources(7, 6), inputs=tokenizer),
        fingerprint(model, "text", data, inputs=tokenizer, precision="amp_bf16"),
        fingerprint(model, "text", data, inputs=HFTokenizer(str(folder), context_length=11)),
        fingerprint(model, "text", data, inputs=HFTokenizer(str(folder), context_length=12, clean="lower")),
        fingerprint(model, "text", data, inputs=HFTokenizer(str(smaller), context_length=12)),
        fingerprint(model, "image", data, inputs=image_transform(32, is_train=False)),
        fingerprint(model, "image", data, inputs=image_transform(40, is_train=False)),
    ]
    clusters = [dataclasses.replace(source, picked=np.arange(source.num_samples)) for source in data]
    others.append(fingerprint(model, "text", clusters, inputs=tokenizer))
    clusters[0] = dataclasses.replace(clusters[0], picked=np.arange(1, clusters[0].num_samples + 1))
    others.append(fingerprint(model, "text", clusters, inputs=tokenizer))
    assert len({first, *others}) == 13


def test_augmented_images_are_refused():
    require_deterministic(image_transform(32, is_train=False))
    with pytest.raises(UserError, match="augmented images"):
        require_deterministic(image_transform(32, is_train=True))


def test_a_compiled_model_looks_up_too(tmp_path):
    model = frozen_model()
    model.visual.eval()
    images, texts = batches([4], torch.float32)[0]
    expected = model(images, texts)["text_features"]
    store = cache(tmp_path)
    store.attach(model)
    calls = calls_of(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        store.prepare(images, texts, ORIGIN)
        assert (compiled(images, texts)["text_features"] - expected).abs().max() < 1e-6
    assert len(calls) == 1 and len(store) == 4


def test_the_fingerprint_of_clips_own_tokenizer_is_the_same_in_each_process():
    model, data = frozen_model(), sources(7, 5)
    one, other = (
        fingerprint(model, "text", data, inputs=SimpleTokenizer(context_length=12)) for _ in range(2)
    )  # each its own object, as in another process
    assert one == other != fingerprint(model, "text", data, inputs=SimpleTokenizer(context_length=11))
