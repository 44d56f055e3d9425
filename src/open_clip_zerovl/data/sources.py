"""Sources (section 3.1: SBU, VG, CC3M, CC12M ...): a name, shards, the number of samples in each, a weight.

`parse_sources` reads open_clip's `--train-data` syntax with names added:

    sbu=/d/sbu/{00000..00099}.tar::vg=/d/vg::/d/cc3m/{00000..00331}.tar

Components are separated by `::`; `components` lists their kinds. Where models are evaluated, a retrieval
set in CLIP_benchmark's layout stands for the shards of its test split.

A component without a name takes that of its folder. Sizes come from the `sizes.json` in each shard's own folder (open_clip
looks into the first shard's folder only). Shards that no `sizes.json` lists are counted from their tar headers.

The content of a source is the bytes of its shards in their order, and the words of its classes: by it two calls have the same
data (`core.files`). Paths, names of sources and times do not count: a copy is the same data, and another file at the same
path is not. A remote shard counts by its address.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import digest_of, file_digests
from open_clip_zerovl.data.components import (
    expand_shards,
    is_packed,
    kind_of,
    listed_sizes,
    pack_file,
    packed_folders,
)
from open_clip_zerovl.data.names import (
    CAPTIONS,
    CLASS_NAMES,
    NAME,
    PER_EPOCH,
    TEMPLATES,
    file_of_words,
    is_captions,
    name_of_folder,
)
from open_clip_zerovl.data.splits import require_training, require_training_samples, shards_of_split
from open_clip_zerovl.shards.fetch import ShardCache
from open_clip_zerovl.shards.files import SHARD_COUNT, open_index
from open_clip_zerovl.shards.tar import BYTES_BEHIND, ShardError, locate_samples
from open_clip_zerovl.shards.urls import REMOTE, local_path, shard_digests


@dataclass(frozen=True)
class Source:
    """One data source.

    Attributes:
        name: in logs, counts and messages.
        shards: paths or URLs of its webdataset tars, in the order given.
        sizes: samples in each shard, in the same order.
        weight: passes over the source in one epoch (1 = each sample once; invariant 3 of the architecture).
        captions: of CAPTIONS, for images with several; FIELD=SHARE,... (`names.caption_fields`); None shows the whole text of a
            sample.
    """

    name: str
    shards: tuple[str, ...]
    sizes: tuple[int, ...]
    weight: float = 1.0
    captions: str | None = None

    @property
    def num_samples(self) -> int:
        """Count the samples of all shards."""
        return int(self.starts[-1])

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Count the samples before each shard (shards + 1,), in the last entry those of all shards."""
        return np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])

    @property
    def folder(self) -> Path | None:
        """Return the folder of its first shard, None for a remote one."""
        first = local_path(self.shards[0]) if self.shards else None
        return None if first is None else Path(first).absolute().parent

    @property
    def classes(self) -> bool:
        """Return whether the source was packed from folders of classes, whose pictures share the class's captions."""
        return self.class_folder is not None

    @property
    def class_folder(self) -> Path | None:
        """Return the folder with the names of its classes, None if it was not packed from folders of classes."""
        names = self.folder and file_of_words(self.folder, CLASS_NAMES)
        return names.parent if names else None

    @property
    def pack_file(self) -> Path | None:
        """Return the `pack.json` of the packed folder of its first shard, None for shards of other programs."""
        return self.folder and pack_file(self.folder)

    @property
    def layout(self) -> str:
        """Describe the source's form for logs: "281 shards"."""
        return f"{len(self.shards)} shard{'s' if len(self.shards) != 1 else ''}"


