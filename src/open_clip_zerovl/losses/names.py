"""What a command line may say of the loss; nothing here needs torch."""

POSITIVES = ("pair", "caption", "image", "both")  # whose samples share a target
