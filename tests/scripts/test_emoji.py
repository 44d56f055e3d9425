"""The demo's data, from npm packages to shards, on tiny packages in the true formats, without a network."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.shards.tar import Sample, read_samples
from scripts import quickstart
from scripts.drawn.emoji import PACKAGES, SOURCES, concept_of, is_blank, rasterise, read_sources
from scripts.drawn.make import prepare_emoji, write_pairs
from scripts.drawn.packages import NpmPackage, fetch_npm_package, hash_of
from scripts.paper.bias import read_pairs
from support.tars import add_file

#: Small enough for the fake sets: 2 pairs held out of each source for the test, 2 for validation.
SMALL = {"px": 16, "shard_size": 5, "held_out_per_source": 2, "vocab_size": 300}

CONCEPTS = [f"{0x1F600 + i:X}" for i in range(20)]
KEYCAP = "0023-FE0F-20E3"
FLAG = "1F1EB-1F1F7"


# ------------------------------------------------------------------------------------------------ fake packages


def tarball(path: Path, files: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            add_file(tar, f"package/{name}", text.encode())
    return path


def disc(i: int, side: int, fill: str) -> str:
    """A drawing that differs by concept: a disc whose place and size follow from its number."""
    return f'<circle cx="{side * (4 + i % 3) / 10}" cy="{side / 2}" r="{side * (2 + i % 4) / 12}" fill="{fill}"/>'


def iconify(concepts: list[str], side: int, fill: str) -> dict[str, str]:
    names = {c.lower(): f"thing-{i}" for i, c in enumerate(concepts)}
    icons = {f"thing-{i}": {"body": disc(i, side, fill)} for i in range(len(concepts))}
    # As in the real sets: one drawing is the mirror image of another, kept as an alias.
    del icons["thing-1"]
    aliases = {"thing-1": {"parent": "thing-0", "hFlip": True}}
    skin_tone = {f"{concepts[0].lower()}-1f3fb": "thing-2"}  # to be dropped
    facts = {"prefix": "x", "icons": icons, "aliases": aliases, "width": side, "height": side}
    return {"icons.json": json.dumps(facts), "chars.json": json.dumps(names | skin_tone)}


def spoken(name: str, concepts: list[str]) -> dict[str, str]:
    """A package of CLDR's keywords by characters."""
    characters = {"".join(chr(int(x, 16)) for x in c.split("-")): c for c in concepts}
    found = {chars: {"default": ["naïve", f"keyword {c}"]} for chars, c in characters.items()}
    return {f"{name}/en/annotations.json": json.dumps({name: {"annotations": found}})}


def fake_packages(folder: Path) -> dict[str, Path]:
    everything = [*CONCEPTS, KEYCAP, FLAG]
    inner = '<svg><rect width="40" height="20" fill="navy"/></svg>'
    sprite = "".join(
        f'<svg viewBox="0 0 40 20" id="{c}" xmlns="http://www.w3.org/2000/svg">{inner}</svg>'
        for c in (FLAG, CONCEPTS[0])
    )
    rows = [
        {"unified": c, "short_names": [f"short_{i}", f"also-{i}"], "category": "Smileys & Emotion"}
        for i, c in enumerate(everything)
    ]
    rows.append({"unified": "1F3FB", "short_names": ["skin-tone-2"], "category": "Component"})
    table = "hexcode,group,subgroups,annotation,skintone\n" + "".join(
        f'{concept_of(c)},smileys-emotion,face-smiling,"beaming, face {i}",\n'
        for i, c in enumerate(everything)
    )
    table += f"{CONCEPTS[0]}-1F3FB,people-body,hand,light hand,1\n"
    head = '<svg viewBox="0 0 72 72" xmlns="http://www.w3.org/2000/svg">'
    drawn = {
        f"color/svg/{c}.svg": f"{head}{disc(i, 72, 'red')}</svg>" for i, c in enumerate(everything)
    }
    contents = {
        "noto": iconify([*CONCEPTS, KEYCAP], 128, "gold"),
        "noto-flags": {
            "sprites/all.svg": f'<svg viewBox="0 0 9 9"><style>svg{{display:none}}</style>{sprite}</svg>',
            "LICENSE": "terms of the sprite",
        },
        "twemoji": iconify(everything, 36, "orange"),
        "openmoji": {"data/openmoji.csv": table, "LICENSE.txt": "Attribution-ShareAlike", **drawn},
        "fluent": iconify([*CONCEPTS, KEYCAP], 32, "teal"),
        "names": {"emoji.json": json.dumps(rows)},
        "keywords": spoken("annotations", CONCEPTS),
        "keywords-derived": spoken("annotationsDerived", [KEYCAP, FLAG]),
    }  # fmt: skip
    return {
        key: tarball(folder / PACKAGES[key].file_name, files) for key, files in contents.items()
    }


