"""Source bias of models (section 3.1, figures 3 and 4, A.5)."""
