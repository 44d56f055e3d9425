"""Public datasets: annotations and pictures of their makers to shards."""
