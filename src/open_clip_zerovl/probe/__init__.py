"""The linear probe (section 5.3, A.7)."""

from open_clip_zerovl.late import handed_on

__getattr__, __dir__, __all__ = handed_on(
    __name__,
    {
        "open_clip_zerovl.probe.run": ["run_linear_probe"],
        "open_clip_zerovl.probe.lars": ["LarsSettings"],
    },
)
