"""The demo's data, from npm packages to shards, on tiny packages in the true formats and a stub for npm.

Nothing here needs the network: `npm pack` is a script that copies tarballs which the tests write. The code under test
finds, calls and checks it as it does the real one.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.shards.tar import read_samples
from scripts import quickstart
from scripts.drawn import __main__ as command
from scripts.drawn import make, packages
from scripts.drawn.emoji import PACKAGES, concept_of, is_blank, rasterise, read_sources
from scripts.drawn.emoji import SOURCES as SETS
from scripts.drawn.make import prepare_emoji, write_pairs
from scripts.drawn.packages import NpmPackage, fetch_npm_package, hash_of
from scripts.paper.bias import read_pairs
from scripts.program import program
from support.tars import add_file

#: Small enough for the fake sets: 2 pairs held out of each source for the test, 2 for validation.
SMALL = {"px": 16, "shard_size": 5, "held_out_per_source": 2, "vocab_size": 300}

SOURCES = tuple(SETS)
CONCEPTS = [f"{0x1F600 + i:X}" for i in range(20)]
KEYCAP = "0023-FE0F-20E3"
FLAG = "1F1EB-1F1F7"


# ------------------------------------------------------------------------------------------------ fake packages


def tarball(path: Path, package: NpmPackage, files: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = {
        "package.json": json.dumps({"name": package.name, "version": package.version}),
        **files,
    }
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            add_file(tar, f"package/{name}", text.encode())


class Registry:
    """A folder of tarballs, and an `npm` on PATH that hands them out and writes down every call."""

    def __init__(self, folder: Path, tarballs: Callable[[Path], dict[str, Path]]) -> None:
        self.folder = folder / "registry"
        self.log = folder / "npm.log"
        self.faults = folder / "faults"  # one line a call to spoil: "broken" or "fail"
        self.tarballs = tarballs(self.folder)
        script = folder / "bin" / "npm"
        script.parent.mkdir()
        script.write_text(f"#!{sys.executable}\n{_NPM.format(folder=str(folder))}")
        script.chmod(0o755)
        self.bin = script.parent

    def stub(self, monkeypatch, packages: dict[str, NpmPackage]) -> Registry:
        """Put it in npm's place for this test, with the hashes of the made-up tarballs."""
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}{os.environ['PATH']}")
        for key, package in packages.items():
            pinned = replace(package, sha512=hash_of(self.tarballs[key]))
            monkeypatch.setitem(packages, key, pinned)
        return self

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


_NPM = """
import pathlib, sys
home = pathlib.Path({folder!r})
assert sys.argv[1] == "pack"
name, _, version = sys.argv[2].rpartition("@")
with (home / "npm.log").open("a") as log:
    log.write(sys.argv[2] + "\\n")
faults = (home / "faults").read_text().split() if (home / "faults").exists() else []
(home / "faults").write_text(" ".join(faults[1:]))
file = name.lstrip("@").replace("/", "-") + "-" + version + ".tgz"
data = (home / "registry" / file).read_bytes()
if faults[:1] == ["fail"]:
    sys.stderr.write("npm error code ECONNRESET\\n")
    sys.exit(1)
pathlib.Path(file).write_bytes(data[: len(data) // 2] if faults[:1] == ["broken"] else data)
"""


def disc(i: int, side: int, fill: str) -> str:
    """A drawing that differs by concept: a disc whose place and size follow from its number."""
    return f'<circle cx="{side * (4 + i % 3) / 10}" cy="{side / 2}" r="{side * (2 + i % 4) / 12}" fill="{fill}"/>'


