"""The memory that ZeroMQ sends without copying it."""

import asyncio
import weakref
from typing import Any

import zmq

from aiotensor.protocol.parts import Parts
from aiotensor.runtime.affinity import FreedItems

__all__ = ["ZeroCopyBuffers"]


class _Use:
    """The buffers of one message that ZeroMQ still reads, and a future that completes afterwards."""

    def __init__(self, released: "asyncio.Future[None]", count: int) -> None:
        self.released = released
        self.count = count
        self.references: list[weakref.ref[Any]] = []


class ZeroCopyBuffers:
    """Track the memory that ZeroMQ reads without copying; belongs to the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._freed: FreedItems[_Use] = FreedItems(self._loop, self._release)
        self._used: set[_Use] = set()  # keeps the weak references: their callbacks need them alive

    def watch(self, parts: Parts) -> "asyncio.Future[None] | None":
        """Watch the large buffers of a message, before it is sent; return None if it has none.

        The future completes when nothing refers to their memory. The caller must drop its references too.
        """
        if len(parts) == 1:
            return None
        owners = [
            part.obj for part in parts[1:] if isinstance(part, memoryview) and len(part) >= zmq.COPY_THRESHOLD
        ]
        if not owners:
            return None
        use = _Use(self._loop.create_future(), len(owners))
        self._used.add(use)
        # The callbacks run in the thread that frees the memory, often pyzmq's own.
        use.references = [weakref.ref(owner, lambda _: self._freed(use)) for owner in owners]
        return use.released

    def _release(self, uses: list[_Use]) -> None:
        for use in uses:
            use.count -= 1
            if not use.count:
                self._used.discard(use)
                if not use.released.done():
                    use.released.set_result(None)
