"""Fingerprints of a tower with the preprocessing of its inputs, and of the samples of a source."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from open_clip_zerovl.core.identity import digest_of, digest_of_all
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.table import CsvTable, TableSample
from open_clip_zerovl.shards.marks import Mark, digests_of, file_marks, is_same

_SCALES = ("logit_scale", "logit_bias")
# Settings of layers on which features do not depend, besides those of random layers, which evaluation turns off.
_NOT_OF_OUTPUTS = {
    "training",
    "grad_checkpointing",
    "gradient_checkpointing",
    "output_dict",
    "name_or_path",
}


def tower_digest(model: nn.Module, tower: str, *, inputs: Any, precision: str = "fp32") -> str:
    """A digest of everything on which a tower's features of an input depend.

    Args:
        model: with its weights loaded. Its image tower is `visual` with all below it; everything else is the text tower.
        tower: "image" or "text".
        inputs: the tokenizer of a text tower, the transform of an image tower.
        precision: the precision of the forward passes (open_clip's `--precision`).
    """
    tensors = {
        name: tensor
        for name, tensor in _tensors(model).items()
        if name not in _SCALES and name.startswith("visual.") == (tower == "image")
    }
    layers = [
        [name, *_settings(module)]
        for name, module in model.named_modules()
        if (name.split(".")[0] == "visual") == (tower == "image")
    ]
    return _digest(tensors, [tower, precision, layers, _described(inputs)])


def module_digest(module: nn.Module, *, inputs: Any, precision: str = "fp32") -> str:
    """`tower_digest` of a module that is a whole tower."""
    return _digest(
        _tensors(module),
        [
            precision,
            [[name, *_settings(part)] for name, part in module.named_modules()],
            _described(inputs),
        ],
    )


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and buffers, also those that no checkpoint holds (the frequencies of rotary positions)."""
    return {**dict(module.named_buffers()), **module.state_dict()}


def _settings(module: nn.Module) -> list[Any]:
    """A layer without its children: its class and its settings, which tensors do not show (activation, number of heads)."""
    plain = bool | int | float | str
    settings = {
        name: value
        for name, value in vars(module).items()
        if name[0] != "_"
        and name not in _NOT_OF_OUTPUTS
        and (
            isinstance(value, plain)
            or (isinstance(value, tuple | list) and all(isinstance(item, plain) for item in value))
        )
    }
    return [type(module).__name__, sorted(settings.items())]


def _digest(tensors: dict[str, torch.Tensor], facts: Any) -> str:
    def parts() -> Iterator[Any]:
        yield facts
        for name, tensor in sorted(tensors.items()):
            yield [name, str(tensor.dtype), list(tensor.shape)]
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    return digest_of_all(parts())


def plain_repr(thing: Any) -> str:
    """The repr of a transform or module without the memory addresses of objects, which differ in each process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))


def _described(inputs: Any) -> list[Any]:
    """A tokenizer's or transform's settings as JSON."""
    inner = getattr(inputs, "tokenizer", None)
    if inner is None:
        return [type(inputs).__name__, getattr(inputs, "context_length", None), plain_repr(inputs)]
    backend = getattr(inner, "backend_tokenizer", None)
    content = (
        _without_lengths(backend)
        if backend is not None
        else json.dumps(sorted(inner.get_vocab().items()))
    )
    return [
        type(inner).__name__,
        inputs.context_length,
        getattr(getattr(inputs, "clean_fn", None), "__name__", None),
        getattr(inputs, "strip_sep_token", None),
        getattr(inputs, "tokenizer_mode", None),
        digest_of(content),
    ]


def _without_lengths(backend: Any) -> str:
    """A tokenizer's content as JSON, without the truncation and padding that its last call has left in it."""
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy.to_str()


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def describe_source(source: Source, known: Iterable[Mark] | None = None) -> dict[str, Any]:
    """The samples of a source: its name, the mark and the samples of each shard, and a digest of a selection's own samples.

    The marks of tables and parquet files also have the names of the columns that are read.

    Args:
        known: None for a cache, whose rows are made again where a file has another time; else earlier marks, of stored rows
            that are kept for copies of the data, too (`file_mark`).
    """
    picked = source.picked
    # a selection of a table
    if source.table is not None and len(source.table.members) < len(source.table.rows):
        picked = source.table.members
    marks_by_shard = file_marks(
        source.shards, None if known is None else digests_of(known), f"checking {source.name}"
    )
    more: list[str] = []
    if source.table is not None:
        columns = [
            source.table.columns[n]
            for n in (source.table.image_column, *source.table.caption_columns)
        ]
        more = [_pictures_digest(source.table), *columns]
    elif source.columns is not None:
        more = [source.columns.picture, *source.columns.captions]
    return {
        "name": source.name,
        "marks": [
            [*marks_by_shard[shard], *more]
            if len(marks_by_shard[shard]) > 1
            else marks_by_shard[shard]
            for shard in source.shards
        ],
        "sizes": list(source.sizes),
        "picked": None if picked is None else digest_of(picked),
    }


def _pictures_digest(table: CsvTable) -> str:
    """A digest of the sizes of a table's pictures, sample by sample: copies of them have the same."""

    def size(sample: TableSample) -> int:
        try:
            return os.stat(table.image_path(sample.image)).st_size
        except (OSError, ValueError):  # missing, or no name of a file
            return -1

    sizes = array("q", map(size, table.samples()))
    return digest_of(sizes)[:16]


def difference_of_sources(stored: dict[str, Any], current: dict[str, Any]) -> str | None:
    """The first difference between the samples of two descriptions, as words; None for the same samples or copies of them."""
    name = current["name"]
    held = sum(stored["sizes"])
    there = sum(current["sizes"])
    if held != there:
        return f"they are of {held} samples of {name!r}, and it holds {there}"
    if stored["picked"] != current["picked"]:
        return f"they are of another selection's {name!r}"
    # A shard that is gone now has no size to compare.
    known = defaultdict(list)
    for mark in stored["marks"]:
        known[str(mark[0])].append(mark)
    current_marks = (mark for mark in current["marks"] if len(mark) > 1)
    changed = next(
        (
            mark[0]
            for mark in current_marks
            if not any(is_same(earlier, mark) for earlier in known[str(mark[0])])
        ),
        None,
    )
    if changed is not None:
        return f"they are of other data: shard {changed} of {name!r} differs, or was not there"
    if [mark[0] for mark in stored["marks"]] != [mark[0] for mark in current["marks"]] or stored[
        "sizes"
    ] != current["sizes"]:
        return f"they are of {name!r} with its shards in another order or of other sizes"
    return None
