"""A clustering on disk (A.6): contact sheets, and clusters written as sources of their own (`--reshard`).

`K` clusters.
"""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.data.clusters import Clustering, cluster_folders, load_clustering
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.data.samples import samples_of
from open_clip_zerovl.data.sources import clustered_source
from open_clip_zerovl.shards.members import Sample
from open_clip_zerovl.shards.pictures import BadPicture
from open_clip_zerovl.shards.writing import SIZES_FILE

PREVIEW_PX = 96  # side of a picture


def write_previews(
    clustering: Clustering, folder: Path, *, pictures: int = 25, progress: bool = True
) -> None:
    """Write a contact sheet for each cluster, `000.png` ...: the samples nearest to its centroid, nearest first.

    Args:
        pictures: on a sheet.

    Raises:
        UserError: a shard that cannot be read. A picture that cannot be decoded stays white, with a warning.
    """
    wanted: dict[
        int, tuple[int, int]
    ] = {}  # position in the source -> (cluster, place on its sheet)
    for cluster in range(len(clustering.centroids)):
        members = np.flatnonzero(clustering.labels == cluster)
        nearest = members[np.argsort(clustering.distances[members], kind="stable")[:pictures]]
        wanted.update({int(position): (cluster, place) for place, position in enumerate(nearest)})
    side = int(np.ceil(np.sqrt(pictures)))
    sheets = [
        Image.new("RGB", (side * PREVIEW_PX, side * PREVIEW_PX), "white")
        for _ in clustering.centroids
    ]
    source = clustered_source(clustering)
    starts = source.starts
    needed = sorted(
        {int(np.searchsorted(starts, position, side="right")) - 1 for position in wanted}
    )
    for shard in tqdm(needed, desc="previews", unit="shard", disable=not progress):
        for position, sample in enumerate(samples_of(source, shard), start=int(starts[shard])):
            if position not in wanted:
                continue
            cluster, place = wanted[position]
            try:
                thumbnail = ImageOps.pad(
                    decode_image(sample.image or b""), (PREVIEW_PX, PREVIEW_PX), color="white"
                )
            except BadPicture:
                logging.warning(
                    f"The picture of {sample.key} cannot be read: its place in the preview stays white."
                )
                continue
            sheets[cluster].paste(
                thumbnail, (place % side * PREVIEW_PX, place // side * PREVIEW_PX)
            )
    for cluster, sheet in enumerate(sheets):
        content = io.BytesIO()
        sheet.save(content, "PNG")
        write_atomically(folder / f"{cluster:03d}.png", content.getvalue())


class _ClusterWriter:
    """Writes the shards of one cluster. One tar is open at a time; samples go straight to disk."""

    def __init__(self, folder: Path, shard_size: int) -> None:
        self.folder, self.shard_size = folder, shard_size
        self.sizes: dict[str, int] = {}
        self._tar: tarfile.TarFile | None = None
        self._name = ""
        folder.mkdir(parents=True)

    def add(self, sample: Sample) -> None:
        """Append a sample, to a new shard where the last one is full."""
        if self._tar is None:
            self._name = f"{len(self.sizes):05d}.tar"
            self.sizes[self._name] = 0
            # PAX differs from USTAR only for keys that are longer than USTAR takes, or not in ASCII.
            self._tar = tarfile.open(self.folder / self._name, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115  # see close
        for extension, content in sample.files.items():
            member = tarfile.TarInfo(f"{sample.key}.{extension}")
            member.size = len(content)
            self._tar.addfile(member, io.BytesIO(content))
        self.sizes[self._name] += 1
        if self.sizes[self._name] == self.shard_size:
            self.close()

    def close(self) -> None:
        if self._tar is not None:
            self._tar.close()
            self._tar = None


def write_clusters(
    clustering: Clustering, out: Path, *, shard_size: int = 10_000, progress: bool = True
) -> list[Path]:
    """Write every cluster as a source of its own, `OUT/cluster-000` ..., in one pass over the source.

    The folders are written aside and moved into place when whole. The number of the old shard is put before a sample's key
    (`00007-key`), since keys are unique within a shard only. Slashes and dots in a key become dashes: without its slashes it
    would end at the first dot of a folder's name. This needs as much disk as the source, and one open file for each cluster.

    Args:
        out: the clustering's folder.
        shard_size: samples of a shard, at most.

    Returns:
        The folders.

    Raises:
        UserError: a shard that does not hold as many samples as when it was clustered.
    """
    staging = out / ".resharding"
    shutil.rmtree(staging, ignore_errors=True)
    names = [f"cluster-{cluster:03d}" for cluster in range(len(clustering.centroids))]
    writers = [_ClusterWriter(staging / name, shard_size) for name in names]
    source = clustered_source(clustering)
    try:
        for number, shard in enumerate(
            tqdm(source.shards, desc="reshard", unit="shard", disable=not progress)
        ):
            labels = clustering.labels[source.starts[number] : source.starts[number + 1]]
            seen = 0
            for sample in samples_of(source, number):
                if seen < len(labels):
                    writers[labels[seen]].add(
                        Sample(f"{number:05d}-{re.sub('[/.]', '-', sample.key)}", sample.files)
                    )
                seen += 1
            if seen != len(labels):
                raise UserError(
                    f"{shard} holds {seen} samples and held {len(labels)} when it was clustered: cluster again."
                )
    finally:
        for writer in writers:
            writer.close()
    for old in cluster_folders(out):
        shutil.rmtree(old)
    folders = []
    for name, writer in zip(names, writers, strict=True):
        write_atomically(writer.folder / SIZES_FILE, json.dumps(writer.sizes, indent=1) + "\n")
        folders.append(writer.folder.rename(out / name))
    staging.rmdir()
    return folders


def train_data(out: str | Path) -> str:
    """The `--train-data` value that makes every cluster a source (see `data.clusters`).

    Raises:
        UserError: the folder holds no clustering.
    """
    return f"{load_clustering(out).source}={Path(out).expanduser()}"
