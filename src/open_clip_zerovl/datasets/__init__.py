"""One module a dataset: from what its makers publish to webdataset shards with `sizes.json`."""
