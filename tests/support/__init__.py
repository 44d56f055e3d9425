"""Shared parts of tests: small sources and models, references, a hostile server, programs that tests start."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def documented(needle: str, page: str = "dga.md") -> str:
    """Find the first Python block of a page of docs that holds some words."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return next(block for block in blocks if needle in block)
