"""Features of pictures and captions by frozen models, made once: align, search, zero-shot and probes read them.

collection (sources) --pictures or captions--> model (encoder) --rows--> one file a shard (embed)
"""
