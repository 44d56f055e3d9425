"""Which split is it, and which picture is held out? One rule each, for packing, training and evaluation.

A split is named by folders, by words of a file's name, or by a column:

    train/hat/1.jpg   validation/hat/2.jpg          folders, at any level of an input
    train-00000.tar   captions_val2017.json         a word of a file's name
    split: train, test                              a column of a table, a key of a json

Pictures without a split are held out by `data pack`, `align` and `finetune`:

    identity    the first 64 bits of a hash of a picture's decoded pixels; the first 16 digits of a key of `zerovl data pack`
    position    a hash of seed and identity; a picture whose position lies in the first SHARE of all numbers is held out

So a picture is held out by itself, whatever other pictures, sources, files and commands there are. The exceptions take more or
fewer in the same order: `align` and `finetune` hold out 10 to 1,000 pictures, `data pack` at least one a source. A model's
folder names the pictures on which the model was trained in `trained_on.npy`; later commands do not hold these out.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import digest_of, number_of, write_atomically
from open_clip_zerovl.data.names import FEWEST_PICTURES
from open_clip_zerovl.shards.fetch import ShardCache
from open_clip_zerovl.shards.tar import (
    ShardError,
    locate_samples,
    object_of,
)
from open_clip_zerovl.shards.urls import local_path

TRAINED_ON = "trained_on.npy"  # in a model's folder: the pictures on which it was trained
LOOKED_AT_SAMPLES = 100  # of a shard, for splits in their json
SPLITS = ("train", "val", "test")  # of a packed source, a folder each
_WORDS = {
    **dict.fromkeys(("train", "training", "restval", "trainval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_COLUMNS = ("split", "splits", "data_split", "dataset_split", "partition", "subset", "set")
MOST_HELD_OUT = 1_000  # pictures, as many as in Flickr30K's test set
FEWEST_HELD_OUT = 10
_DIGITS = 16  # of a key, in an identity


def split_of_word(word: Any) -> str | None:
    """Return the split that a folder or a cell names, also with a year behind it, None if it names none."""
    return _WORDS.get(re.sub(r"[\d_\-]+$", "", str(word).strip().lower()))


def split_of_name(file: str) -> str | None:
    """Return the split that the words of a file's name say, None if they say none, or training and another one."""
    stem = PurePath(file).name.partition(".")[0]
    kinds = {_WORDS.get(word) for word in re.findall(r"[a-z]+", stem.lower())} - {None}
    if len(kinds) > 1:
        return None if "train" in kinds else "test"
    return next(iter(kinds), None)


def split_column(names: Sequence[str]) -> str | None:
    """Return the column of splits among the columns of a table or the keys of a json, None if there is none."""
    known = {name.strip().lower(): name for name in reversed(names)}
    return next((known[name] for name in _COLUMNS if name in known), None)


def split_above(path: Path) -> str | None:
    """Return the split of an input that lies in one of several folders of splits: of `DATA/test` beside `DATA/train`."""
    place = path if path.is_dir() else path.parent
    for folder in (place, place.parent):
        if split_of_word(folder.name) is not None:
            beside = {entry.name for entry in folder.parent.iterdir() if entry.is_dir()}
            if _has_both(beside):
                return split_of_word(folder.name)
    return None


def shards_of_split(shards: Sequence[str], split: str) -> tuple[str, ...]:
    """Return the shards of a split if the shards' names say several splits, else all shards.

    Raises:
        UserError: no shard is of the split.
    """
    kinds = [split_of_name(_file_name(shard)) or "train" for shard in shards]
    if len(set(kinds)) < 2:
        return tuple(shards)
    wanted = "val" if split == "test" and "test" not in kinds else split
    chosen = tuple(shard for shard, kind in zip(shards, kinds, strict=True) if kind == wanted)
    if not chosen:
        raise UserError(
            f"the shards beside {shards[0]} are of the splits {', '.join(sorted(set(kinds)))} by their names, and none is of "
            f"{split!r}: name the shards to read"
        )
    return chosen


