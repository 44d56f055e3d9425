"""The readers of each kind of file: the functions that training and `zerovl` call.

A reader takes a folder that a maker of `inputs` has filled. It returns None if everything was read, or BAD_SAMPLE if
something was replaced or reported as documented; exceptions of the functions pass through.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.transform import image_transform

from open_clip_zerovl import cli as program
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.checkpoints.weights import load_pretrained_tower, read_epoch, read_state_dict
from open_clip_zerovl.core.errors import DEFECT, UserError
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.data.images import crop_of, decode_image, pictures
from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.mixture import Mixture, Preprocessing
from open_clip_zerovl.data.sets import open_probe_set, open_retrieval_set, read_karpathy
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.prepare.check import check_report, check_shards, write_sizes
from open_clip_zerovl.prepare.pack import pack
from open_clip_zerovl.prepare.pictures import Failure, encode_picture
from open_clip_zerovl.prepare.public import largest_phrases
from open_clip_zerovl.prepare.settings import Encoding, Work
from open_clip_zerovl.recipe.build import init_from
from open_clip_zerovl.sampling.schedule import Batching
from open_clip_zerovl.shards.pictures import BadPicture
from open_clip_zerovl.shards.texts import find_member
from scripts.fuzz import inputs
from training import checkpointing

BAD_SAMPLE = "bad sample"
Reader = Callable[[Path], "str | None"]


@cache
def _transform() -> Any:
    return image_transform(16, is_train=True)


@cache
def _tokenizer() -> Any:
    return open_clip.SimpleTokenizer(context_length=12)


def training(where: str, *, captions: str | None = None, from_the_middle: bool = False) -> Reader:
    """One epoch of a named source, or its second half, with bad samples replaced."""

    def read(folder: Path) -> str | None:
        sources = parse_sources(f"a={folder / where}", captions=captions)
        preprocessing = Preprocessing(_transform(), _tokenizer())
        loader = MixtureLoader(
            Mixture(sources, Batching(2), preprocessing), workers=0, max_bad_share=1.0
        )
        loader.set_epoch(0, loader.num_batches // 2 if from_the_middle else 0)
        for images, texts in loader:
            assert images.shape == (2, 3, 16, 16) and texts.shape == (2, 12)
        return BAD_SAMPLE if loader.lost else None

    return read


def retrieval(where: str) -> Reader:
    def read(folder: Path) -> None:
        found = open_retrieval_set(where.format(folder))
        for index in range(len(found)):
            found.image(index)

    return read


def probe(label: str) -> Reader:
    def read(folder: Path) -> None:
        found = open_probe_set(folder / "source" / "1.tar", "train", label=label)
        for index in range(len(found)):
            found.image(index)

    return read


def data_check(folder: Path) -> str | None:
    result = check_shards(folder / "source", threads=1, decode=True, progress=False)
    return BAD_SAMPLE if result.faults and check_report(result) else None


def packing(where: str) -> Reader:
    """`zerovl data pack` of one input into a folder of its own."""

    def read(folder: Path) -> str | None:
        work = Work(threads=1, attempts=1, progress=False)
        found = pack([str(folder / where)], folder / f"packed-{where}", work=work)
        assert (folder / f"packed-{where}" / "report.html").is_file()
        return BAD_SAMPLE if found["refused"] else None

    return read


def data_index(folder: Path) -> None:
    write_sizes(folder / "source", threads=1, progress=False)


def command(*arguments: str) -> Reader:
    """`zerovl` with these arguments, {} being the folder: must end with status 0, 1 or 2, not with a traceback."""

    def read(folder: Path) -> str | None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                status = program.main([argument.format(folder) for argument in arguments])
            except SystemExit as stop:
                status = int(stop.code or 0)
        if status == 2:
            raise UserError(printed.getvalue())
        assert DEFECT not in printed.getvalue(), printed.getvalue()[-500:]
        assert status in (0, 1), f"status {status}: {printed.getvalue()[-500:]}"
        return BAD_SAMPLE if status else None

    return read


def resuming(folder: Path) -> None:
    """The steps of training's `--resume latest`."""
    path = folder / "run" / "checkpoints" / "epoch_1.pt"
    checkpointing.newest_whole(str(path.parent))
    if checkpointing.is_archive(path) and (damage := checkpointing.damage_of(path)) is not None:
        raise UserError(f"the file {damage}")
    content = checkpointing.load_checkpoint(str(path), "cpu")
    with reading(path):
        inputs.model().load_state_dict(content.get("state_dict", content))
        if "optimizer" in content:
            torch.optim.AdamW(inputs.model().parameters()).load_state_dict(content["optimizer"])
        position = checkpointing.read_position(content)
    if position is not None:
        now = checkpointing.Position(1, 0, Batching(24, 1, 1, 2), "a (100)", order={"--seed": 0})
        position.start_step(now)
        position.graphs_for(now)


