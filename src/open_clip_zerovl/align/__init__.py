"""Heads on two frozen encoders: a retrieval model from stored features, in the time of some epochs of matrix products.

    encoders --features--> rows (embedded once) --pairs, order--> train (heads, loss) --heads--> export (open_clip's folder)

Only linear heads and the temperature are trained, as in SAIL (CVPR 2025), ShareLock (2024) and FuseMix (CVPR 2024).
"""
