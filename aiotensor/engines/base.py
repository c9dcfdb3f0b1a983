"""The interface of engines: one-sided writes into registered memory of one peer.

An engine is called by one thread at a time, and each call may block for milliseconds. An engine makes no
progress between calls: `poll` has to be called at both ends while a write is under way.
"""

from collections.abc import Hashable
from typing import Protocol

__all__ = ["Engine", "EngineError", "RegistrationError"]


class EngineError(Exception):
    """An engine cannot be used, or a call to it failed."""


class RegistrationError(EngineError):
    """Memory cannot be registered; the engine can still be used."""


class Engine(Protocol):
    """One end of a connection between two engines.

    Attributes:
        address: the address at which the engine of the peer reaches this one.
    """

    address: bytes

    def connect(self, address: bytes) -> None:
        """Set the address of the engine of the peer; to be called once.

        Raises:
            EngineError: the address is invalid, or cannot be reached from here.
        """

    def register(self, memory: memoryview) -> bytes:
        """Allow the peer to write to memory, and return the key for it.

        The engine refers to the memory until `unregister` or `close`.

        Raises:
            RegistrationError: the memory cannot be registered.
            EngineError: the engine has failed.
        """

    def unregister(self, key: bytes) -> None:
        """End a registration; the peer no longer writes to this memory.

        Raises:
            EngineError: unregistering failed.
        """

    def write(self, source: memoryview, key: bytes, start: int) -> Hashable:
        """Begin to write to memory of the peer, and return an object that `poll` returns at the end.

        A write cannot be cancelled: the engine reads the source, and refers to it, until the end of the
        write, or until `close`.

        Args:
            source: the bytes to write.
            key: the key of the memory, from `register` of the engine of the peer.
            start: the position of the first byte in this memory.

        Raises:
            RegistrationError: the source cannot be registered, so the write did not begin.
            EngineError: the engine has failed. Until `close`, bytes may be under way.
        """

    def poll(self) -> list[tuple[Hashable, str]]:
        """Make progress once, without waiting, and return the writes that have ended.

        Each one comes with an error or "". If a write has no error, the peer has all its bytes.
        """

    def close(self) -> None:
        """Close the engine, and stop all writes of both sides.

        Afterwards, no write reads or changes memory of this process. This never raises an error.
        """