def iconify(concepts: list[str], side: int, fill: str) -> dict[str, str]:
    names = {c.lower(): f"thing-{i}" for i, c in enumerate(concepts)}
    icons = {f"thing-{i}": {"body": disc(i, side, fill)} for i in range(len(concepts))}
    # As in the real sets: one drawing is the mirror image of another, kept as an alias.
    del icons["thing-1"]
    aliases = {"thing-1": {"parent": "thing-0", "hFlip": True}}
    return {
        "icons.json": json.dumps(
            {"prefix": "x", "icons": icons, "aliases": aliases, "width": side, "height": side}
        ),
        "chars.json": json.dumps(
            names | {f"{concepts[0].lower()}-1f3fb": "thing-2"}
        ),  # a skin tone, to be dropped
        "info.json": "{}",
    }


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

    def spoken(name: str, concepts: list[str]) -> dict[str, str]:
        characters = {"".join(chr(int(x, 16)) for x in c.split("-")): c for c in concepts}
        found = {
            chars: {"default": ["naïve", f"keyword {c}"], "tts": ["x"]}
            for chars, c in characters.items()
        }
        return {f"{name}/en/annotations.json": json.dumps({name: {"annotations": found}})}

    head = '<svg viewBox="0 0 72 72" xmlns="http://www.w3.org/2000/svg">'
    contents = {
        "noto": iconify([*CONCEPTS, KEYCAP], 128, "gold"),
        "noto-flags": {
            "sprites/all.svg": f'<svg viewBox="0 0 9 9"><style>svg{{display:none}}</style>{sprite}</svg>',
            "LICENSE": "terms of the sprite",
        },
        "twemoji": iconify(everything, 36, "orange"),
        "openmoji": {
            "data/openmoji.csv": table,
            "LICENSE.txt": "Attribution-ShareAlike",
            **{
                f"color/svg/{c}.svg": f"{head}{disc(i, 72, 'red')}</svg>"
                for i, c in enumerate(everything)
            },
        },
        "fluent": iconify([*CONCEPTS, KEYCAP], 32, "teal"),
        "names": {"emoji.json": json.dumps(rows)},
        "keywords": spoken("annotations", CONCEPTS),
        "keywords-derived": spoken("annotationsDerived", [KEYCAP, FLAG]),
    }
    for key, files in contents.items():
        tarball(folder / PACKAGES[key].file_name, PACKAGES[key], files)
    return {key: folder / PACKAGES[key].file_name for key in PACKAGES}


@pytest.fixture
def registry(tmp_path, monkeypatch) -> Registry:
    return Registry(tmp_path, fake_packages).stub(monkeypatch, PACKAGES)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Registry]:
    """The data, made once for tests that read it, and where its packages came from."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        registry = Registry(folder, fake_packages).stub(patch, PACKAGES)
        prepare_emoji(folder / "emoji", **SMALL)
    return folder / "emoji", registry


@pytest.fixture
def emoji(made) -> Path:
    return made[0]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the data but the cache."""
    files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path.read_bytes()
        for name, path in files.items()
        if ".cache" not in name.parts
    }


def concepts_in(paths) -> list[str]:
    return [
        json.loads(s.files["json"])["concept"] for path in sorted(paths) for s in read_samples(path)
    ]


# ------------------------------------------------------------------------------------------------ reading the sets


def test_sources_are_read_from_the_true_formats(tmp_path):
    sets = read_sources(fake_packages(tmp_path))
    assert [len(sets[source]) for source in ("noto", "twemoji", "openmoji", "fluent")] == [
        22,
        22,
        22,
        21,
    ]  # fluent: no flag
    assert all("1F3FB" not in concept for source in SOURCES for concept in sets[source])
    first = CONCEPTS[2]
    assert sets["noto"][first].caption == "short 2, also 2 (Smileys & Emotion)"
    assert sets["twemoji"][first].caption == f"naïve, keyword {first}"
    assert sets["openmoji"][first].caption == "smileys emotion: face smiling: beaming, face 2"
    assert sets["fluent"][first].caption == "thing 2"
    assert (
        sets["twemoji"]["23-20E3"].caption == f"naïve, keyword {KEYCAP}"
    )  # from the derived annotations
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


