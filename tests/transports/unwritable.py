"""A link that nothing can be written to."""

from aiotensor import TensorReceiver

__all__ = ["Unwritable"]


class Unwritable:
    """A link that the kernel refuses to write to, as it does where memory is short."""

    peer_pid = 0

    def __init__(self, receiver: TensorReceiver) -> None:
        self._events = receiver._incoming

    def write(self, data: bytes) -> None:
        self._events.link_lost(self, "writing failed")

    async def flush(self) -> None: ...

    def close(self) -> None: ...
