"""What a training run leaves beside its checkpoints: a record of its course, and a page made from it."""

from open_clip_zerovl.late import handed_on

__getattr__, __dir__, __all__ = handed_on(
    __name__,
    {
        "open_clip_zerovl.runs.record": ["Record", "read_record"],
        "open_clip_zerovl.runs.page": ["write_run_page"],
    },
)
