"""Frozen teachers whose embeddings are stored: `embed` makes them, and training distils from them.

See docs/methods.md, "Teachers".
"""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.distill.embed": ["TeacherSettings", "embed_sources"],
        "open_clip_zerovl.distill.rows": ["TeacherRows"],
    },
)
