"""The end of a training process, the same for every cause.

An ordinary exit of Python waits for loader workers, threads, and collectives that another rank may never enter. Meanwhile the
other ranks and the launcher wait, and the GPUs are held. Here the process ends its children first, then runs exit handlers
(logs, wandb, tensorboard), then ends, all within `LIMIT_SECONDS`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from open_clip_zerovl.core.errors import place_sentence
from open_clip_zerovl.core.processes import end_with_parent

LIMIT_SECONDS = 10.0
INTERRUPTED_STATUS = 128 + signal.SIGINT

_LOST_RANK = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Timed out waiting \d+ms for (recv|send) operation|remote process exited|"
    r"wait timeout after \d+ms",
    re.I,
)


def run(program: Callable[[], int]) -> NoReturn:
    """Call a program and end this process with the status that it returns.

    An exception is shown as one sentence if `sentence_of` has one, else as a traceback; the status is then 1. Ctrl-C gives
    130. Under torchrun the process ends when torchrun does.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Ranks of a killed torchrun would go on training while a restart writes into the same folder.
        end_with_parent(signal.SIGKILL)
    try:
        status = program()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            say(stop.code)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        say("training.main: interrupted; what was saved before is kept")
        status = INTERRUPTED_STATUS
    except BaseException as error:
        sentence = sentence_of(error)
        rank = os.environ.get("RANK")
        where = f"[rank {rank}] " if rank else ""
        say(traceback.format_exc() if sentence is None else f"{where}training.main: error: {sentence}")
        status = 1
    end(status)


def say(words: str) -> None:
    """Print on standard error. If that fails (it may be a file on a full disk), nothing is printed."""
    with contextlib.suppress(OSError, ValueError):
        print(words.rstrip(), file=sys.stderr, flush=True)


def sentence_of(error: BaseException) -> str | None:
    """A sentence for an error that needs no traceback: a full GPU memory or disk, a lost rank. None for others."""
    first_line = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"the device's memory is full ({first_line}); lower --batch-size and raise --dga-steps by the same factor: the "
            "effective batch stays (--dga-retain 1 keeps one graph, --loss-chunk 1024 fewer logits at once; `zerovl plan` says "
            "what fits)"
        )
    if (sentence := place_sentence(error)) is not None:
        return f"{sentence}, then go on with --resume latest"
    if isinstance(error, RuntimeError) and _LOST_RANK.search(str(error)):
        return f"another rank has ended, its own message says why ({first_line})"
    return None


def end(status: int) -> NoReturn:
    """End this process and its children within `LIMIT_SECONDS`."""
    for number in (signal.SIGTERM, signal.SIGUSR1):  # they ask for an end, which has begun
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_late, args=(status,), daemon=True).start()
    end_children()
    atexit._run_exitfuncs()
    logging.shutdown()
    _exit(status)


def end_children() -> None:
    """Kill the processes that multiprocessing has started here: loader workers, open_clip's remote sync."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for each loader worker that dies
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(timeout=2)


def _end_late(status: int) -> None:
    time.sleep(LIMIT_SECONDS)
    _exit(status)


def _exit(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # its reader is gone, or it is closed
            continue
    os._exit(status)
