"""Pictures found by words or by a picture: `zerovl search`."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.data.collection": ["open_collection"],
        "open_clip_zerovl.evaluate.search.index": ["embed_collection", "model_digest"],
        "open_clip_zerovl.evaluate.search.run": ["SearchSettings", "run_search"],
    },
)
