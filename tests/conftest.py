"""Before any test: one thread a process, no hub, and child processes that import this checkout and `tests/support`."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Before torch is imported anywhere: the test machine has few cores and many processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
_BEFORE = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []  # where `make gpu` keeps unpacked wheels
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, (ROOT / "src", ROOT / "tests", ROOT)), *_BEFORE])
