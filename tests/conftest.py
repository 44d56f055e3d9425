"""Before any test: one thread a process, no hub, and child processes that import this checkout and `tests/support`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Before torch is imported anywhere: the test machine has few cores and many processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
_BEFORE = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []  # where `make gpu` keeps unpacked wheels
# OPEN_CLIP_SOURCE=DIR runs the tests on another open_clip: a folder that holds the packages open_clip and open_clip_train.
_OTHER = [os.environ["OPEN_CLIP_SOURCE"]] if os.environ.get("OPEN_CLIP_SOURCE") else []
sys.path[:0] = _OTHER
os.environ["PYTHONPATH"] = os.pathsep.join([*_OTHER, *map(str, (ROOT / "src", ROOT / "tests", ROOT)), *_BEFORE])
