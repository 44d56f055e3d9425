"""Tar files as sequences of samples: what a sample is, the index of a shard, how shards are opened and written."""
