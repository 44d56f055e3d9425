"""Embeddings of a collection by a frozen encoder, stored once and read by search, probes, clusters, teachers and frozen towers."""
