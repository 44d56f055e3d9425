"""Fine-tuning from a model and one's own pairs to an exported model, with what it keeps of its former ability.

pairs -> settings -> training -> the best epoch -> weights in between (WiSE-FT) -> report, gallery, exported model
"""
