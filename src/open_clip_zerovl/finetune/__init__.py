"""A whole fine-tuning: a model and someone's own pairs in, a model out that has kept what it could.

pairs -> settings -> training -> the best epoch -> weights in between (WiSE-FT) -> report, gallery, exported model
"""
