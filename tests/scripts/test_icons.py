"""Icon families from npm packages to shards, on tiny packages in the true format and a stub for npm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.members import read_samples
from scripts.drawn.icons import ICONS, read_icons, split_names
from scripts.drawn.make import load_drawn_split, prepare_drawn
from support.npm import Registry, tarball

PACKAGES, SOURCES = ICONS.packages, tuple(ICONS.sources)
#: Twenty icons a family, those of streamline with the category as one word, as its makers write it.
_WORDS = "ant bee cat dog elk fox gnu hen ibis jay kite lynx mole newt owl pig quail rat seal toad"
NAMES = [f"thing-{word}" for word in _WORDS.split()]


def fake_packages(folder: Path) -> dict[str, Path]:
    for i, source in enumerate(SOURCES):
        bodies = {
            name: {"body": f'<rect x="{k % 5}" y="{k // 5}" width="{6 + i}" height="{3 + k % 4}"/>'}
            for k, name in enumerate(NAMES)
        }
        variants = {
            "thing-ant-2": bodies[NAMES[0]],
            "thing-bee-outline": bodies[NAMES[1]],
            "gone": {**bodies[NAMES[2]], "hidden": True},
        }
        icons = {"prefix": "x", "icons": bodies | variants, "width": 16, "height": 16}
        files = {"icons.json": json.dumps(icons), "info.json": "{}"}
        if source != "game-icons":
            category = "WildAnimals" if source == "streamline" else "Wild / Animals"
            files["metadata.json"] = json.dumps({"categories": {category: NAMES[:10]}})
        tarball(folder / PACKAGES[source].file_name, PACKAGES[source], files)
    return {source: folder / PACKAGES[source].file_name for source in SOURCES}


def test_families_are_read_without_variants_and_with_their_own_style_of_captions(tmp_path):
    families = read_icons(fake_packages(tmp_path))
    assert all(sorted(icons) == sorted(NAMES) for icons in families.values())
    captions = {source: icons["thing-ant"].caption for source, icons in families.items()}
    assert captions == {
        "mdi": "thing ant (Wild Animals)",
        "game-icons": "thing ant",
        "icon-park": "Wild Animals: thing ant",
        "streamline": "animals, ant, thing, wild",
    }
    assert families["mdi"]["thing-toad"].caption == "thing toad"


def test_the_split_holds_each_source_out_by_itself_and_keeps_half(tmp_path):
    families = read_icons(fake_packages(tmp_path))
    split = split_names(families, held_out_per_source=3, seed=0)
    for source in SOURCES:
        test, val = set(split["test"][source]), set(split["val"][source])
        assert len(test) == len(val) == 3 and not test & val and test | val <= set(families[source])
    assert split == split_names(dict(reversed(families.items())), held_out_per_source=3, seed=0)
    assert split != split_names(families, held_out_per_source=3, seed=1)
    with pytest.raises(
        UserError, match="Holding 6 of the 20 icons of .* lower held_out_per_source"
    ):
        split_names(families, held_out_per_source=6, seed=0)


def test_the_data_is_written_once_and_no_held_out_icon_is_trained_on(tmp_path, monkeypatch, capsys):
    registry = Registry(tmp_path, fake_packages).stub(monkeypatch, PACKAGES)
    out = tmp_path / "icons"
    small = {"px": 16, "shard_size": 5, "held_out_per_source": 2, "vocab_size": 300}
    card = prepare_drawn(ICONS, out, **small)
    assert [card["sources"][source]["train"] for source in SOURCES] == [16] * 4
    for source, samples in load_drawn_split(ICONS, out, "test").items():
        assert [sample.held_out for sample in samples] == [True, True]
        trained = {
            s.key for shard in sorted((out / source).glob("*.tar")) for s in read_samples(shard)
        }
        assert len(trained) == 16 and not trained & {
            f"{source}-{sample.concept}" for sample in samples
        }
    assert not (out / "test-across").exists() and (out / "bert" / "config.json").is_file()
    assert "ByteDance" in (out / "test" / "icon-park" / "LICENSE").read_text()
    called = len(registry.calls)
    prepare_drawn(ICONS, out, **small)
    assert len(registry.calls) == called and "nothing to do" in capsys.readouterr().out