def weights(folder: Path) -> None:
    path = folder / "run" / "checkpoints" / "epoch_1.pt"
    read_epoch(path)
    read_state_dict(path)


def starting(folder: Path) -> None:
    init_from(inputs.model(), folder / "run" / "checkpoints" / "epoch_1.pt")


def tower(folder: Path) -> None:
    load_pretrained_tower(inputs.model(), "image", folder / "run" / "checkpoints" / "epoch_1.pt")


def loading(where: str) -> Reader:
    def read(folder: Path) -> None:
        load_model(folder / where)

    return read


def picture(how: str) -> Reader:
    """`pil` and `arrays` are training's two paths, with crop and transform; `whole` decodes as evaluation does."""

    def read(folder: Path) -> str | None:
        data = (folder / "picture").read_bytes()
        try:
            if how == "whole":
                decode_image(data)
            elif how == "stored":
                encode_picture(data, Encoding())
            else:
                transform, decode = pictures(_transform(), how)
                with torch.random.fork_rng(devices=[]):
                    assert transform(decode(data, crop_of(_transform()))).shape == (3, 16, 16)
        except (BadPicture, Failure):
            return BAD_SAMPLE
        return None

    return read


def member(file: str, parse: Callable[[Path, str], Any]) -> Reader:
    """A file of annotations, plain or in a zip, found and parsed as by `zerovl data`."""

    def read(folder: Path) -> None:
        found = find_member([folder / file], ".json")
        if found is None:
            raise UserError(f"no annotations in {file}")
        for _ in parse(*found):
            pass

    return read


#: kind of input -> its maker, and its readers by name.
KINDS: dict[str, tuple[Callable[[inputs.Draw, Path], None], dict[str, Reader]]] = {
    "tar": (
        inputs.make_tar,
        {
            "training": training("source"),
            "training from the middle": training("source", from_the_middle=True),
            "training, each caption": training("source", captions="all"),
            "training, a caption an epoch": training("source", captions="one-per-epoch"),
            "retrieval": retrieval("{}/set"),
            "probe, cls": probe("cls"),
            "probe, json": probe("json:label"),
            "data check": data_check,
            "data check --sizes": data_index,
            "zerovl data check": command("data", "check", "{}/source", "--decode"),
            "data pack": packing("source"),
        },
    ),
    "sizes.json": (
        inputs.make_sizes,
        {
            "training": training("source"),
            "data check": data_check,
            "zerovl data check --sizes": command("data", "check", "--sizes", "{}/source"),
        },
    ),
    "table": (
        inputs.make_table,
        {
            "data pack": packing("table.csv"),
        },
    ),
    "annotations": (
        inputs.make_annotations,
        {
            "retrieval": retrieval("{0}/karpathy.json@{0}"),
            "data coco": member("karpathy.json", read_karpathy),
            "data coco, zipped": member("karpathy.json.zip", read_karpathy),
            "data vg": member("regions.json", largest_phrases),
            "data vg, zipped": member("regions.json.zip", largest_phrases),
        },
    ),
    "pairs": (
        inputs.make_pairs,
        {
            f"data pack, {name}": packing(where)
            for name, where in (
                ("JSON list", "pairs.json"),
                ("JSON list, compressed", "pairs.json.gz"),
                ("JSON lines", "pairs.jsonl"),
                ("COCO", "captions_train.json"),
                ("parquet", "pairs.parquet"),
                ("Arrow", "pairs.arrow"),
                ("folder", "photos"),
            )
        },
    ),
    "picture": (
        inputs.make_picture,
        {how: picture(how) for how in ("pil", "arrays", "whole", "stored")},
    ),
    "checkpoint": (
        inputs.make_checkpoint,
        {
            "resume": resuming,
            "weights": weights,
            "init-from": starting,
            "init-image": tower,
            "evaluation": loading("run/checkpoints/epoch_1.pt"),
            "zerovl export": command("export", "{}/run/checkpoints/epoch_1.pt", "{}/out"),
        },
    ),
    "exported folder": (inputs.make_export, {"evaluation": loading("exported")}),
}
