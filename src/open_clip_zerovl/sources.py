"""What a source is (section 3.1: SBU, VG, CC3M, CC12M ...): a name, its shards, how many samples each holds, a weight.

`parse_sources` reads open_clip's `--train-data` syntax with names added:

    sbu=/d/sbu/{00000..00086}.tar::vg=/d/vg::/d/cc3m/{00000..00281}.tar

Components are separated by `::`; each is a brace-expanded list of webdataset shards, or a folder that holds `*.tar`; a
component without a name takes its folder's. Sizes come from the `sizes.json` in *each* shard's own folder (open_clip looks
into the first shard's folder only), and shards that no `sizes.json` lists are counted from their tar headers.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import braceexpand
from webdataset.tariterators import base_plus_ext

from open_clip_zerovl.errors import UserError

NAME = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)=(?P<shards>.*)", re.DOTALL)
META = re.compile(r"__[^/]*__($|/)")  # members that webdataset skips
REMOTE = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*:"
)  # pipe:, s3://, https:// ...: opened by webdataset, cannot be looked at


@dataclass(frozen=True)
class Source:
    """One data source.

    Attributes:
        name: how it is called in logs, counts and messages.
        shards: paths or URLs of its webdataset tars, in the order given.
        sizes: samples in each shard, same order.
        weight: passes over the source in one epoch (1 = each sample once; invariant 3 of the architecture).
    """

    name: str
    shards: tuple[str, ...]
    sizes: tuple[int, ...]
    weight: float = 1.0

    @property
    def num_samples(self) -> int:
        return sum(self.sizes)


def is_named(train_data: str | None) -> bool:
    """Whether a `--train-data` value names at least one of its sources (and so asks for this package's mixture)."""
    return bool(train_data) and any(NAME.fullmatch(part) for part in str(train_data).split("::"))


def parse_sources(train_data: str, weights: str | None = None) -> tuple[Source, ...]:
    """Read `--train-data` (and `--train-data-upsampling-factors`) into sources with counted shards.

    Args:
        train_data: `name=shards::name=shards`, see the module's text.
        weights: `1::2::0.5`, one factor a source in their order, or `vg=2::sbu=0.5` by name (sources not named keep 1).

    Raises:
        UserError: an empty component, a name given twice, missing shards, an unreadable `sizes.json`, remote shards without
            a size, wrong number of weights, a weight that is not a positive number, or a weight for an unknown source.
    """
    named: dict[str, tuple[str, ...]] = {}
    for position, component in enumerate(train_data.split("::"), start=1):
        match = NAME.fullmatch(component)
        pattern = match["shards"] if match else component
        if not pattern.strip():
            raise UserError(
                f"source {position} of --train-data {train_data!r} has no shards; write name=/path/{{00000..00099}}.tar"
            )
        shards = _expand(pattern)
        name = match["name"] if match else _folder_name(shards[0])
        if name in named:
            raise UserError(f"two sources of --train-data are called {name!r}; give each its own name with name=shards")
        _require_local(name, shards)
        named[name] = shards
    factors = _parse_weights(weights, list(named))
    return tuple(
        Source(name, shards, _sizes(name, shards), factor)
        for (name, shards), factor in zip(named.items(), factors, strict=True)
    )


def count_tar_samples(path: str | Path) -> int:
    """Number of samples in a local webdataset tar, from its headers (nothing is decoded).

    A sample is a run of members that share a key, as webdataset groups them.

    Raises:
        UserError: the file is no readable tar.
    """
    samples, previous = 0, None
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header otherwise: memory on big shards
                key = base_plus_ext(member.name)[0] if member.isreg() else None
                if key is not None and not META.match(member.name) and key != previous:
                    samples, previous = samples + 1, key
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UserError(f"shard {path} cannot be read as a tar file ({error}); fetch or write it again") from error
    return samples


def _expand(pattern: str) -> tuple[str, ...]:
    if not REMOTE.match(pattern) and os.path.isdir(pattern):
        shards = tuple(sorted(str(path) for path in Path(pattern).glob("*.tar")))
        if not shards:
            raise UserError(f"folder {pattern} holds no *.tar shards; point --train-data at webdataset shards")
        return shards
    try:
        return tuple(braceexpand.braceexpand(pattern))
    except braceexpand.UnbalancedBracesError as error:
        raise UserError(f"the braces of {pattern!r} in --train-data do not match; write {{00000..00099}}") from error


def _folder_name(shard: str) -> str:
    folder = os.path.basename(os.path.dirname(shard if REMOTE.match(shard) else os.path.abspath(shard)))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", folder):
        raise UserError(f"no source name can be read off {shard!r}; name the source: --train-data name={shard}")
    return folder


def _require_local(name: str, shards: Sequence[str]) -> None:
    missing = [shard for shard in shards if not REMOTE.match(shard) and not os.path.isfile(shard)]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(shards)} shards of source {name!r} do not exist, first {missing[0]}; "
            "correct the path or the range in --train-data"
        )


def _sizes(name: str, shards: Sequence[str]) -> tuple[int, ...]:
    tables: dict[str, dict[str, int]] = {}
    known: dict[str, int] = {}
    for shard in shards:
        folder, base = os.path.split(shard)
        if folder not in tables:
            tables[folder] = _read_sizes(os.path.join(folder, "sizes.json"))
        if base in tables[folder]:
            known[shard] = tables[folder][base]
    unknown = [shard for shard in shards if shard not in known]
    remote = [shard for shard in unknown if REMOTE.match(shard)]
    if remote:
        raise UserError(
            f"{len(remote)} remote shards of source {name!r} have no size, first {remote[0]}; "
            'put a sizes.json ({"00000.tar": 9873, ...}) beside local copies of them'
        )
    if unknown:
        logging.info(f"Source {name}: counting {len(unknown)} shards that no sizes.json lists.")
        with ThreadPoolExecutor(max_workers=8) as pool:
            known.update(zip(unknown, pool.map(count_tar_samples, unknown), strict=True))
    sizes = tuple(known[shard] for shard in shards)
    if sum(sizes) == 0:
        raise UserError(f"source {name!r} holds no samples in its {len(shards)} shards; check the shards")
    return sizes


def _read_sizes(path: str) -> dict[str, int]:
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            return {str(shard): int(size) for shard, size in json.load(file).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f'{path} is not a table of shard sizes like {{"00000.tar": 9873}} ({error}); write it again, or remove it '
            "to have the shards counted"
        ) from error


def _parse_weights(weights: str | None, names: list[str]) -> list[float]:
    if weights is None:
        return [1.0] * len(names)
    parts = weights.split("::")
    flag = f"--train-data-upsampling-factors {weights!r}"
    by_name = ["=" in part for part in parts]
    if any(by_name):
        if not all(by_name):
            raise UserError(f"{flag} names some sources and not others; name all of them or none")
        table = dict(part.split("=", 1) for part in parts)
        unknown = [name for name in table if name not in names]
        if unknown:
            raise UserError(f"{flag} names the unknown source {unknown[0]!r}; the sources are {', '.join(names)}")
        parts = [table.get(name, "1") for name in names]
    elif len(parts) != len(names):
        raise UserError(
            f"{flag} gives {len(parts)} weights for {len(names)} sources ({', '.join(names)}); give one each"
        )
    factors = []
    for name, part in zip(names, parts, strict=True):
        try:
            factor = float(part)
        except ValueError:
            factor = float("nan")
        if not 0 < factor < float("inf"):
            raise UserError(
                f"the weight {part!r} of source {name!r} in {flag} is not a positive number; give one like 0.5"
            )
        factors.append(factor)
    return factors
