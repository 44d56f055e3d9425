"""Frozen teachers whose embeddings are stored: `embed` makes them, and training distils from them.

See docs/methods.md, "Teachers".
"""
