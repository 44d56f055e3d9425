"""`zerovl plan`: what a training run needs, and how long it takes. `zerovl doctor`: whether this machine can train."""

from open_clip_zerovl.late import handed_on

__getattr__, __dir__, __all__ = handed_on(
    __name__,
    {
        "open_clip_zerovl.plan.make": ["make_plan"],
        "open_clip_zerovl.plan.answer": ["Plan"],
        "open_clip_zerovl.plan.settings": ["PlanSettings"],
    },
)
