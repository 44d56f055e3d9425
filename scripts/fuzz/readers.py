"""The readers of each kind of file: the functions that training and `zerovl` call.

A reader takes a folder that a maker of `inputs` has filled. It returns None if everything was read, or BAD_SAMPLE if
something was replaced or reported as documented; exceptions of the functions pass through.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import cache, partial
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
from open_clip_zerovl.prepare.check import check_shards, write_sizes
from open_clip_zerovl.prepare.pack import pack
from open_clip_zerovl.prepare.pictures import Failure, encode_picture
from open_clip_zerovl.prepare.public import largest_phrases
from open_clip_zerovl.prepare.settings import PackSettings, Work
from open_clip_zerovl.recipe.build import init_from
from open_clip_zerovl.sampling.schedule import Batching
from open_clip_zerovl.shards.pictures import BadPicture
from open_clip_zerovl.shards.texts import find_member
from scripts.fuzz import inputs
from training import checkpointing

BAD_SAMPLE = "bad sample"
CHECKPOINT = Path("run", "checkpoints", "epoch_1.pt")
Reader = Callable[[Path], "str | None"]


@cache
def _transform() -> Any:
    return image_transform(16, is_train=True)


@cache
def _tokenizer() -> Any:
    return open_clip.SimpleTokenizer(context_length=12)


def training(
    folder: Path, *, captions: str | None = None, from_the_middle: bool = False
) -> str | None:
    """Read one epoch of a named source, or its second half, with bad samples replaced."""
    sources = parse_sources(f"a={folder / 'source'}", captions=captions)
    preprocessing = Preprocessing(_transform(), _tokenizer())
    loader = MixtureLoader(
        Mixture(sources, Batching(2), preprocessing), workers=0, max_bad_share=1.0
    )
    loader.set_epoch(0, loader.num_batches // 2 if from_the_middle else 0)
    for images, texts in loader:
        assert images.shape == (2, 3, 16, 16) and texts.shape == (2, 12)
    return BAD_SAMPLE if loader.lost else None


def pictures_of(folder: Path, open_set: Callable[[Path], Any]) -> None:
    """Open a set and read its pictures."""
    found = open_set(folder)
    for index in range(len(found)):
        found.image(index)


def retrieval(where: str) -> Reader:
    return partial(pictures_of, open_set=lambda folder: open_retrieval_set(where.format(folder)))


def probe(label: str) -> Reader:
    def open_set(folder: Path) -> Any:
        return open_probe_set(folder / "source" / "1.tar", "train", label=label)

    return partial(pictures_of, open_set=open_set)


def data_check(folder: Path) -> str | None:
    result = check_shards(folder / "source", threads=1, decode=True, progress=False)
    return BAD_SAMPLE if result.faults else None


def packing(folder: Path, where: str) -> str | None:
    """Pack one input into a folder of its own, as `zerovl data pack`."""
    work = Work(threads=1, attempts=1, progress=False)
    found = pack([str(folder / where)], folder / f"packed-{where}", work=work)
    assert (folder / f"packed-{where}" / "report.html").is_file()
    return BAD_SAMPLE if found["refused"] else None


def data_index(folder: Path) -> None:
    write_sizes(folder / "source", threads=1, progress=False)


def command(folder: Path, line: str) -> str | None:
    """Run `zerovl` with these words, {} being the folder: it must end with status 0, 1 or 2, not with a traceback."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = program.main([word.format(folder) for word in line.split()])
        except SystemExit as stop:
            status = int(stop.code or 0)
    if status == 2:
        raise UserError(printed.getvalue())
    assert DEFECT not in printed.getvalue(), printed.getvalue()[-500:]
    assert status in (0, 1), f"status {status}: {printed.getvalue()[-500:]}"
    return BAD_SAMPLE if status else None


