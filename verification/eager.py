"""Tasks that run up to their first wait when they are created, an option of asyncio since Python 3.12.

For Python 3.11 this module derives such a task from asyncio's task in Python, so that every version is
tested: code that relies on a delayed first step fails with either.
"""

import asyncio
import sys
from asyncio import tasks
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

if sys.version_info >= (3, 12):

    def eager_task(
        loop: asyncio.AbstractEventLoop, coro: Any, *, eager_start: bool | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        """Create a task, and run it up to its first wait."""
        # uvloop 0.23 names `eager_start`, which the factory of Python 3.12 does not know.
        return asyncio.eager_task_factory(loop, coro, **options)

else:

    class _FirstStep:
        """Replace the loop while a task is made, and keep its first step instead of scheduling it."""

        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            self.get_debug = loop.get_debug

        def call_soon(self, step: Callable[[], object], context: Context) -> None:
            self.step, self.context = step, context

    class _EagerTask(tasks._PyTask):  # type: ignore[name-defined,misc]
        def __init__(
            self, coro: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop, **options: Any
        ) -> None:
            first = _FirstStep(loop)
            super().__init__(coro, loop=first, **options)
            self._loop = loop
            if not loop.is_running():  # nothing runs before the loop does
                loop.call_soon(first.step, context=first.context)
                return
            maker = asyncio.current_task(loop)
            if maker is not None:
                tasks._leave_task(loop, maker)
            try:
                first.context.run(first.step)
            finally:
                if maker is not None:
                    tasks._enter_task(loop, maker)

    def eager_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        """Create a task, and run it up to its first wait."""
        task: asyncio.Task[Any] = _EagerTask(coro, loop, **options)
        return task
