"""Embeddings of a collection by frozen encoders, stored once: search, probes, teachers and frozen towers read them.

    collection (reading, sources) --pictures, captions--> encoders (encoder) --rows--> a folder of mapped arrays (store)

`embed` does the work unit by unit, continues after a kill, and shares it over processes. `fingerprint` distinguishes models,
transforms and files.
"""