def parse_sources(
    train_data: str,
    weights: str | None = None,
    *,
    captions: str | None = None,
    on_bad_sample: str = "replace",
    cache: ShardCache | None = None,
    evaluation: bool = False,
    split: str = "train",
) -> tuple[Source, ...]:
    """Read `--train-data` (and `--train-data-upsampling-factors`) into sources with counted shards.

    Args:
        train_data: `name=shards::name=shards`, see the module's text.
        weights: `1::2::0.5`, one weight a component in their order, or `vg=2::sbu=0.5` by name (other components keep 1). The
            weight of a packed folder is that of each of its sources; one of them may also be named (`mine-sbu=2`).
        captions: FIELD=SHARE,... draws each time from which field of a sample its caption comes (`names.caption_fields`).
            "one-per-epoch" shows one caption of an image an epoch, all of them in turn; "all" makes each caption a sample
            of its own; "first" shows the first alone; "joined" all in one text. Several captions are the lines of a `txt`.
            None is "one-per-epoch" for shards that `zerovl data pack` wrote; of other sources it shows a `txt` as it is.
        on_bad_sample: "fail" refuses torn shards. "replace" counts the samples before the tear, and treats missing shards that
            a `sizes.json` lists as lost, both with a warning.
        cache: the folder of fetched files; None for the one in the user's cache.
        evaluation: the sources are read to evaluate a model, and may be retrieval sets; training refuses those.
        split: the split that is read of an output of `zerovl data pack`, and of shards that have several; with
            `evaluation` all of these unless it is test or val.

    Raises:
        UserError: an empty component, a name given twice, missing shards, an unreadable `sizes.json`, remote shards without
            a size or with captions="all", data that are no shards, wrong number of weights, a weight that is not a
            positive number, or a weight for an unknown source.
    """
    if captions is not None and not is_captions(captions):
        raise UserError(
            f"unknown --captions {captions!r}; use one of {', '.join(CAPTIONS)}, or FIELD=SHARE,FIELD=SHARE"
        )
    how = _Opening(
        captions,
        on_bad_sample == "fail",
        cache or ShardCache(),
        evaluation,
        split,
    )
    sources: dict[str, Source] = {}
    members: dict[str, list[str]] = {}  # component -> its sources
    for position, component in enumerate(train_data.split("::"), start=1):
        match = NAME.fullmatch(component)
        pattern = match["shards"] if match else component
        if not pattern.strip():
            raise UserError(
                f"source {position} of {train_data!r} has no shards; write name=/path/{{00000..00099}}.tar"
            )
        name, opened = _open(match["name"] if match else None, pattern, how)
        names = [source.name for source in opened]
        if name in members or sources.keys() & names:
            raise UserError(
                f"two sources are called {name!r}; give each its own name with name=shards"
            )
        members[name] = names
        sources.update(zip(names, opened, strict=True))
    factors = _parse_weights(weights, members)
    return tuple(replace(source, weight=factors[name]) for name, source in sources.items())


class _Opening(NamedTuple):
    """Arguments of `parse_sources` that apply to every component."""

    captions: str | None
    strict: bool
    cache: ShardCache
    evaluation: bool
    split: str

    @property
    def rows(self) -> str | None:
        """Return the split that is read of data with several, None for all of it, which is searched or compared."""
        return None if self.evaluation and self.split == "train" else self.split


def _open(name: str | None, pattern: str, how: _Opening) -> tuple[str, list[Source]]:
    """Return the name of a component, given or taken from its folder, and its sources: several for a packed folder."""
    component = kind_of(pattern)
    path = component.path
    if component.kind == "packed":
        name = name or Path(path).absolute().name
        return name, _open_packed(name, path, how)
    if component.kind == "benchmark":
        split = Path(path, "test" if how.evaluation else "train")
        if not how.evaluation or not (split / SHARD_COUNT).is_file():
            raise UserError(
                f"{path} is a retrieval set, whose shards are in its splits; name the shards to read, as {split}"
            )
        name, path = name or Path(path).absolute().name, str(split)
    shards = expand_shards(path)
    if not how.evaluation:
        require_training(path, shards)
    elif how.rows is not None:
        shards = shards_of_split(shards, how.rows)
    if not how.evaluation:
        require_training_samples(shards, how.cache)
    if name is None:
        first = shards[0] if REMOTE.match(shards[0]) else os.path.abspath(shards[0])
        name = name_of_folder(os.path.dirname(first), shards[0])
    return name, [_of_shards(name, shards, component.beside, how)]


def _open_packed(name: str, path: str, how: _Opening) -> list[Source]:
    """Open one split of each source that was packed."""
    sources = []
    for source, folder in packed_folders(path).items():
        split = folder / how.split
        if split.is_dir():
            of_source = f"{name}-{source}" if source else name
            sources.append(_of_shards(of_source, expand_shards(str(split)), None, how))
    if not sources:
        raise UserError(
            f"{path} was packed without pictures of the split {how.split!r}; finish `zerovl data pack`, with --test-share for "
            "held-out pictures"
        )
    return sources


def count_tar_samples(
    shard: str | Path,
    *,
    captions: bool = False,
    torn: bool = False,
    cache: ShardCache | None = None,
) -> int:
    """Count the samples in a local webdataset tar, as `shards/tar` groups them, or their captions, one a line of the `txt`.

    Args:
        torn: count those before the tear of a torn tar, with a warning, instead of refusing it.
        cache: the folder of unpacked shards.

    Raises:
        UserError: the file is torn, or not a readable tar.
    """
    count = 0
    try:
        with (cache or ShardCache()).borrowed(str(shard)) as path:
            if captions:
                index = open_index(path)
                count = int(index.captions.sum())
                if index.torn[0]:
                    raise ShardError(*index.torn.tolist())
            else:
                for _ in locate_samples(path):
                    count += 1
    except ShardError as error:
        # joined tars hide more samples than a tear takes, and are mended by one command
        if not torn or count == 0 or error.reason == BYTES_BEHIND:
            other = (
                ""
                if str(shard).endswith(".tar")
                else f", or pack it with `zerovl data pack {shard}`"
            )
            raise UserError(
                f"shard {shard} cannot be read as a tar file ({error}); fetch or write it again{other}"
            ) from error
        what = "captions" if captions else "samples"
        logging.warning(f"Shard {shard} is torn after {count} {what} ({error}).")
    return count


