"""Values of the loss' flags. Nothing here imports torch, so that a help text does not wait for it."""

POSITIVES = ("pair", "caption", "image", "both")  # whose samples share a target
