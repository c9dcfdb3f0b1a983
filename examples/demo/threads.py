"""Run work in threads that stop soon after the waiting task was cancelled."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeAlias, TypeVar

__all__ = ["Checkpoint", "in_thread", "no_checkpoint"]

R = TypeVar("R")

# Long-running work calls it repeatedly. It raises if the result is no longer needed.
Checkpoint: TypeAlias = Callable[[], None]


def no_checkpoint() -> None:
    """Do nothing, for work that is never cancelled."""


async def in_thread(work: Callable[[Checkpoint], R]) -> R:
    """Call a function in a thread, and return its result.

    Waits for the function. Cancelling does not wait: the next checkpoint in the thread ends the function.

    Args:
        work: called with the checkpoint.
    """
    cancelled = threading.Event()

    def checkpoint() -> None:
        if cancelled.is_set():
            raise asyncio.CancelledError

    try:
        return await asyncio.to_thread(work, checkpoint)
    except asyncio.CancelledError:
        cancelled.set()
        raise
