"""`python -m training.main`: open_clip's training program with the flags of the ZeroVL recipe."""
