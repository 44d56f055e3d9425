"""Draw inputs, read them, and count what came: it works, one sentence, a bad sample; anything else is a failure."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import resource
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import open_clip
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from open_clip_zerovl.errors import UserError
from scripts.fuzz import inputs
from scripts.fuzz.readers import KINDS, Reader

LIMIT_SECONDS = 10
LIMIT_BYTES = 2 << 30  # that a reader may take beside what the process holds
WORKS, SENTENCE = "works", "sentence"
Tally = Counter[tuple[str, str, str]]  # (kind, reader, outcome)


class Hang(BaseException):
    """A reader did not come back in time."""


class Over(KeyboardInterrupt):
    """The time is over; hypothesis takes any other exception for a failure and draws on."""


class Failed(Exception):
    """A reader did anything but work, say one sentence, or take a bad sample for one."""


def outcome_of(read: Reader, folder: Path) -> str:
    """What a reader made of an input.

    Raises:
        Failed: it hung, took more than LIMIT_BYTES, or raised what nobody is to see.
    """
    try:
        with _limited():
            found = read(folder)
    except UserError as error:
        if not str(error).strip() or "\n" in str(error).strip() or not str(error).isprintable():
            raise Failed(f"its sentence is none: {str(error)!r}") from error
        return SENTENCE
    except Hang as error:
        raise Failed(f"it did not end within {LIMIT_SECONDS} s") from error
    except Exception as error:
        raise Failed(f"{type(error).__name__}: {error}") from error
    return found or WORKS


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang

    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    handler = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_SECONDS)
    # where the alarm cannot reach, in a thread or in C, the process ends and says where it was
    faulthandler.dump_traceback_later(6 * LIMIT_SECONDS, exit=True)
    resource.setrlimit(resource.RLIMIT_DATA, (held + LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def prepare(folder: Path) -> None:
    """Register the model of checkpoints, and keep quiet what readers log."""
    (folder / "fuzz-tiny.json").write_text(json.dumps(inputs.MODEL))
    open_clip.add_model_config(folder / "fuzz-tiny.json")
    inputs.model()
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")


def fuzz(kind: str, tally: Tally, *, examples: int, seconds: float, number: int | None = None) -> None:
    """Draw up to `examples` inputs of a kind within about so many seconds; each reader of the kind reads each.

    Args:
        number: a seed; without one, hypothesis draws the same inputs at each call, as many as the time allows.

    Raises:
        Failed: what a reader did; hypothesis notes the smallest input that it found.
    """
    make, readers = KINDS[kind]
    end = time.monotonic() + seconds
    failed = False

    @settings(
        max_examples=examples, derandomize=number is None, database=None, deadline=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        nonlocal failed
        if time.monotonic() > end and not failed:
            raise Over
        with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
            folder = Path(place)
            make(data.draw, folder)
            for name, read in readers.items():
                try:
                    outcome = outcome_of(read, folder)
                except Failed as error:
                    failed = True
                    raise Failed(f"{kind}, read by {name}: {error}") from error
                tally[kind, name, outcome] += 1

    if number is not None:
        attempt = seed(number)(attempt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            attempt()
        except Over:
            pass
        finally:
            logging.disable(logging.NOTSET)


def table(tally: Tally) -> list[str]:
    """The counts as a Markdown table."""
    lines = ["| input | read by | works | sentence | bad sample |", "|---|---|--:|--:|--:|"]
    for kind, name in dict.fromkeys((kind, name) for kind, name, _ in tally):
        counts = (tally[kind, name, outcome] for outcome in (WORKS, SENTENCE, "bad sample"))
        lines.append(f"| {kind} | {name} | " + " | ".join(map(str, counts)) + " |")
    return lines
