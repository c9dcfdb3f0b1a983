"""The memory of large messages: detects when ZeroMQ has released it, and frees it in a thread."""

import asyncio
import weakref
from typing import Any

import zmq

from aiotensor.protocol.parts import Parts
from aiotensor.runtime.affinity import FreedItems
from aiotensor.runtime.worker import Worker

__all__ = ["MessageMemory"]

_QUICK_FREED_BYTES = 8 << 20


class _Use:
    """The number of buffers of one message that ZeroMQ still reads; `released` completes when it is 0."""

    def __init__(self, released: "asyncio.Future[None]", count: int) -> None:
        self.released = released
        self.count = count
        self.references: list[weakref.ref[Any]] = []


class MessageMemory:
    """Track the memory that ZeroMQ reads without copying, and free large messages in a thread.

    A thread is used because the kernel needs a millisecond to reclaim 20 MB, and Python needs about as long
    to free the objects of a large decoded message. The thread is started for the first large message. This
    object belongs to the running loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._freed: FreedItems[_Use] = FreedItems(self._release)
        self._freed.bind()
        self._used: set[_Use] = set()  # keeps the weak references alive, so that they call their callbacks
        self._worker = Worker("aiotensor-channel")
        self._is_closed = False

    def watch(self, parts: Parts) -> "asyncio.Future[None] | None":
        """Return a future that completes when a message's large buffers are released; None if it has none.

        Call this before the message is sent. The future completes when nothing refers to the memory of the
        buffers, so the caller must drop its references, too.
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

    def free_parts(self, parts: "list[memoryview] | list[bytes | memoryview]") -> None:
        """Release the parts of a message by emptying the list: now, or in the thread if they are large."""
        if sum(map(len, parts)) > _QUICK_FREED_BYTES:
            self.free(parts)
        else:
            parts.clear()

    def free(self, box: list[Any]) -> None:
        """Empty a list in the thread."""
        if self._is_closed:
            box.clear()
        else:
            self._worker.begin("freeing a message", box.clear)

    def close(self) -> None:
        """Stop the thread after the pending work."""
        self._is_closed = True
        self._worker.close()
