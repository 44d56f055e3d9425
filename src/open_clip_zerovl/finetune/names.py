"""Defaults of `zerovl finetune`. Imports nothing heavy, so that help texts come at once."""

PATIENCE = 5  # epochs without a better score before training ends
HELD_OUT_SHARE = 0.1  # of the pictures, where the data brings no held-out set
MOST_HELD_OUT = 1_000  # pictures, as many as in Flickr30K's test set