def resuming(folder: Path) -> None:
    """Take the steps of training's `--resume latest`."""
    path = folder / CHECKPOINT
    checkpointing.newest_whole(str(path.parent))
    content = checkpointing.load_checkpoint(str(path), "cpu")
    with reading(path):
        inputs.model().load_state_dict(content.get("state_dict", content))
        if "optimizer" in content:
            torch.optim.AdamW(inputs.model().parameters()).load_state_dict(content["optimizer"])
        position = checkpointing.read_position(content)
        checkpointing.compared_settings(content, inputs.SETTINGS, position)
    if position is not None:
        position.start_step(Batching(24, 1, 1, 2))
        position.graphs_for(Batching(24, 1, 1, 2))


def weights(folder: Path) -> None:
    path = folder / CHECKPOINT
    read_epoch(path)
    read_state_dict(path)


def starting(folder: Path) -> None:
    init_from(inputs.model(), folder / CHECKPOINT)


def tower(folder: Path) -> None:
    load_pretrained_tower(inputs.model(), "image", folder / CHECKPOINT)


def loading(folder: Path, where: str) -> None:
    load_model(folder / where)


def picture(folder: Path, how: str) -> str | None:
    """Decode by one of training's two paths (`pil`, `arrays`), with crop and transform, or `whole` as evaluation does."""
    data = (folder / "picture").read_bytes()
    try:
        if how == "whole":
            decode_image(data)
        elif how == "stored":
            encode_picture(data, PackSettings(shorter_side_px=256))
        else:
            arrays = pictures(_transform())
            transform, decode = (_transform(), decode_image) if how == "pil" else arrays
            with torch.random.fork_rng(devices=[]):
                assert transform(decode(data, crop_of(_transform()))).shape == (3, 16, 16)
    except (BadPicture, Failure):
        return BAD_SAMPLE
    return None


def member(folder: Path, file: str, parse: Callable[[Path, str], Any]) -> None:
    """Find and parse a file of annotations, plain or in a zip, as `zerovl data` does."""
    found = find_member([folder / file], ".json")
    if found is None:
        raise UserError(f"no annotations in {file}")
    for _ in parse(*found):
        pass


#: kind of input -> its maker, and its readers by name.
KINDS: dict[str, tuple[Callable[[inputs.Draw, Path], None], dict[str, Reader]]] = {
    "tar": (
        inputs.make_tar,
        {
            "training": training,
            "training from the middle": partial(training, from_the_middle=True),
            "training, each caption": partial(training, captions="all"),
            "training, a caption an epoch": partial(training, captions="one-per-epoch"),
            "retrieval": retrieval("{}/set"),
            "probe, cls": probe("cls"),
            "probe, json": probe("json:label"),
            "data check": data_check,
            "data check --sizes": data_index,
            "zerovl data check": partial(command, line="data check {}/source --decode"),
            "data pack": partial(packing, where="source"),
        },
    ),
    "sizes.json": (
        inputs.make_sizes,
        {
            "training": training,
            "data check": data_check,
            "zerovl data check --sizes": partial(command, line="data check --sizes {}/source"),
        },
    ),
    "table": (
        inputs.make_table,
        {
            "data pack": partial(packing, where="table.csv"),
        },
    ),
    "annotations": (
        inputs.make_annotations,
        {
            "retrieval": retrieval("{0}/karpathy.json@{0}"),
            "data coco": partial(member, file="karpathy.json", parse=read_karpathy),
            "data coco, zipped": partial(member, file="karpathy.json.zip", parse=read_karpathy),
            "data vg": partial(member, file="regions.json", parse=largest_phrases),
            "data vg, zipped": partial(member, file="regions.json.zip", parse=largest_phrases),
        },
    ),
    "pairs": (
        inputs.make_pairs,
        {
            f"data pack, {name}": partial(packing, where=where)
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
        {how: partial(picture, how=how) for how in ("pil", "arrays", "whole", "stored")},
    ),
    "checkpoint": (
        inputs.make_checkpoint,
        {
            "resume": resuming,
            "weights": weights,
            "init-from": starting,
            "init-image": tower,
            "evaluation": partial(loading, where="run/checkpoints/epoch_1.pt"),
            "zerovl export": partial(command, line="export {}/run/checkpoints/epoch_1.pt {}/out"),
        },
    ),
    "exported folder": (inputs.make_export, {"evaluation": partial(loading, where="exported")}),
}
