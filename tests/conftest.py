"""Shared pieces of the tests: small webdataset sources and real multi-process runs."""

from __future__ import annotations

import os

# Before torch is imported anywhere: the test machine has few cores and many processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
