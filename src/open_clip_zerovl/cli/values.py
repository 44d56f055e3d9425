"""Types of flags that several commands use; argparse refuses a value out of range."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number of 0 or more."""
    return _whole(text, 0)


def seed(text: str) -> int:
    """A seed that every generator takes: 0 to 2^32 - 1."""
    value = _whole(text, 0)
    if value >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text} is too large for a seed; give 0 to {(1 << 32) - 1}")
    return value


def part(text: str) -> tuple[int, int]:
    """I/N: every N-th of something from number I on."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 0 <= I < N")
    return int(index), int(count)


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number from 0 to 1")
    return value


def captions(text: str) -> int | None:
    """A number of captions of an image, or None for `all`."""
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of captions nor 'all'")
    return int(text)


def _whole(text: str, least: int) -> int:
    # 18 digits are more than any count has; Python itself refuses to convert thousands of digits.
    if not text.removeprefix("-").isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number")
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is too small; give {least} or more")
    return int(text)
