"""Features of pictures and captions by frozen models, made once: align, search, zero-shot and probes read them.

    collection --pictures or captions--> model (encoder) --rows--> one file a shard (store)

`embed` makes what is missing. `digest` tells models and transforms apart.
"""
