"""Values of the loss' flags, and a batch size. Nothing here imports torch, so that a help text does not wait for it."""

POSITIVES = ("pair", "caption", "image", "both")  # whose samples share a target
TEMPERATURE_RANGE = (0.001, 0.5)  # to which the paper's released code clamps the temperature


def heads_batch(gpu: bool, weights: int, embed_dim: int) -> int:
    """Choose the pairs N of a step that trains only heads with this number of weights, to D numbers.

    A pair costs 6 N D operations in the loss, and 4 to 6 for each weight of the heads. On a CPU N is as large as lets the loss
    cost no more than the heads; a GPU computes a large product better than a small one.
    """
    return 32_768 if gpu else max(256, weights // embed_dim)
