"""Held-out pictures: one rule for `data pack`, `align` and `finetune`, and one answer to "was it trained on?".

    identity    the first 64 bits of a hash of a picture's decoded pixels; the first 16 digits of a key of `zerovl data pack`
    position    a hash of seed and identity; a picture whose position lies in the first SHARE of all numbers is held out

So a picture is held out by itself, whatever other pictures, sources, files and commands there are. The exceptions take more or
fewer in the same order: `align` and `finetune` hold out 10 to 1,000 pictures, `data pack` at least one a source. A model's
folder names the pictures on which the model was trained in `trained_on.npy`; later commands do not hold these out.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import UNREADABLE, write_atomically
from open_clip_zerovl.core.identity import digest_of, number_of
from open_clip_zerovl.data.names import FEWEST_PICTURES

Identities = NDArray[np.int64]

MOST_HELD_OUT = 1_000  # pictures, as many as in Flickr30K's test set
FEWEST_HELD_OUT = 10
_DIGITS = 16  # of a key, in an identity


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
    from open_clip_zerovl.models.local_dir import TRAINED_ON  # loads torch

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
    from open_clip_zerovl.models.local_dir import LOCAL_DIR, TRAINED_ON  # loads torch

    for model in models:
        file = Path(str(model).removeprefix(LOCAL_DIR)).expanduser() / TRAINED_ON
        try:
            yield np.load(file, allow_pickle=False).astype(np.int64)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except UNREADABLE as error:
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
