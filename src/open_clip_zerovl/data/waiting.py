"""Says while it lasts that training waits for a batch: what is being read, and for how long the run will go on waiting."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

FIRST_TOLD_SECONDS = 30.0  # of a wait until it is told
TOLD_AGAIN_SECONDS = 300.0

Item = TypeVar("Item")


def told_waits(items: Iterator[Item], sentence: Callable[[float, int], str]) -> Iterator[Item]:
    """The same items; a warning where one does not come for FIRST_TOLD_SECONDS, and again every TOLD_AGAIN_SECONDS.

    A thread of its own looks at the clock, since the caller's waits. Handling the item in between is no wait.

    Args:
        sentence: (seconds waited, items that have come) -> the warning.
    """
    waiting: list[tuple[float, int] | None] = [None]  # since when, and how many items had come
    ended = threading.Event()

    def tell() -> None:
        since, next_told = None, FIRST_TOLD_SECONDS
        while not ended.wait(min(1.0, FIRST_TOLD_SECONDS / 4)):
            now = waiting[0]
            if now != since:
                since, next_told = now, FIRST_TOLD_SECONDS
            if now is not None and (waited := time.monotonic() - now[0]) >= next_told:
                logging.warning(sentence(waited, now[1]))
                next_told += TOLD_AGAIN_SECONDS

    thread = threading.Thread(target=tell, name="told waits", daemon=True)
    thread.start()
    count = 0
    try:
        while True:
            waiting[0] = time.monotonic(), count
            item = next(items, ended)
            waiting[0] = None
            if item is ended:
                return
            count += 1
            yield item  # type: ignore[misc]
    finally:
        waiting[0] = None
        ended.set()
