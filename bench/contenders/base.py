"""What a contender is: a module with a function `pair` that makes the two sides of a connection."""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # the table of contenders is read without waiting for torch
    import torch

__all__ = ["Contender", "Port", "Side"]


class Port(Protocol):
    """An open end of a connection.

    The methods are coroutines, so that a workload is written once. A contender with blocking calls
    just blocks in them: nothing else runs in its process, and a coroutine that never suspends costs
    a fraction of a microsecond.
    """

    async def send(self, tensor: "torch.Tensor") -> None: ...

    async def receive(self) -> "torch.Tensor": ...


class Side(Protocol):
    """A closed end of a connection, picklable into a spawned process, where it is opened."""

    def open(self) -> AbstractAsyncContextManager[Port]: ...


class Contender(NamedTuple):
    """A row of the table: the module has `pair() -> tuple[Side, Side]`, near and far."""

    name: str
    module: str
    what: str
