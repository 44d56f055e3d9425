"""`zerovl data pack`: people's own pictures to shards. A reader for each form of input yields the same rows.

inputs -> columned, samples                 readers: rows of (picture, captions, source, file and line)
collect                                     rows and pictures into a store: each picture once, decoded, with its pixels' hash
split                                       splits, a held-out set, and pictures that are left out
write                                       shards
report                                      numbers, lines and a page
packing                                     the whole call
"""
