"""What a training run leaves beside its checkpoints: a record of its course, and a page made from it."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.report.record": ["Record", "read_record"],
        "open_clip_zerovl.report.run_page": ["write_run_page"],
    },
)
