"""A transport that nothing can be written to."""

import errno
from collections.abc import Callable, Sequence

from aiotensor.runtime.process_end import ProcessEnd
from aiotensor.transports.base import Handler

__all__ = ["Unwritable"]


class Unwritable:
    """A transport whose records the kernel rejects while `is_broken`, as it does where memory is short."""

    mover = None
    peer_pid = 0
    is_writable = True

    def __init__(self) -> None:
        self.is_broken = True
        self.is_closed = False
        self._handler: Handler | None = None

    def start(self, handler: Handler) -> None:
        self._handler = handler

    def receive(self, data: bytes) -> None:
        """Deliver a record of the peer."""
        assert self._handler is not None
        self._handler.record_received(memoryview(data), [])

    def watch_peer(self, stated_pid: int, ended: Callable[[], object]) -> ProcessEnd:
        return ProcessEnd(stated_pid, ended)

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        if self.is_broken:
            raise OSError(errno.ENOMEM, "no memory")

    def limit_queue(self, max_bytes: int) -> None: ...

    def read_now(self) -> None: ...

    def peer_has_closed(self) -> bool:
        return self.is_closed

    def finish(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True
