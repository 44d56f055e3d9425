"""Checkpoints: loading them, exporting them for stock open_clip, converting those of other programs."""
