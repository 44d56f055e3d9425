"""`zerovl plan`: data, memory, time and disk of a training run. `zerovl doctor`: a check of this machine."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.plan.make": ["Plan", "make_plan"],
        "open_clip_zerovl.plan.batching": ["PlanSettings"],
    },
)
