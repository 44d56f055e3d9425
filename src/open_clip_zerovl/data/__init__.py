"""The data engine (section 3.1, A.4): sources of webdataset shards in, micro-batches of one source out."""
