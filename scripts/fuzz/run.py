"""Give generated files to every function that reads files from outside, and count the outcomes.

    python -m scripts.fuzz.run [--examples 400] [--seconds 30] [tar picture]

Hypothesis draws the files (`inputs`), the same ones at each run unless a `--seed` is given; `readers` are the functions that
training and `zerovl` call. Each reading must work, end in a one-sentence error (`UserError`), or meet a bad sample, which is
replaced or reported. Anything else, such as a hang of 10 s or 2 GiB of memory, ends this program with the smallest such file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated as A

import open_clip
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from open_clip_zerovl.core.errors import DEBUG, UserError, sentence_of
from scripts.fuzz import inputs
from scripts.fuzz.readers import BAD_SAMPLE, KINDS, Reader
from scripts.program import program

LIMIT_SECONDS = 10
LIMIT_BYTES = 2 << 30  # a reader's memory, on top of the memory that the process already uses
WORKS, SENTENCE = "works", "sentence"
OUTCOMES = (WORKS, SENTENCE, BAD_SAMPLE)
Tally = Counter[tuple[str, str, str]]  # (kind, reader, outcome)


class Hang(BaseException):
    """A reader did not return in time."""


class TimeIsUp(KeyboardInterrupt):
    """The time for a kind is used up. Only a KeyboardInterrupt stops hypothesis, for other exceptions count as failures."""


class Failed(Exception):
    """A reader did something else than work, raise a one-sentence error, or report a bad sample."""


def outcome_of(read: Reader, folder: Path) -> str:
    """Return the outcome of one reader on one input: WORKS, SENTENCE or `readers.BAD_SAMPLE`.

    Raises:
        Failed: it hung, took more than LIMIT_BYTES, or raised something else than a UserError of one sentence.
    """
    try:
        with _limited():
            found = read(folder)
    except UserError as error:
        if not str(error).strip() or "\n" in str(error).strip() or not str(error).isprintable():
            raise Failed(f"its message is not one printable line: {str(error)!r}") from error
        return SENTENCE
    except Hang as error:
        raise Failed(f"it did not end within {LIMIT_SECONDS} s") from error
    except Exception as error:
        # The boundary's sentence of a file or a package; memory that damaged input takes is a fault.
        if not isinstance(error, MemoryError) and sentence_of(error) is not None:
            return SENTENCE
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
    # In a thread or in C, where the alarm cannot interrupt, the process ends with a traceback.
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
    """Register the checkpoints' model, and keep caches in `folder`."""
    (folder / "fuzz-tiny.json").write_text(json.dumps(inputs.MODEL))
    open_clip.add_model_config(folder / "fuzz-tiny.json")
    inputs.model()
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")


def fuzz(
    kind: str, tally: Tally, *, examples: int, seconds: float, number: int | None = None
) -> None:
    """Draw up to `examples` inputs of a kind for about `seconds`, each of which all the kind's readers read.

    Args:
        number: a seed; without one, hypothesis draws the same inputs at each call, as many as the time allows.

    Raises:
        Failed: by a reader; hypothesis adds the smallest input that it found.
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
            raise TimeIsUp
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
        attempt = seeded(number)(attempt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            attempt()
        except TimeIsUp:
            pass
        finally:
            logging.disable(logging.NOTSET)


def run(
    kinds: A[tuple[str, ...], "of inputs (default: all)", "KIND"] = (),
    /,
    *,
    examples: A[int, "inputs of each kind"] = 400,
    seconds: A[float, "time for each kind of input"] = 30,
    seed: A[int | None, "draw other inputs than the fixed ones"] = None,
) -> None:
    """Draw inputs of each kind, and print the counts of their outcomes as CSV.

    Raises:
        UserError: an unknown kind.
    """
    if unknown := {*kinds} - {*KINDS}:
        raise UserError(f"there is no kind {min(unknown)!r}; give some of {', '.join(KINDS)}")
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="fuzz-home-") as home:
        prepare(Path(home))
        for kind in kinds or KINDS:
            fuzz(kind, tally, examples=examples, seconds=seconds, number=seed)
    print(",".join(("input", "read_by", *OUTCOMES)))
    for kind, name in dict.fromkeys((kind, name) for kind, name, _ in tally):
        counts = (str(tally[kind, name, outcome]) for outcome in OUTCOMES)
        print(f'{kind},"{name}",{",".join(counts)}')
    print(f"{sum(tally.values()):,} readings, none of which ended in another way")


if __name__ == "__main__":
    # hypothesis' notes on the smallest file stand in the traceback
    sys.exit(program(run, [*sys.argv[1:], DEBUG]))
