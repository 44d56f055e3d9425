"""A module a dataset, `drawn` for drawings, `pack` for your own pairs: from what makers publish to webdataset shards."""
