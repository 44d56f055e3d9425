"""Tar files as sequences of samples: grouping of members, index of a shard, opening, caching and writing of shards."""
