"""Fine-tuning from a model and one's own pairs to an exported model; the former ability of the model is measured, too.

pairs -> settings -> training -> the best epoch -> weights in between (WiSE-FT) -> report, gallery, exported model
"""
