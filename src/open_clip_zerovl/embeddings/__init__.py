"""Embeddings of a collection by a frozen encoder, stored once, read by search, probes, teachers and others."""
