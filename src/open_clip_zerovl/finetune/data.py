"""The pairs of a fine-tuning: training sources and held-out sets.

`--data` is named sources, as `--train-data` takes them, or a folder:

    FOLDER/*.tar, or another form that pack reads           one source
    FOLDER/train/                                           one source (`zerovl data pack`, `zerovl data public coco`)
    FOLDER/NAME/ or FOLDER/NAME/train/, several             a source each (`zerovl data pack`)

A held-out set in CLIP_benchmark's layout is found in FOLDER itself, in FOLDER/NAME or in FOLDER/test/NAME.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import Say, UserError
from open_clip_zerovl.core.files import (
    CONTENT,
    claim,
    difference,
    digest_of,
    file_digests,
)
from open_clip_zerovl.data.components import kind_of
from open_clip_zerovl.data.names import CLASS_NAMES, NAME, PER_EPOCH
from open_clip_zerovl.data.sets import IndexedSet, open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.data.sources import Source, content_of_sources, parse_sources
from open_clip_zerovl.evaluate.zero_shot import LabelledSet, open_labelled_set
from open_clip_zerovl.models.configs import LOCAL_DIR
from open_clip_zerovl.prepare.door import as_shards, labelled_as_shards, sets_as_shards

SPLITS = ("test", "val", "train")  # folders with these names are not sources
HELD_OUT = "held-out"
DATA_FLAG, HELD_OUT_FLAG = "--data", "--retrieval-data"
# All data arguments of all commands, by what their data is.
SOURCES, RETRIEVAL, LABELLED = (
    (DATA_FLAG, "--keep-data"),
    (HELD_OUT_FLAG, "--kept"),
    ("--zero-shot-data",),
)
_TEXTS = {".json", ".txt", ".model", ".jinja"}  # configs and tokenizers
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth"}


@dataclass(frozen=True)
class FinetuneData:
    """Training sources and held-out sets of `--data`.

    Attributes:
        train_data: for `--train-data`, each source with a name.
        held_out: retrieval sets that came with it, as `parse_retrieval_data` reads them; "" if there are none.
    """

    train_data: str
    held_out: str


def find_data(data: str, say: Say = logging.info) -> FinetuneData:
    """Find the training sources that `--data` names, packed where they are not shards, and the held-out sets beside them.

    Args:
        say: is called with a line about each source that is packed.

    Raises:
        UserError: data that is not there or cannot be packed.
    """
    if not Path(data).expanduser().is_dir():
        parts = [
            part if NAME.fullmatch(part) else f"{_name_of(part)}={part}"
            for part in data.split("::")
        ]
        return FinetuneData(as_shards("::".join(parts), say=say), "")
    folder = Path(data).expanduser().absolute()
    sources = _source_in(folder)
    if not sources:
        for entry in _folders(folder):
            if entry.name not in SPLITS:
                sources += _source_in(entry)  # two of one name are refused where they are opened
    places = [folder, *_folders(folder), *_folders(folder / "test")]
    sets = [
        place
        for place in places
        if (place / "dataset_type.txt").is_file() and (place / "test").is_dir()
    ]
    sources = sources or [(_name_of(folder), folder)]
    named = "::".join(f"{name}={place}" for name, place in sources)
    names = [HELD_OUT if place == folder else _name_of(place) for place in sets]
    held_out = "::".join(f"{name}={place}" for name, place in zip(names, sets, strict=True))
    return FinetuneData(as_shards(named, say=say), held_out)


@dataclass(frozen=True)
class DataArguments:
    """All data arguments of a command by their flags: its claim and its held-out rule take each of them from here.

    Attributes:
        given: flag of SOURCES, RETRIEVAL or LABELLED -> its data, each source and set with a name. Pictures are drawn from
            --data; the sets of HELD_OUT_FLAG are the held-out pairs of the sources, the others are scored, too.
    """

    given: Mapping[str, str]

    @classmethod
    def of(cls, request: Any, say: Say = lambda line: None) -> DataArguments:
        """Give each source and set of a request its name, and find the held-out sets that come with the data.

        Args:
            request: has an attribute for each flag of SOURCES, RETRIEVAL and LABELLED that its command has.
            say: is called with a line about data that is packed.

        Raises:
            UserError: `find_data`, `sets_as_shards`.
        """
        flags = (*SOURCES, *RETRIEVAL, *LABELLED)
        names = {flag: flag.removeprefix("--").replace("-", "_") for flag in flags}
        texts = {flag: getattr(request, name, None) or "" for flag, name in names.items()}
        found = {flag: find_data(text, say) for flag in SOURCES if (text := texts[flag])}
        texts[HELD_OUT_FLAG] = texts[HELD_OUT_FLAG] or found[DATA_FLAG].held_out
        given = {flag: pairs.train_data for flag, pairs in found.items()}
        given |= {flag: sets_as_shards(texts[flag], say=say) for flag in RETRIEVAL if texts[flag]}
        labelled = {flag: texts[flag] for flag in LABELLED if texts[flag]}
        return cls(
            given | {flag: labelled_as_shards(text, say=say) for flag, text in labelled.items()}
        )

    def claim(
        self,
        file: Path,
        wanted: Mapping[str, Any],
        *,
        begun: Path,
        made: Iterable[Path],
        inputs: Collection[str] | None = None,
    ) -> DataArguments:
        """Claim a file's folder, and remove what a call that ended with a mistake has made, whose correction this may be.

        Args:
            wanted: the request; a file that holds another one is replaced until something is trained.
            begun: is there as soon as something is trained.
            made: files and folders that follow from the request.
            inputs: entries of the request from which they follow; None: all.

        Returns:
            The arguments, in which sources and sets have the names of the first call.

        Raises:
            UserError: the folder holds other files, or something trained for another request.
        """

        def untrained(stored: Mapping[str, Any]) -> bool:
            if begun.exists():
                return False
            names = {**stored, **wanted} if inputs is None else inputs
            if difference(*({name: of.get(name) for name in names} for of in (stored, wanted))):
                for path in made:
                    path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
            return True

        earlier = claim(file, wanted, restart=untrained) or {}
        return DataArguments(
            {flag: _named_as(text, earlier.get(flag)) for flag, text in self.given.items()}
        )

    @property
    def held_out(self) -> str:
        """Return the held-out sets, "" where pictures are drawn."""
        return self.given.get(HELD_OUT_FLAG, "")

    @property
    def kept(self) -> str:
        """Return the sets of the ability to keep as shards, "" where none was given."""
        return self.given.get("--kept", "")

    @property
    def labelled(self) -> str | None:
        """Return the labelled sets, packed where they are rows, None where none was given."""
        return self.given.get(LABELLED[0])

    def entries(self, flags: Iterable[str] | None = None) -> dict[str, str]:
        """Name the data of some flags, or of all, and digest its content, for `core.files`.

        Raises:
            UserError: data that cannot be opened.
        """
        named = {
            flag: self.given[flag]
            for flag in (self.given if flags is None else flags)
            if flag in self.given
        }
        return named | {f"{CONTENT}{flag}": self._content(flag) for flag in named}

    def _content(self, flag: str) -> str:
        if flag in SOURCES:
            return content_of_sources(self.given[flag])
        return digest_of([each.content() for each in self._sets[flag].values()])

    @cached_property
    def _sets(self) -> dict[str, Mapping[str, IndexedSet | LabelledSet]]:
        return {
            flag: labelled_sets("", text) if flag in LABELLED else sets_of(text)
            for flag, text in self.given.items()
            if flag not in SOURCES
        }

    def scored(self) -> dict[str, IndexedSet]:
        """Open the pictures of the sets of all flags by "FLAG NAME".

        Raises:
            UserError: a set that cannot be opened.
        """
        return {
            f"{flag} {name}": each.images if isinstance(each, LabelledSet) else each
            for flag, sets in self._sets.items()
            for name, each in sets.items()
        }


def _named_as(data: str, earlier: str | None) -> str:
    """Give the components of an argument the names that they had in an earlier call."""
    if not earlier:
        return data
    names = [component.partition("=")[0] for component in earlier.split("::")]
    places = [component.partition("=")[2] for component in data.split("::")]
    if len(names) != len(places):
        return data
    return "::".join(f"{name}={place}" for name, place in zip(names, places, strict=True))


def _source_in(folder: Path) -> list[tuple[str, Path]]:
    """Find the source that a folder is, or holds in `train/`, as its name and place."""
    for place in (folder, folder / "train"):
        if place.is_dir() and kind_of(str(place)).kind in ("shards", "table"):
            return [(_name_of(folder), place)]
    return []


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _name_of(path: Path | str) -> str:
    """Make a source's name from its path, with dashes for characters that a name cannot have."""
    last = re.sub(r"\{.*", "", str(path)).rstrip("/").rpartition("/")[2] or "pairs"
    return re.sub(r"[^\w.-]+", "-", Path(last).stem).lstrip("-._") or "pairs"


