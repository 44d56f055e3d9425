"""ZeroVL's recipe (Cui et al., ECCV 2022) for open_clip: strong contrastive image-text models on few GPUs.

Importing `open_clip_zerovl.models` makes the model configs (`zerovl-ViT-B-16-BERT-base` ...) known to open_clip. This package
imports neither open_clip nor torch by itself; `open_clip_zerovl.api` has the commands as functions.
"""

__version__ = "0.1.0"  # the one place; pyproject.toml, CITATION.cff and CHANGELOG.md follow, and a test compares them
