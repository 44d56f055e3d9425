"""Weights between two models, scored on new and on kept abilities (WiSE-FT: Wortsman et al., CVPR 2022)."""
