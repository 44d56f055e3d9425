"""Values of the loss' flags. Nothing here imports torch, so that a help text does not wait for it."""

POSITIVES = ("pair", "caption", "image", "both")  # whose samples share a target
TEMPERATURE_RANGE = (0.001, 0.5)  # to which the paper's released code clamps the temperature
