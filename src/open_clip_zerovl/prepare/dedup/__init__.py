"""Near-duplicate pictures: hashes, overlap with test sets, and leaving them out."""
