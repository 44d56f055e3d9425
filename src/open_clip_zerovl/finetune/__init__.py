"""Fine-tuning from a model and one's own pairs to an exported model; the former ability of the model is measured, too.

pairs -> settings -> training -> the best epoch -> weights in between (WiSE-FT) -> report, gallery, exported model
"""

from open_clip_zerovl.core.lazy import make_callable

make_callable(__name__, "open_clip_zerovl.cli.api:finetune")
