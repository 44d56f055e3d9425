"""Debiased sampling (section 3.1, figure 2, A.4): pure functions of (seed, epoch, sizes, weights), in numpy alone.

    schedule     which source: the source of each step of an epoch, and the slices of shards that the epoch takes
    assignment   which reader: the samples of each micro-batch of each rank and loader worker, and their order

`data.mixture` reads the samples that these functions name.
"""

STRATEGIES = ("random", "proportional", "sequential", "debiased")  # how sources make batches
# When they help (docs/results.md): a flag's help, a trial and README say it in these words.
WHEN_DEBIASED = (
    "if captions in the style of one source search pictures in that of another; "
    "not if all sources are searched together"
)
