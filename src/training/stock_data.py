"""Checks of open_clip's own data before its main starts: mistakes that its pipeline would not name, or would hang on."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
from functools import partial

import numpy
import pandas
import torch
from open_clip_train.data import expand_urls
from open_clip_train.zero_shot import accuracy
from webdataset import autodecode

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.pictures import forget_other_formats
from open_clip_zerovl.shards.urls import check_quotes, local_path
from open_clip_zerovl.shards.writing import read_sizes

# by webdataset's decoder, at the sight of such a member
UNPICKLED = ("pyd", "pickle", "pkl", "pth")
TABLES = ("csv", "tsv")  # the endings by which open_clip knows them


def check_stock_data(args: argparse.Namespace, *, training: bool) -> None:
    """Check the data of open_clip's own pipeline, whose own messages are unclear or come late.

    Args:
        args: open_clip's arguments.
        training: whether open_clip's pipeline, and not our mixture, reads `--train-data`.

    Raises:
        UserError: a missing column or shard, a shard of unknown size, a folder.
    """
    named = {"--train-data": args.train_data if training else None, "--val-data": args.val_data}
    if any(named.values()) or args.imagenet_val or args.imagenet_v2:
        guard_decoders(args.workers)
        forget_other_formats()
    if args.imagenet_val or args.imagenet_v2:
        _check_accuracy()
    for flag, path in named.items() if not args.dataset_type.startswith("synthetic") else ():
        ending = "" if path is None else path.rsplit(".", 1)[-1]
        if path and (
            args.dataset_type == "csv" or (args.dataset_type == "auto" and ending in TABLES)
        ):
            _check_table(flag, path, args)
        elif path and (args.dataset_type == "webdataset" or ending == "tar"):
            _check_shards(flag, path, args)
        elif path and flag == "--train-data" and os.path.isdir(path):
            raise UserError(
                f"{flag} {path} is a folder; name it to read it as a source: --train-data NAME={path}"
            )


def _check_accuracy() -> None:
    """Refuse a numpy with which open_clip's accuracy fails: 3.3 makes floats of arrays with one element, which 2.4 refuses."""
    try:
        accuracy(torch.eye(2), torch.arange(2))
    except TypeError as error:
        raise UserError(
            f"--imagenet-val and --imagenet-v2 of this open_clip do not work with numpy {numpy.__version__} ({error}); "
            "pip install 'numpy<2.4', or evaluate the checkpoint with `zerovl linear-probe` or --retrieval-data"
        ) from error


def guard_decoders(workers: int) -> None:
    """Keep webdataset from running code in a shard: members that it would unpickle stay bytes, with one warning.

    open_clip's pipeline hands every member to webdataset's decoder, but uses the picture and the caption only, so training does
    not change.
    """
    for extension in autodecode.decoders.keys() & UNPICKLED:  # 0.2.86 leaves .pkl alone
        autodecode.decoders[extension] = partial(_left_unread, extension)
    if workers > 0 and (method := multiprocessing.get_start_method()) != "fork":
        logging.warning(
            f"Loader processes are started by {method!r} and unpickle members .{', .'.join(UNPICKLED)} of shards, which can "
            "run code; name the source (--train-data NAME=SHARDS), then pictures and captions only are read."
        )


_warned: set[str] = set()


def _left_unread(extension: str, data: bytes) -> bytes:
    if extension not in _warned:
        _warned.add(extension)
        logging.warning(
            f"A shard has .{extension} members, which webdataset would unpickle, so that they could run code. They are left "
            "unread; to read pictures and captions only, name the source: --train-data NAME=SHARDS."
        )
    return data


def _check_shards(flag: str, path: str, args: argparse.Namespace) -> None:
    """Refuse a missing shard, which makes open_clip's pipeline hang.

    A shard that sizes.json lacks raises a bare KeyError there.
    """
    weights = (
        args.train_data_upsampling_factors
        if flag == "--train-data" and args.dataset_resampled
        else None
    )
    shards = list(expand_urls(path, weights)[0])
    for shard in shards:
        check_quotes(shard)
    missing = [
        shard
        for shard in shards
        if (file := local_path(shard)) is not None and not os.path.isfile(file)
    ]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(shards)} shards of {flag} do not exist, first {missing[0]}; correct the path or the range"
        )
    folder = os.path.dirname(shards[0])
    if flag != "--train-data" or args.train_num_samples is not None or local_path(folder) is None:
        return
    sizes = read_sizes(folder)
    unknown = [
        shard for shard in shards if sizes is not None and os.path.basename(shard) not in sizes
    ]
    if unknown:
        raise UserError(
            f"{folder}/sizes.json does not give the number of samples of {unknown[0]}; count them with `zerovl data check "
            f"{folder or '.'} --sizes`, give --train-num-samples, or name the source: NAME=SHARDS"
        )


def _check_table(flag: str, path: str, args: argparse.Namespace) -> None:
    if local_path(path) is None or not os.path.isfile(path):
        return
    head = pandas.read_csv(path, sep=args.csv_separator, nrows=1)
    for option, column in (
        ("--csv-img-key", args.csv_img_key),
        ("--csv-caption-key", args.csv_caption_key),
    ):
        if column not in head:
            columns = ", ".join(repr(str(name)) for name in head.columns)
            raise UserError(
                f"{flag} {path} has no column {column!r}; split at {args.csv_separator!r} its columns are {columns}; give "
                f"{option}, or --csv-separator"
            )
