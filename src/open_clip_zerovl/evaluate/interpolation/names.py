"""The choices of the interpolation's flags. Imports nothing heavy, so that help texts come at once."""

RULES = ("kept", "mean", "new")
KEPT_SHARE = 0.99  # of A's score on the kept sets
ALPHAS = tuple(i / 10 for i in range(11))
PLAIN_ALPHA = 0.5  # without sets to choose by: near the best in most of WiSE-FT's experiments
