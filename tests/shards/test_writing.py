"""Writing shards: balanced, atomic, and refused where a reader would lose a sample."""

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards import files as shards
from open_clip_zerovl.shards.tar import Sample, read_samples


def test_shards_are_balanced_and_round_trip(tmp_path):
    samples = [Sample(f"k{i}", {"png": bytes([i]), "txt": b"a caption"}) for i in range(11)]
    sizes = shards.write_source(tmp_path, samples, shard_size=4)
    assert sizes == {"train-00000.tar": 3, "train-00001.tar": 4, "train-00002.tar": 4}
    assert [s for name in sizes for s in read_samples(tmp_path / name)] == samples


def test_a_shard_cut_off_in_writing_leaves_the_old_one(tmp_path):
    def cut_off():
        yield Sample("b", {"txt": b"new"})
        raise KeyboardInterrupt

    shards.write_shard(tmp_path / "0.tar", [Sample("a", {"txt": b"old"})])
    with pytest.raises(KeyboardInterrupt):
        shards.write_shard(tmp_path / "0.tar", cut_off())
    assert [path.name for path in tmp_path.iterdir()] == ["0.tar"]
    assert [s.key for s in read_samples(tmp_path / "0.tar")] == ["a"]


def test_samples_that_readers_would_lose_are_refused(tmp_path):
    for key in ("a.b", ""):
        with pytest.raises(UserError, match="holds a dot"):
            shards.write_shard(tmp_path / "0.tar", [Sample(key, {"txt": b"x"})])
    with pytest.raises(UserError, match="comes twice"):
        shards.write_shard(tmp_path / "0.tar", [Sample("a", {"txt": b"x"})] * 2)
