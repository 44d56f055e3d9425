"""Models on the same held-out pairs of their sources: retrieval, source probe, log p (section 3.1, figures 3 and 4)."""
