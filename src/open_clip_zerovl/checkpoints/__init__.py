"""Checkpoints: loading them, and exporting them for stock open_clip and transformers."""
