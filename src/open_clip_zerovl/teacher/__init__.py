"""Frozen teachers whose embeddings are stored: `embed` makes them, `store` keeps them, and training distils from them.

See docs/methods.md, "Teachers".
"""

from open_clip_zerovl.late import handed_on

__getattr__, __dir__, __all__ = handed_on(
    __name__,
    {
        "open_clip_zerovl.teacher.embed": ["TeacherSettings", "embed_sources"],
        "open_clip_zerovl.teacher.store": ["TeacherStore"],
        "open_clip_zerovl.teacher.rows": ["TeacherRows"],
    },
)
