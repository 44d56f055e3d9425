"""The flags of `zerovl cluster`. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

from dataclasses import dataclass

from open_clip_zerovl.core.flags import flag, natural, positive, seed

FEATURES = ("image", "text", "both")


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of a clustering and of its files.

    Attributes:
        min_size: smaller clusters are dissolved, so that fewer than K remain.
        features: "both" are side by side.
        preview: pictures on a contact sheet; 0 for no sheets.
        reshard: also write each cluster as shards of its own, which are faster to read on a hard disk.
        shard_size: samples of such a shard, at most.
    """

    clusters: int = flag(100, "number of clusters", kind=positive, metavar="K")
    min_size: int = flag(
        1,
        "move the samples of clusters below N samples to the nearest other ones; N is the effective batch",
        kind=positive,
        metavar="N",
    )
    features: str = flag("image", "tower of the features", choices=FEATURES)
    passes: int = flag(10, "passes of k-means over the features", kind=positive)
    seed: int = flag(0, "seed of k-means", kind=seed)
    preview: int = flag(25, "pictures a preview", kind=natural, metavar="N")
    reshard: bool = flag(False, "write each cluster as shards (as much disk again)")
    shard_size: int = 10_000