def open_sources(train_data: str) -> tuple[Source, ...]:
    """Open sources with a sample for each picture, which has all its captions."""
    return parse_sources(train_data, captions=PER_EPOCH)


def all_classes(data: str) -> bool:
    """Return whether all sets have classes, whose pictures share captions, which caps RSUM."""
    return all((place / CLASS_NAMES).is_file() for place in parse_retrieval_data(data).values())


def sets_of(data: str) -> dict[str, IndexedSet]:
    """Open retrieval sets by name."""
    return {name: open_retrieval_set(path) for name, path in parse_retrieval_data(data).items()}


def labelled_sets(new: str, asked: str | None = None) -> dict[str, LabelledSet]:
    """Open the sets of --zero-shot-data, else the held-out ones of class folders."""
    places = parse_retrieval_data(asked or new).items()
    return {
        name: open_labelled_set(str(at))
        for name, at in places
        if asked or (at / CLASS_NAMES).is_file()
    }


# ---------------------------------------------------------------------------------------------------------------------
# The content of models, which a claim covers as it covers that of data
# ---------------------------------------------------------------------------------------------------------------------


def digest_of_model(start: Encoder) -> str | None:
    """Digest a model: its config, and the content of the files with its weights and its tokenizer.

    Returns:
        None if there is no such model, it has no files of weights (a tag), or they are gone, of which OUT/before may hold the
        content.
    """
    try:
        config = start.spec().model_cfg
    except (UserError, OSError):
        return None
    place = Path(start.model.removeprefix(LOCAL_DIR)).expanduser()
    files = (
        [place, *(folder / "params.txt" for folder in list(place.parents)[:2])]
        if place.is_file()
        else []
    )
    files += _files(place, _TEXTS | _WEIGHTS)
    for key in ("hf_model_name", "hf_tokenizer_name"):
        files += _files(Path(config["text_cfg"].get(key) or place), _TEXTS)
    if not any(file.suffix in _WEIGHTS and file.is_file() for file in files):
        return None
    return digest_of(config, _named_digests(files))


def digest_of_encoder(name: str) -> str | None:
    """Digest the files of an encoder of `zerovl align`.

    Returns:
        None for one that is fetched by its name.
    """
    library, colon, place = name.partition(":")
    if not colon or library not in ("timm", "hf"):
        return digest_of_model(Encoder(name))
    *_, last = place.split(",")
    path = Path(last).expanduser()
    if path.is_file():
        return digest_of(name.removesuffix(f",{last}"), _named_digests([path]))
    files = _files(path, _TEXTS | _WEIGHTS, "**/*")
    return digest_of(library, _named_digests(files)) if files else None


def _named_digests(files: Iterable[Path]) -> list[tuple[str, str | None]]:
    digests = file_digests(file for file in {*files} if file.is_file())
    return sorted((Path(file).name, digest) for file, digest in digests.items())


def _files(folder: Path, suffixes: set[str], pattern: str = "*") -> list[Path]:
    """List a folder's files with these suffixes, without the curve that chose its weights."""
    return [
        file
        for file in folder.glob(pattern)
        if file.suffix in suffixes and file.name != "interpolation.json"
    ]
