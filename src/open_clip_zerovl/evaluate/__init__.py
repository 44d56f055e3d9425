"""Measuring models: retrieval, linear probes, bias, search, interpolation."""

from open_clip_zerovl.core.lazy import make_callable

make_callable(__name__, "open_clip_zerovl.cli.api:evaluate")
