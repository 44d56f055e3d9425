"""Tar files as sequences of samples: the rule of what a sample is, the index, shards written."""
