"""One source as many (A.6): k-means on a model's features divides it into clusters, which are sources of their own."""
