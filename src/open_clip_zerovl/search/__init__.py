"""Pictures found by words or by a picture: `zerovl search`."""

from open_clip_zerovl.late import handed_on

__getattr__, __dir__, __all__ = handed_on(
    __name__,
    {
        "open_clip_zerovl.search.collection": ["open_collection"],
        "open_clip_zerovl.search.index": ["embed_collection", "model_digest"],
        "open_clip_zerovl.search.run": ["SearchSettings", "run_search"],
    },
)
