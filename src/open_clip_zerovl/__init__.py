"""ZeroVL's recipe (Cui et al., ECCV 2022) for open_clip: strong contrastive image-text models on few GPUs."""
