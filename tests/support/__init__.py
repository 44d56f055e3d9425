"""Shared parts of tests: small sources and models, references, a hostile server, programs that tests start."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
