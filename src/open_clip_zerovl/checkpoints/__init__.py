"""Checkpoints: loading them, exporting them for stock open_clip, converting those of other programs."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.checkpoints.loading": ["load_model"],
        "open_clip_zerovl.checkpoints.export": ["export_local_dir"],
        "open_clip_zerovl.checkpoints.convert": ["convert_checkpoint"],
        "open_clip_zerovl.checkpoints.spec": ["ModelSpec", "read_model_spec"],
        "open_clip_zerovl.checkpoints.weights": ["read_state_dict"],
    },
)
