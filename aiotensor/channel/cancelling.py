"""Cancel the task in a ``with`` block once."""

import asyncio
from types import TracebackType
from typing import Self


class CancelOnce:
    """Cancel the task in a ``with`` block on request, and absorb that cancellation at the end of the block.

    This works like `asyncio.timeout`, with a call of `cancel` in place of the timer. An anyio cancel scope is
    not suitable: it cancels the task again in each iteration of the loop until the block ends, so a task that
    shields its work would keep the processor busy.

    Args:
        calls: the number of calls of `cancel` that cancel the task, for a block that does the work of several
            requests.
    """

    def __init__(self, calls: int = 1) -> None:
        self._calls = calls
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._handle: asyncio.Handle | None = None
        self._was_delivered = False

    def cancel(self) -> None:
        """Cancel the task in the next iteration of the loop, unless it leaves the block first."""
        self._calls -= 1
        task = self._task
        if self._calls <= 0 and task is not None and self._handle is None:
            # Not at once: the caller may be the task itself, or an eager task that it starts. A task that is
            # not suspended would be cancelled at its next wait, perhaps after the block, and before Python
            # 3.13 `uncancel` does not prevent that.
            self._handle = task.get_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        if self._task is not None:
            self._was_delivered = True
            self._task.cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        if self._task is None:
            raise RuntimeError("this block can only be entered in a task")
        self._cancelling = self._task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        if task is None or self._handle is None:
            return False
        self._handle.cancel()
        # If other code cancelled the task as well, the cancellation propagates.
        is_last = self._was_delivered and task.uncancel() <= self._cancelling
        return is_last and isinstance(error, asyncio.CancelledError)