def require_training(pattern: str, shards: Sequence[str]) -> None:
    """Refuse shards that are held out by their names, unless the pattern names them as such.

    Raises:
        UserError: a shard of another split than train.
    """
    named = {_WORDS.get(word) for word in re.findall(r"[a-z]+", _file_name(pattern).lower())}
    held_out = [shard for shard in shards if split_of_name(_file_name(shard)) in ("val", "test")]
    held_out = [shard for shard in held_out if split_of_name(_file_name(shard)) not in named]
    if held_out:
        folder = os.path.dirname(held_out[0])
        raise UserError(
            f"{len(held_out)} of the {len(shards)} shards of {pattern} are held out by their names, first {held_out[0]}: name "
            f"the shards to train on, as {folder}/train-*.tar (or {folder}/{split_of_name(_file_name(held_out[0]))}-*.tar)"
        )


def require_training_samples(shards: Sequence[str], cache: ShardCache) -> None:
    """Refuse local tars whose samples say in their json that they are held out. The first ones of each shard are looked at.

    Raises:
        UserError: a sample of another split than train.
    """
    for shard in shards:
        if local_path(shard) is None:
            continue
        with suppress(OSError, ShardError):  # which counting names
            for key, about in _first_objects(shard, cache):
                column = split_column(list(about))
                if column is None:
                    return  # the tars of one program have one form
                if split_of_word(about[column]) in ("val", "test"):
                    raise UserError(
                        f"{shard}: the json of sample {key!r} says {about[column]!r} ({column}), which is not trained on; "
                        f"`zerovl data pack {shard} --out DIR` makes shards of each split"
                    )


def _first_objects(shard: str, cache: ShardCache) -> Iterator[tuple[str, dict[str, Any]]]:
    with (
        cache.borrowed(shard) as path,
        closing(locate_samples(path)) as samples,
    ):
        for key, members in islice(samples, LOOKED_AT_SAMPLES):
            about = members.get("json")
            yield key, {} if about is None else object_of(about.content()) or {}


def _file_name(shard: str) -> str:
    return shard.partition("?")[0].rstrip("/").rpartition("/")[2]


class FolderSplits:
    """The splits of an input's files, by the folders on their paths, at any level.

        train/hat/1.jpg   validation/hat/2.jpg   ->   ("hat/1.jpg", "train")   ("hat/2.jpg", "val")

    A folder that is named like a split is one if all folders of its level are, or if the level has a training and a held-out
    split (`train`, `test` and `unlabelled`): a class may be called `train`.

    Args:
        paths: of the files, relative to the input.
        above: the split of the whole input, of files without a folder of a split.
    """

    def __init__(self, paths: Iterable[str] = (), above: str | None = None) -> None:
        self.above = above
        levels: dict[int, set[str]] = {}
        for folder in {PurePath(path).parent for path in paths}:
            for level, name in enumerate(folder.parts):
                levels.setdefault(level, set()).add(name)
        self.levels = [level for level in sorted(levels) if _are_splits(levels[level])]
        names = sorted(set().union(*(levels[level] for level in self.levels)))
        splits = {name: split_of_word(name) for name in names}
        self.names = {name: split for name, split in splits.items() if split is not None}

    @property
    def says(self) -> bool:
        """Return whether a name says a split."""
        return bool(self.names or self.above)

    def __call__(self, path: str) -> tuple[str, str]:
        """Return the path without its folders of splits, and the split ("train" for a path without one)."""
        *folders, file = PurePath(path).parts
        splits, others = [], []
        for level, folder in enumerate(folders):
            if level in self.levels and folder in self.names:
                splits.append(self.names[folder])
            else:
                others.append(folder)
        held_out = [split for split in splits if split != "train"]
        of_file = (held_out or splits or [self.above or "train"])[0]
        return os.path.join(*others, file), of_file


def by_file_name(file: str) -> str:
    """Return a path with the split, or the first word, of its file's name as a folder: `test-0.tar` -> `test/test-0.tar`."""
    path = PurePath(file)
    return str(path.parent / (split_of_name(file) or re.split(r"[-_.]", path.name)[0]) / path.name)


def _are_splits(folders: set[str]) -> bool:
    return None not in {split_of_word(name) for name in folders} or _has_both(folders)


def _has_both(folders: set[str]) -> bool:
    """Return whether folders are of training and of something held out."""
    kinds = {split_of_word(name) for name in folders} - {None}
    return "train" in kinds and len(kinds) > 1


# ---------------------------------------------------------------------------------------------------------------------
# Held-out pictures
# ---------------------------------------------------------------------------------------------------------------------

Identities = NDArray[np.int64]


