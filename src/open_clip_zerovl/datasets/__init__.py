"""One module a dataset: from the files that its makers publish to webdataset shards with `sizes.json`."""
