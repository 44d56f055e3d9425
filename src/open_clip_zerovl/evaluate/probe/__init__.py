"""The linear probe (section 5.3, A.7)."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.evaluate.probe.run": ["run_linear_probe"],
        "open_clip_zerovl.evaluate.probe.lars": ["LarsSettings"],
    },
)