def picture_key(picture: Image.Image) -> str:
    """Hash a picture's size and RGB pixels to 24 hexadecimal digits, the same for all files with the same pixels."""
    digest = hashlib.blake2b(f"{picture.size} ".encode(), digest_size=12)
    digest.update(picture.tobytes())
    return digest.hexdigest()


def identity_of(picture: Image.Image) -> int:
    """Return the identity of an RGB picture, `number_of` its key."""
    return number_of(picture_key(picture))


def as_keys(identities: Iterable[int]) -> list[str]:
    """Write identities as hexadecimal digits, the beginnings of the keys of `zerovl data pack`."""
    return [f"{int(identity) & (1 << 64) - 1:0{_DIGITS}x}" for identity in identities]


def position(seed: int, key: str) -> int:
    """Place a picture in the shuffled order by a signed number of 64 bits, which depends on nothing else."""
    return number_of(digest_of(seed, key[:_DIGITS]))


def first_of_training(share: float) -> int:
    """Divide the positions: smaller ones, a share of all, are held out."""
    return round(share * 2**64) - 2**63


def draw_held_out(
    identities: Identities,
    *,
    seed: int,
    share: float,
    trained_on: Identities | None = None,
) -> Identities:
    """Choose the pictures to hold out, of those on which no model was trained.

    Args:
        identities: of all samples; 0 for a sample without a picture.
        share: of all positions; at least 10 pictures are held out, and at most 1,000.
        trained_on: of the pictures that the starting models have seen. Where fewer than 10 others are left, none is spared,
            and the caller has to say so.

    Raises:
        UserError: fewer than 40 pictures.
    """
    pictures = np.unique(identities[identities != 0])
    if len(pictures) < FEWEST_PICTURES:
        raise UserError(
            f"the data has {len(pictures)} pictures, too few to hold some out; give at least {FEWEST_PICTURES}, or a held-out "
            "set with --retrieval-data"
        )
    if trained_on is not None:
        unseen = pictures[~np.isin(pictures, trained_on)]
        pictures = unseen if len(unseen) >= FEWEST_HELD_OUT else pictures
    positions = np.array([position(seed, key) for key in as_keys(pictures)])
    count = int((positions < first_of_training(share)).sum())
    return pictures[np.argsort(positions)[: min(MOST_HELD_OUT, max(FEWEST_HELD_OUT, count))]]


def write_trained_on(folder: Path, identities: Identities, before: Identities | None) -> None:
    """Note in a model's folder the pictures on which it was trained, and those that its starting models have seen.

    Raises:
        UserError: the folder cannot be written.
    """
    write_atomically(folder / TRAINED_ON, list_of_trained(identities, before))


def list_of_trained(*identities: Identities | None) -> bytes:
    """Make the content of TRAINED_ON for some identities (None for none, 0 of a sample without a picture)."""
    numbers = np.concatenate([each for each in identities if each is not None])
    content = io.BytesIO()
    np.save(content, np.unique(numbers[numbers != 0]))
    return content.getvalue()


def trained_on(models: Iterable[str | Path]) -> Identities | None:
    """Read the identities of the pictures on which some models were trained, None if no folder of them names any.

    Raises:
        UserError: a list that cannot be read.
    """
    lists = list(_lists_of(models))
    return np.unique(np.concatenate(lists)) if lists else None


def _lists_of(models: Iterable[str | Path]) -> Iterator[Identities]:
    from open_clip_zerovl.models.configs import LOCAL_DIR  # loads open_clip

    for model in models:
        file = Path(str(model).removeprefix(LOCAL_DIR)).expanduser() / TRAINED_ON
        try:
            yield np.load(file, allow_pickle=False).astype(np.int64)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except Exception as error:
            raise UserError(
                f"{file} cannot be read ({error}); copy it again, or remove it if the model is to be scored on pictures that "
                "it may have seen"
            ) from error


def seen_sentence(
    held_out: Identities, seen: Identities | None, models: str, role: str = "held-out"
) -> str | None:
    """Say that models were trained on pictures that are held out, None if they were not, as far as is known."""
    count = 0 if seen is None else int(np.isin(np.unique(held_out), seen).sum())
    if not count:
        return None
    return (
        f"{models} was trained on {count:,} of the {len(np.unique(held_out)):,} {role} pictures, so that scores on them "
        "measure memorisation"
    )
