"""The connections of a rogue to a receiver, of which one is used and the others stay open."""

from typing import Generic, Protocol, TypeVar

__all__ = ["Connections"]


class _Closable(Protocol):
    def close(self) -> None: ...


S = TypeVar("S", bound=_Closable)


class Connections(Generic[S]):
    """The sockets of a rogue."""

    def __init__(self) -> None:
        self.current: S | None = None
        self.beside: list[S] = []

    def leave(self) -> None:
        """Close the current one."""
        if self.current is not None:
            self.current.close()
            self.current = None

    def close(self) -> None:
        """Close all."""
        self.leave()
        while self.beside:
            self.beside.pop().close()
