"""One rule of held-out pictures: `align`, `finetune` and `data pack` hold out the same ones, in whatever order they run."""

from __future__ import annotations

import json
from tarfile import open as open_tar

import numpy as np
import pytest

from open_clip_zerovl.align.alignment import run_align
from open_clip_zerovl.data.splits import TRAINED_ON, as_keys, trained_on, write_trained_on
from open_clip_zerovl.finetune.data import DataArguments
from open_clip_zerovl.finetune.split import hold_out
from open_clip_zerovl.prepare.pack import pack
from open_clip_zerovl.prepare.settings import PackSettings, Work

SHARE = 0.25


@pytest.fixture
def packed(home, tmp_path):
    """The pictures of `a` packed without and with a held-out share."""
    for name, share in (("all", 0.0), ("split", SHARE)):
        settings = PackSettings(test_share=share, shard_size=25)
        pack([str(home / "a")], tmp_path / name, settings, work=Work(progress=False))
    return tmp_path


def test_align_and_finetune_and_pack_hold_out_the_same_pictures(request_of, packed):
    data = f"mine={packed / 'all' / 'train'}"
    given = {"train_data": data, "held_out": "", "epochs": 1, "batch_size": 16}
    given["held_out_share"] = SHARE

    def aligned(out: str, seed: int, **more) -> set[str]:
        request = request_of(packed / out, **given, seed=seed, **more)
        run_align(request, lambda line: None)
        return set(json.loads((packed / out / "align.json").read_text())["held_out"])

    def finetuned(out: str, seed: int, model: str) -> set[str]:
        """With a model's folder, as `write_outcome` leaves it."""
        split = hold_out(
            DataArguments({"--data": data}), packed / out, seed=seed, model=model, share=SHARE
        )
        write_trained_on(packed / out / "model", split.trained, trained_on([model]))
        assert set(as_keys(split.held_out)).isdisjoint(as_keys(split.trained))
        return set(as_keys(split.held_out))

    first = aligned("align", 0)
    assert 10 < len(first) < 30 and finetuned("ft", 0, "none") == first
    with open_tar(packed / "split" / "test" / "0.tar") as tar:
        keys = {name.partition(".")[0][:16] for name in tar.getnames()}
    assert keys == first
    # With another seed the model's own list decides: it has seen all others.
    model = str(packed / "align" / "model")
    assert len(finetuned("after", 1, model)) == 10 == len(finetuned("after", 1, model) & first)
    assert not finetuned("stranger", 1, "none") <= first  # negative control
    # And the other way round; each list also holds what the model before has seen.
    seen = trained_on([packed / "stranger" / "model"])
    (packed / "align" / "model" / TRAINED_ON).write_bytes(
        (packed / "stranger" / "model" / TRAINED_ON).read_bytes()
    )
    other = finetuned("again", 1, "none")
    second = aligned("second", 0, images=(model,))
    assert len(second) == 10 == len(second & other)
    assert set(trained_on([packed / "second" / "model"])) >= set(seen)
    assert len(np.unique(seen)) == 60 - len(other)