def _of_shards(name: str, shards: tuple[str, ...], sizes_file: str | None, how: _Opening) -> Source:
    """Make a source of shards, whose samples (or captions) a `sizes.json` lists. Shards that it lacks are counted."""
    each_caption = how.captions == "all"
    known = {} if each_caption else listed_sizes(shards, sizes_file, how.cache)
    missing = [
        shard
        for shard in shards
        if (path := local_path(shard)) is not None and not os.path.isfile(path)
    ]
    remote = [shard for shard in shards if local_path(shard) is None]
    if each_caption and remote:
        raise UserError(
            f"'--captions all' cannot count the captions of remote shards (source {name!r}, first {remote[0]}); copy or pack "
            "them here, or give '--captions one-per-epoch'"
        )
    lost = [shard for shard in missing if how.strict or shard not in known]
    if lost or len(missing) == len(shards):
        gone = f"source {name!r}: {missing[0]} does not exist"
        if len(shards) > 1:
            gone = f"{len(missing)} of {len(shards)} shards of source {name!r} do not exist, first {missing[0]}"
        raise UserError(f"{gone}; correct the path or the range")
    if missing:
        logging.warning(
            f"Source {name}: {len(missing)} of {len(shards)} shards that sizes.json lists do not exist, first {missing[0]}; "
            f"other samples of the source replace their {sum(known[shard] for shard in missing)} samples."
        )
    unsized = [shard for shard in remote if shard not in known]
    if unsized:
        raise UserError(
            f"{len(unsized)} remote shards of source {name!r} have no size, first {unsized[0]}; "
            'put a sizes.json ({"00000.tar": 9873, ...}) beside them, or name one: SHARDS@/path/sizes.json'
        )
    unknown = [shard for shard in shards if shard not in known]
    if unknown:
        what = "captions of" if each_caption else "samples of"
        logging.info(
            f"Source {name}: counting {what} {len(unknown)} shards that no sizes.json lists."
        )
        count = functools.partial(
            count_tar_samples, captions=each_caption, torn=not how.strict, cache=how.cache
        )
        with ThreadPoolExecutor(max_workers=8) as pool:
            known.update(zip(unknown, pool.map(count, unknown), strict=True))
    sizes = tuple(known[shard] for shard in shards)
    if sum(sizes) == 0:
        raise UserError(
            f"source {name!r} holds no samples in its {len(shards)} shards; check the shards"
        )
    captions = how.captions
    if captions is None and is_packed(shards[0], sizes_file, how.cache):
        captions = PER_EPOCH
    return Source(name, shards, sizes, captions=captions)


def _parse_weights(weights: str | None, members: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return source -> weight. `members` maps each component to its sources."""
    factors = {name: 1.0 for names in members.values() for name in names}
    if weights is None:
        return factors
    parts = weights.split("::")
    flag = f"--train-data-upsampling-factors {weights!r}"
    if any("=" in part for part in parts):
        given = dict(part.partition("=")[::2] for part in parts)
        unknown = [name for name in given if name not in members and name not in factors]
        if unknown:
            raise UserError(
                f"{flag} names the unknown source {unknown[0]!r}; the sources are {', '.join(members)}"
            )
    elif len(parts) != len(members):
        raise UserError(
            f"{flag} gives {len(parts)} weights for {len(members)} sources ({', '.join(members)}); give one each"
        )
    else:
        given = dict(zip(members, parts, strict=True))
    # Weights of components first, then those of single sources of them, which may differ.
    for name, part in sorted(given.items(), key=lambda item: item[0] not in members):
        try:
            factor = float(part)
        except ValueError:
            factor = float("nan")
        if not 0 < factor < float("inf"):
            raise UserError(
                f"the weight {part!r} of source {name!r} in {flag} is not a positive number; give one like 0.5"
            )
        factors.update(dict.fromkeys(members.get(name, [name]), factor))
    return factors


# ---------------------------------------------------------------------------------------------------------------------
# Content
# ---------------------------------------------------------------------------------------------------------------------


def content_of_sources(train_data: str) -> str:
    """Digest what the components of `--train-data` hold.

    Raises:
        UserError: as `parse_sources`.
    """
    components = [parse_sources(component) for component in train_data.split("::")]
    return digest_of([[content_of_source(source) for source in sources] for sources in components])


def content_of_source(source: Source) -> str:
    """Digest what a source holds."""
    words = [
        file
        for name in (CLASS_NAMES, TEMPLATES)
        if source.class_folder and (file := file_of_words(source.class_folder, name))
    ]
    digests = file_digests(words)
    return digest_of(contents_of_shards(source), [digests[str(file)] for file in words])


def contents_of_shards(source: Source) -> list[str]:
    """Digest the samples of each shard of a source."""
    digests = shard_digests(source.shards)
    numbered = zip(source.shards, source.sizes, strict=True)
    return [digest_of([digests[shard], size]) for shard, size in numbered]
