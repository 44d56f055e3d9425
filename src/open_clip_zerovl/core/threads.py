"""A call with a time limit, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def call_within(
    seconds: float | None, call: Callable[[], Result], name: str = "call with a time limit"
) -> Result:
    """The result of a call that may have no time-out of its own, such as reading from a remote store.

    The call runs in a thread. One that is late is left to itself; it does not keep the process from ending.

    Args:
        seconds: the limit; None or 0 for none.
        name: the thread's name.

    Raises:
        TimeoutError: the call takes longer.
        BaseException: the call's own error.
    """
    results: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised in the waiting thread
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name=name)
    thread.start()
    thread.join(seconds or None)
    if thread.is_alive():
        raise TimeoutError(f"nothing came for {seconds:g} s")
    if failed:
        raise failed[0]
    return results[0]