def packages_of(out: Path) -> Path:
    """The folder of fetched packages."""
    return out / ".cache" / "packages"


@pytest.fixture(scope="module")
def emoji(tmp_path_factory):
    """The data, made once, of packages that were fetched before; while it is in use, their hashes are the pinned ones."""
    out = tmp_path_factory.mktemp("made") / "emoji"
    with pytest.MonkeyPatch.context() as patch:
        for key, path in fake_packages(packages_of(out)).items():
            patch.setitem(PACKAGES, key, replace(PACKAGES[key], sha512=hash_of(path)))
        prepare_emoji(out, **SMALL)
        yield out


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the data but the cache."""
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {
        str(name): path.read_bytes() for name, path in files.items() if ".cache" not in name.parts
    }


def samples_in(folder: Path) -> list[Sample]:
    return [sample for path in sorted(folder.glob("*.tar")) for sample in read_samples(path)]


def concepts_in(folder: Path) -> list[str]:
    return [json.loads(sample.files["json"])["concept"] for sample in samples_in(folder)]


# ------------------------------------------------------------------------------------------------ reading the sets


def test_sources_are_read_from_the_true_formats(tmp_path):
    sets = read_sources(fake_packages(tmp_path))
    assert [len(sets[source]) for source in SOURCES] == [22, 22, 22, 21]  # fluent: no flag
    assert all("1F3FB" not in concept for source in SOURCES for concept in sets[source])
    first = CONCEPTS[2]
    assert [sets[source][first].caption for source in SOURCES] == [
        "short 2, also 2 (Smileys & Emotion)",
        f"naïve, keyword {first}",
        "smileys emotion: face smiling: beaming, face 2",
        "thing 2",
    ]
    # from the derived annotations
    assert sets["twemoji"]["23-20E3"].caption == f"naïve, keyword {KEYCAP}"
    # The sprite only fills gaps: the flag comes from it, the first concept does not.
    assert "navy" in sets["noto"][FLAG].svg
    assert "navy" not in sets["noto"][CONCEPTS[0]].svg


def test_drawings_are_square_on_white_and_aliases_mirrored(tmp_path):
    sets = read_sources(fake_packages(tmp_path))
    flag = '<svg width="40" height="20" xmlns="http://www.w3.org/2000/svg"><path d="M0 0h40v20H0z" fill="#00f"/></svg>'
    svgs = [*(sets["fluent"][concept].svg for concept in CONCEPTS[:2]), flag]
    parent, alias, pixels = (
        np.asarray(Image.open(io.BytesIO(rasterise(svg, 40)))).astype(int) for svg in svgs
    )
    assert np.abs(parent - parent[:, ::-1]).max() > 100  # the control: it is not symmetric itself
    assert np.abs(alias - parent[:, ::-1]).max() < 32  # edges are sampled at other points
    assert (pixels[[*range(10), *range(30, 40)]] == 255).all()
    assert (pixels[10:30] == (0, 0, 255)).all()
    empty = '<svg viewBox="0 0 8 8" xmlns="http://www.w3.org/2000/svg"></svg>'
    dot = empty.replace("></", '><circle cx="4" cy="4" r="1" fill="#ddd"/></')
    assert [is_blank(rasterise(svg, 16)) for svg in (empty, dot)] == [True, False]


# ------------------------------------------------------------------------------------------------ the whole way


def test_held_out_pairs_are_held_out_and_nothing_else_is_missing(emoji):
    """Also as `scripts.paper.bias` reads them in the demo, each held-out concept as each source has it."""
    held = {
        (split, source): set(concepts_in(emoji / split / source / "test"))
        for split in ("test", "val")
        for source in SOURCES
    }
    # Each concept is held out once at most, over all sources and both splits.
    assert {len(concepts) for concepts in held.values()} == {2} and len(
        set.union(*held.values())
    ) == 16
    across = {}
    for source in SOURCES:
        train = concepts_in(emoji / source)
        mine = held["test", source] | held["val", source]
        # Other sources' held-out concepts are trained on here.
        assert not mine & {*train} and len(train) + 4 == len({*train} | mine) == 22 - (
            source == "fluent"
        )
        sizes = json.loads((emoji / source / "sizes.json").read_text())
        assert sum(sizes.values()) == len(train) and max(sizes.values()) <= SMALL["shard_size"]
        assert (emoji / source / "LICENSE").read_text().count("Licence: ") == 1
        given = parse_sources(f"a={emoji / 'test-across' / source / 'test'}")
        read = read_pairs(given, 100, concept_field="concept", held_out_field="held_out")
        assert {pair.concept for pair in read if pair.held_out} == held["test", source]
        across[source] = sorted(pair.concept for pair in read)
    tests = sorted(set().union(*(held["test", source] for source in SOURCES)))
    assert list(across.values()) == [tests] * 4
    assert "Attribution-ShareAlike" in (emoji / "openmoji" / "LICENSE").read_text()
    assert "terms of the sprite" in (emoji / "noto" / "LICENSE").read_text()


def test_the_training_pairs_as_a_table_and_pictures(emoji, tmp_path):
    """As the quick start asks for them."""
    count = write_pairs(emoji, tmp_path / "pairs")
    with open(tmp_path / "pairs" / "pairs.csv", encoding="utf-8", newline="") as table:
        rows = [
            (
                (tmp_path / "pairs" / row["filepath"]).read_bytes(),
                row["title"].encode(),
                row["site"],
            )
            for row in csv.DictReader(table)
        ]
    assert len(rows) == count and rows == [
        (sample.files["png"], sample.files["txt"], source)
        for source in SOURCES
        for sample in samples_in(emoji / source)
    ]


@pytest.mark.slow(reason="every command of the page, on 80 pairs: a minute and a half")
@pytest.mark.timeout(600)
def test_the_quick_start_runs_as_its_page_stands(emoji, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(packages_of(emoji), packages_of(folder / "data" / "emoji"))
    prepare_emoji(folder / "data" / "emoji", px=16, held_out_per_source=1, vocab_size=300)
    count = write_pairs(folder / "data" / "emoji", folder / "pairs")
    first = "python -m scripts.drawn emoji --out data/emoji --pairs pairs"
    few = {
        first: f"echo '{count} pairs are in pairs/pairs.csv'",
        "--batch-size 32": "--batch-size 2",
    }
    row = "pictures/noto/noto-1f401.png,mouse2 (Animals & Nature),noto"
    hit = "  1  0.726  test/0.tar/2db122b442130bdbb55e3951\n            clock2 (Travel & Places)"
    assert all(text in quickstart.PAGE.read_text() for text in (row, hit))
    few |= {"--test-share 0.1": "--test-share 0.5", row: "...", hit: "..."}  # other pictures
    quickstart.run(quickstart.PAGE, folder, few)
    assert (folder / "found.html").is_file() and (
        folder / "exported" / "open_clip_config.json"
    ).is_file()


def test_printed_lines_replace_shown_ones_with_other_numbers_only():
    printed = ["a bar", "noto  1,341 pictures  5.3 MB", "Done in 7 s", "/tmp/x: table, 5 rows"]
    shown = ["noto 12 pictures 1 MB", "Done in 333 s"]
    assert quickstart.printed_again(shown, printed) == printed[1:3]
    assert quickstart.printed_again(["/tmp/x: tab ..."], printed) == ["/tmp/x: tab ..."]
    for wrong in (["noto 12 captions 1 MB"], ["Done in 3 s", "noto 12 pictures 1 MB"]):
        with pytest.raises(UserError, match="was not printed"):
            quickstart.printed_again(wrong, printed)


def test_the_same_settings_give_the_same_bytes_and_other_settings_leave_none_behind(
    emoji, tmp_path
):
    for place in ("again", "fresh"):
        shutil.copytree(packages_of(emoji), packages_of(tmp_path / place))
    prepare_emoji(tmp_path / "again", **SMALL)
    assert contents(tmp_path / "again") == contents(emoji)
    for place in ("again", "fresh"):
        prepare_emoji(tmp_path / place, **SMALL | {"shard_size": 100, "seed": 1})
    made = contents(tmp_path / "again")
    assert made == contents(tmp_path / "fresh")
    assert made["test/noto/test/0.tar"] != contents(emoji)["test/noto/test/0.tar"]


NPM = """#!{python}
import pathlib, sys
assert sys.argv[1:3] == ["pack", "{package}"]
pathlib.Path("{package.file_name}").write_bytes({content})
"""


def test_another_download_than_the_pinned_one_is_not_taken(tmp_path, monkeypatch):
    """Nor is a tarball that was cut off on disk."""
    folder, whole = tmp_path / "packages", b"a tarball"
    (tmp_path / "whole").write_bytes(whole)
    package = NpmPackage("@a/b", "1.0.0", hash_of(tmp_path / "whole"))
    npm = tmp_path / "npm"
    monkeypatch.setenv("PATH", str(tmp_path))
    npm.write_text(NPM.format(python=sys.executable, package=package, content=whole[:-1]))
    npm.chmod(0o755)
    with pytest.raises(UserError, match="The SHA-512 of .* not the pinned one"):
        fetch_npm_package(package, folder)
    assert list(folder.iterdir()) == []
    npm.write_text(NPM.format(python=sys.executable, package=package, content=whole))
    (folder / package.file_name).write_bytes(whole[:-1])
    assert fetch_npm_package(package, folder).read_bytes() == whole


def test_the_bert_folder_works_in_open_clip_offline(emoji, monkeypatch):
    """Every caption of the training in known pieces, padded by 0."""
    from open_clip.tokenizer import HFTokenizer
    from transformers import AutoConfig

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = HFTokenizer(str(emoji / "bert"), context_length=25)
    pieces = tokenizer.tokenizer
    train = [s.files["txt"].decode() for source in SOURCES for s in samples_in(emoji / source)]
    ids = tokenizer(train)
    assert (pieces.pad_token_id, pieces.cls_token, pieces.sep_token) == (0, "[CLS]", "[SEP]")
    assert ids.shape == (len(train), 25) and (ids[:, 0] == pieces.cls_token_id).all()
    assert not (ids == pieces.unk_token_id).any()
    # a negative control: unseen letters are unknown
    assert pieces.unk_token_id in pieces("日")["input_ids"]
    said = pieces.decode(pieces("Naïve, thing 2")["input_ids"], skip_special_tokens=True)
    assert said == "naive, thing 2"
    assert AutoConfig.from_pretrained(emoji / "bert").vocab_size == len(pieces)
