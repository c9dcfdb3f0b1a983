"""A contender: a module with the function `connect`, and one row in the table.

``connect(layout, **options)`` returns the closed ends of a connection: a list of sides, as many as the layout
requests, and the single side that they connect to. The sides of the list send tensors to the single one; if
the layout requests it, both can send. In requests, the sides of the list ask, and the single side answers. In
broadcasts, the single side sends to all sides of the list. In a chain, each side sends to the next one. With
videos, the sides of the list are API servers, and the single side is their engine.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:  # reading the table of contenders must not import torch
    import torch

    from bench.messages import Message

P = TypeVar("P")

# A closed end of a connection; it is pickled for the process that opens it.
Side: TypeAlias = Callable[[], AbstractAsyncContextManager[P]]
Sides: TypeAlias = tuple[list[Side[P]], Side[P]]

Meet: TypeAlias = Callable[[], Awaitable[None]]


class Layout(NamedTuple):
    """The requirements on a connection.

    Attributes:
        peers: the processes on the side that has several: senders of tensors, or subscribers.
        depth: the tensors that may be in flight at once, for each peer; of videos, for all peers together.
        both_ways: whether the single side can send, too.
        broadcasts: whether only the single side sends.
        largest: the size of the largest tensor in bytes.
        folder: a fresh folder for sockets, deleted afterwards.
        device: the network interface of every process.
        peer_address: the address of that interface, for the sides of the list.
        single_address: the address of that interface, for the single side.
    """

    peers: int
    depth: int
    both_ways: bool
    broadcasts: bool
    largest: int
    folder: Path
    device: str = "lo"
    peer_address: str = "127.0.0.1"
    single_address: str = "127.0.0.1"


async def _nothing(*arguments: object) -> NoReturn:
    raise TypeError("this side cannot do this")


@dataclass(frozen=True)
class Port:
    """An open end of a connection.

    The functions are coroutines, so that a workload is written once. A contender with blocking calls
    just blocks in them: nothing else runs in its process, and a coroutine that never suspends costs
    a fraction of a microsecond.

    Attributes:
        send: sends a tensor.
        receive: waits for a tensor.
        allocate: returns a tensor of a number of bytes in the memory from which the contender sends.
        overlaps: whether several tasks may be in `send` at once.
        connect: connects to the other ports, once all of them are open; its argument waits until all other
            processes wait, too.
    """

    send: "Callable[[torch.Tensor], Awaitable[object]]" = _nothing
    receive: "Callable[[], Awaitable[torch.Tensor]]" = _nothing
    allocate: "Callable[[int], Awaitable[torch.Tensor]]" = _nothing
    overlaps: bool = False
    connect: Callable[[Meet], Awaitable[None]] | None = None


class AskingPort(Protocol):
    """An open end that sends requests and waits for their answers; as in a `Port`, blocking calls block."""

    async def request(self, message: "Message") -> "Message": ...


class Request(Protocol):
    """A message that waits for its answer."""

    @property
    def message(self) -> "Message": ...

    async def answer(self, answer: "Message") -> object: ...


AnsweringPort: TypeAlias = AsyncIterator[Request]


class UploadSlot(Protocol):
    """The permit of one request in an API server."""

    async def allocate(self, shape: Sequence[int]) -> "torch.Tensor":
        """Return memory to decode into."""

    async def request(self, frames: "torch.Tensor") -> int:
        """Send the frames to the engine, free them, and return its answer."""


class UploadPort(Protocol):
    """The end of an API server, which many tasks use at once."""

    def slot(self) -> AbstractAsyncContextManager[UploadSlot]:
        """Wait for a permit; it is free again when the engine has taken the frames, or has answered."""


class VideoRequest(Protocol):
    """Frames that have arrived at the engine."""

    @property
    def frames(self) -> "torch.Tensor": ...

    async def answer(self, answer: int) -> None: ...


EnginePort: TypeAlias = AsyncIterator[VideoRequest]


@dataclass(frozen=True)
class Contender:
    """A row of the table.

    Attributes:
        name: how the command line and the results name it.
        file: the module with `connect`; imported only in the processes that measure it.
        what: a short description.
        options: further arguments of `connect`.
        is_limit: whether it only shows the speed of the machine, and is no alternative to aiotensor.
        alone: whether it is a single process, without a far side.
        drives_itself: whether its module has `near` and `far` in place of the workload's.
        in_quick: whether a quick run measures it too.
        needs: a module that the dependency group `bench-peers` installs; None if none is missing without it.
        largest: the size of the largest tensor that it can carry, in bytes; None for any.
    """

    name: str
    file: str
    what: str
    options: Mapping[str, object] = field(default_factory=dict)
    is_limit: bool = False
    alone: bool = False
    drives_itself: bool = False
    in_quick: bool = True
    needs: str | None = None
    largest: int | None = None

    @property
    def module(self) -> str:
        return f"bench.contenders.{self.file}"
