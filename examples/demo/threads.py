"""Run work in threads, and stop it when the waiting task is cancelled."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias, TypeVar

import anyio

__all__ = ["Checkpoint", "in_thread", "no_checkpoint"]

R = TypeVar("R")

# Long-running work calls it repeatedly. It raises if the result is no longer needed.
Checkpoint: TypeAlias = Callable[[], None]


def no_checkpoint() -> None:
    """Do nothing, for work that is never cancelled."""


async def in_thread(work: Callable[[Checkpoint], R]) -> R:
    """Call a function in a thread, and return its result.

    Waits for the function. Cancelling waits too: the next checkpoint in the thread ends the function. So a
    caller can close afterwards what the function uses.

    Args:
        work: called with the checkpoint.
    """
    cancelled = threading.Event()

    def checkpoint() -> None:
        if cancelled.is_set():
            raise asyncio.CancelledError

    # A future and no task, which the end of the loop would cancel while the thread continues.
    working = asyncio.get_running_loop().run_in_executor(None, work, checkpoint)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        cancelled.set()
        # A surrounding scope of anyio would cancel this wait again in each iteration of the loop.
        with anyio.CancelScope(shield=True):
            while not working.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([working])
        working.exception()  # or asyncio logs that it was never retrieved
        raise