def test_the_data_is_complete_and_held_out_pairs_are_held_out(made):
    out, registry = made
    assert {str(package) for package in PACKAGES.values()} <= set(registry.calls)
    held: dict[str, set[str]] = {}
    for split in ("test", "val"):
        for source in SOURCES:
            held[f"{split} {source}"] = set(concepts_in((out / split / source).glob("test/*.tar")))
            assert len(held[f"{split} {source}"]) == 2
    # Each concept is held out once at most, over all sources and both splits.
    assert len(set().union(*held.values())) == sum(map(len, held.values())) == 16
    for source in SOURCES:
        sizes = json.loads((out / source / "sizes.json").read_text())
        paths = sorted((out / source).glob("*.tar"))
        assert sizes == {path.name: len(concepts_in([path])) for path in paths}
        assert max(sizes.values()) <= SMALL["shard_size"]
        train = set(concepts_in(paths))
        own = held[f"test {source}"] | held[f"val {source}"]
        assert not train & own
        # ... and nothing else is missing: other sources' held-out concepts are trained on here.
        assert len(train) == sum(sizes.values()) == (21 if source == "fluent" else 22) - len(own)
        assert (out / source / "LICENSE").read_text().count("Licence: ") == 1
    assert "Attribution-ShareAlike" in (out / "openmoji" / "LICENSE").read_text()
    assert "terms of the sprite" in (out / "noto" / "LICENSE").read_text()
    assert "ships no text" in (out / "fluent" / "LICENSE").read_text()


def test_every_source_has_the_held_out_concepts_for_retrieval_across_sources(emoji):
    """As `scripts.paper.bias` reads them in the demo."""

    def read(split: str) -> dict[str, dict[str, bool]]:
        pairs = {}
        for source in SOURCES:
            (given,) = parse_sources(f"a={emoji / f'{split}-across' / source / 'test'}")
            own = read_pairs([given], 100, concept_field="concept", held_out_field="held_out")
            pairs[source] = {pair.concept: pair.held_out for pair in own}
        return pairs

    test, validation = read("test"), read("val")
    assert len({tuple(sorted(own)) for own in test.values()}) == 1  # the same eight concepts
    assert len(test["noto"]) == 8 and not validation["noto"].keys() & test["noto"].keys()
    for concept in test["noto"]:
        assert sum(own[concept] for own in test.values()) == 1
    for source, own in test.items():
        held_out = {concept for concept, held in own.items() if held}
        assert held_out == set(concepts_in((emoji / "test" / source).glob("test/*.tar")))


def test_the_training_pairs_as_a_table_and_pictures(emoji, tmp_path, monkeypatch, capsys):
    """As the quick start asks for them."""
    monkeypatch.setattr(command, "prepare_emoji", lambda out, **_: None)
    words = ["emoji", "--out", str(emoji), "--pairs", str(tmp_path / "pairs")]
    assert program(command.drawn, words) == 0
    with open(tmp_path / "pairs" / "pairs.csv", encoding="utf-8", newline="") as table:
        rows = list(csv.DictReader(table))
    trained = [
        s
        for source in SOURCES
        for p in sorted((emoji / source).glob("*.tar"))
        for s in read_samples(p)
    ]
    assert f"{len(trained)} pairs are in" in capsys.readouterr().out
    assert [row["title"] for row in rows] == [sample.files["txt"].decode() for sample in trained]
    assert [row["site"] for row in rows] == [
        json.loads(sample.files["json"])["source"] for sample in trained
    ]
    pictures = [(tmp_path / "pairs" / row["filepath"]).read_bytes() for row in rows]
    assert pictures == [sample.files["png"] for sample in trained] and len(
        {row["filepath"] for row in rows}
    ) == len(rows)


@pytest.mark.slow(reason="every command of the page, on 80 pairs: a minute and a half")
@pytest.mark.timeout(600)
def test_the_quick_start_runs_as_its_page_stands(registry, tmp_path):
    folder = tmp_path / "folder"
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


