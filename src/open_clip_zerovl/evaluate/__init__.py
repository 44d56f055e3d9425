"""Measuring models: retrieval, linear probes, bias, search, interpolation."""
