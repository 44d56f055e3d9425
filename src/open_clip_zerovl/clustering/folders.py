"""What a clustering looks like on disk (A.6): contact sheets, and the clusters written anew as sources.

`K` clusters.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from open_clip_zerovl.clustering.features import open_picture
from open_clip_zerovl.data.clusters import Clustering, cluster_folders, load_clustering
from open_clip_zerovl.data.images import BadImage
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.files import write_atomically
from open_clip_zerovl.tar.members import Sample, read_samples
from open_clip_zerovl.tar.shards import SIZES_FILE


def write_previews(
    clustering: Clustering, folder: Path, *, pictures: int = 25, px: int = 96, progress: bool = True
) -> None:
    """A contact sheet a cluster: the samples nearest to its centroid, nearest first, row by row."""
    wanted: dict[int, tuple[int, int]] = {}  # position -> (cluster, place)
    for cluster in range(len(clustering.centroids)):
        members = np.flatnonzero(clustering.labels == cluster)
        nearest = members[np.argsort(clustering.distances[members], kind="stable")[:pictures]]
        wanted.update({int(position): (cluster, place) for place, position in enumerate(nearest)})
    side = int(np.ceil(np.sqrt(pictures)))
    sheets = [Image.new("RGB", (side * px, side * px), "white") for _ in clustering.centroids]
    starts = np.concatenate(([0], np.cumsum(clustering.sizes)))
    needed = sorted({int(np.searchsorted(starts, position, side="right")) - 1 for position in wanted})
    for shard in tqdm(needed, desc="previews", unit="shard", disable=not progress):
        for position, sample in enumerate(read_samples(clustering.shards[shard]), start=int(starts[shard])):
            if position not in wanted:
                continue
            cluster, place = wanted[position]
            try:
                thumbnail = ImageOps.pad(open_picture(sample), (px, px), color="white")
            except BadImage:
                logging.warning(f"The picture of {sample.key} cannot be read: its place in the preview stays white.")
                continue
            sheets[cluster].paste(thumbnail, (place % side * px, place // side * px))
    for cluster, sheet in enumerate(sheets):
        content = io.BytesIO()
        sheet.save(content, "PNG")
        write_atomically(folder / f"{cluster:03d}.png", content.getvalue())


class _ClusterWriter:
    """Shards of one cluster, written side by side with those of the others: a tar is open at a time, none is in memory."""

    def __init__(self, folder: Path, shard_size: int) -> None:
        self.folder, self.shard_size = folder, shard_size
        self.sizes: dict[str, int] = {}
        self._tar: tarfile.TarFile | None = None
        self._name = ""
        folder.mkdir(parents=True)

    def add(self, sample: Sample) -> None:
        if self._tar is None:
            self._name = f"{len(self.sizes):05d}.tar"
            self.sizes[self._name] = 0
            self._tar = tarfile.open(self.folder / self._name, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115  # see close
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


def write_clusters(clustering: Clustering, out: Path, *, shard_size: int = 10_000, progress: bool = True) -> list[Path]:
    """Write every cluster as a source of its own, `OUT/cluster-000` and so on, in one pass over the source.

    Written aside and put in place when whole. A sample keeps its key behind the number of its old shard, since keys are
    unique within a shard only. Needs as much disk as the source, and as many open files as clusters.

    Raises:
        UserError: a shard that does not hold as many samples as when it was clustered.
    """
    staging = out / ".resharding"
    shutil.rmtree(staging, ignore_errors=True)
    names = [f"cluster-{cluster:03d}" for cluster in range(len(clustering.centroids))]
    writers = [_ClusterWriter(staging / name, shard_size) for name in names]
    try:
        for number, shard in enumerate(tqdm(clustering.shards, desc="reshard", unit="shard", disable=not progress)):
            labels = clustering.labels_of_shard(number)
            seen = 0
            for sample in read_samples(shard):
                if seen < len(labels):
                    writers[labels[seen]].add(Sample(f"{number:05d}-{sample.key.replace('/', '-')}", sample.files))
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
    """The `--train-data` value that names every cluster as a source (see `cluster_sources`).

    Raises:
        UserError: the folder holds no clusters.
    """
    return f"{load_clustering(out).source}={Path(out).expanduser()}"