# ------------------------------------------------------------------------------------------------ called again


def test_called_again_it_builds_what_differs_without_fetching(made, tmp_path, monkeypatch):
    """The same settings give the same bytes; no shard of other settings stays behind."""
    (emoji, registry), again = made, tmp_path / "again"
    registry.stub(monkeypatch, PACKAGES)
    calls, before = len(registry.calls), contents(emoji)
    shutil.copytree(emoji, again)
    prepare_emoji(again, **SMALL)
    assert contents(again) == before
    other = {**SMALL, "shard_size": 100, "seed": 1}
    prepare_emoji(again, **other)
    assert len(registry.calls) == calls
    prepare_emoji(tmp_path / "fresh", **other)
    assert contents(again) == contents(tmp_path / "fresh")
    assert contents(again)["test/noto/test/0.tar"] != before["test/noto/test/0.tar"]


def test_an_interrupted_call_is_taken_up(registry, tmp_path, monkeypatch):
    out = tmp_path / "emoji"

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(make, "write_bert", interrupt)
        prepare_emoji(out, **SMALL)
    assert contents(out) == {}  # nothing half-made in sight
    monkeypatch.setattr(make, "rasterise", interrupt)  # the drawings are kept, ...
    monkeypatch.setattr(packages, "find_npm", interrupt)  # ... and so are the packages
    prepare_emoji(out, **SMALL)
    assert (out / "manifest.json").is_file() and not (out / ".cache" / "staging").exists()


# ------------------------------------------------------------------------------------------------ fetching


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("fail", "could not fetch .*ECONNRESET"), ("broken", "The SHA-512 of .* not the pinned one")],
)
def test_a_failed_or_other_download_is_not_taken(registry, tmp_path, fault, sentence):
    package, folder = PACKAGES["twemoji"], tmp_path / "packages"
    registry.faults.write_text(fault)
    with pytest.raises(UserError, match=sentence):
        fetch_npm_package(package, folder)
    assert list(folder.iterdir()) == []
    path = fetch_npm_package(package, folder)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # cut off on disk
    assert fetch_npm_package(package, folder).read_bytes() == whole
    fetch_npm_package(package, folder)
    assert registry.calls == [str(package)] * 3


# ------------------------------------------------------------------------------------------------ text tower


def test_the_bert_folder_works_in_open_clip_offline(emoji, monkeypatch):
    from open_clip.tokenizer import HFTokenizer
    from transformers import AutoConfig, AutoModel

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = emoji
    tokenizer = HFTokenizer(str(out / "bert"), context_length=25)
    pieces = tokenizer.tokenizer
    assert pieces.convert_ids_to_tokens(range(5)) == list(make.SPECIAL_TOKENS)
    assert (pieces.pad_token_id, pieces.cls_token, pieces.sep_token) == (0, "[CLS]", "[SEP]")
    samples = (
        s for source in SOURCES for p in (out / source).glob("*.tar") for s in read_samples(p)
    )
    train = [sample.files["txt"].decode() for sample in samples]
    ids = tokenizer(train)
    assert ids.shape == (len(train), 25) and (ids[:, 0] == pieces.cls_token_id).all()
    assert not (ids == pieces.unk_token_id).any()
    assert (
        pieces.decode(pieces("Naïve, thing 2")["input_ids"], skip_special_tokens=True)
        == "naive, thing 2"
    )
    assert (
        pieces.unk_token_id in pieces("日")["input_ids"]
    )  # a negative control: unseen letters are unknown
    config = AutoConfig.from_pretrained(out / "bert")
    model = AutoModel.from_config(config)
    assert config.vocab_size == len(pieces) == model.embeddings.word_embeddings.num_embeddings
    assert model(input_ids=ids[:2]).last_hidden_state.shape == (2, 25, 96)
    assert model.embeddings.word_embeddings.padding_idx == 0
