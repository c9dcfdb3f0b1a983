"""A contender: a module with the function `connect`, and one row in the table.

``connect(layout)`` returns the closed ends of a connection: a list of sides, as many as the layout requests,
and the single side that they connect to. The sides of the list send tensors to the single one; if the layout
requests it, both can send. If the contender carries messages, the sides of the list send requests, and the
single side answers them. If it carries publications, the single side sends to all sides of the list. If it
carries videos, the sides of the list are API servers, and the single side is their engine.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from bench.records import Cargo, Reply

if TYPE_CHECKING:  # reading the table of contenders must not import torch
    import torch

    from bench.messages import Message, Video

__all__ = [
    "AllocatingPort",
    "AnsweringPort",
    "AskingPort",
    "ConnectingPort",
    "Contender",
    "EnginePort",
    "Layout",
    "Port",
    "Request",
    "Side",
    "UploadPort",
    "UploadSlot",
    "VideoRequest",
]

P_co = TypeVar("P_co", covariant=True)


class Layout(NamedTuple):
    """The requirements on a connection.

    Attributes:
        peers: the processes on the side that has several: senders of tensors, or subscribers.
        depth: the tensors that may be in flight at once, for each peer; of videos, for all peers together.
        both_ways: whether the receiving side can send to the one sender too.
        largest: the size of the largest tensor in bytes.
        folder: a fresh folder for sockets, deleted afterwards.
        reply: the kind of answers to requests.
        device: the network interface of every process.
        peer_address: the address of that interface, for the sides of the list.
        single_address: the address of that interface, for the single side.
    """

    peers: int
    depth: int
    both_ways: bool
    largest: int
    folder: Path
    reply: Reply = "echo"
    device: str = "lo"
    peer_address: str = "127.0.0.1"
    single_address: str = "127.0.0.1"


class Port(Protocol):
    """An open end of a connection.

    The methods are coroutines, so that a workload is written once. A contender with blocking calls
    just blocks in them: nothing else runs in its process, and a coroutine that never suspends costs
    a fraction of a microsecond.
    """

    @property
    def overlaps(self) -> bool:
        """Whether several tasks may be in `send` at once."""

    async def send(self, tensor: "torch.Tensor") -> None: ...

    async def receive(self) -> "torch.Tensor": ...


@runtime_checkable
class ConnectingPort(Protocol):
    """A port that connects to the others once all of them are open."""

    async def connect(self, meet: Callable[[], Awaitable[None]]) -> None:
        """Connect; `meet` waits until all other processes wait, too."""


@runtime_checkable
class AllocatingPort(Port, Protocol):
    """A port that can also allocate tensors in the memory from which it sends."""

    async def allocate(self, size: int) -> "torch.Tensor": ...


class AskingPort(Protocol):
    """An open end that sends requests and waits for their answers; as in a `Port`, blocking calls block."""

    async def request(self, message: "Video") -> "Message": ...


class Request(Protocol):
    """A message that waits for its answer."""

    @property
    def message(self) -> "Video": ...

    async def reply(self, answer: "Message") -> object: ...


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

    async def reply(self, answer: int) -> None: ...


EnginePort: TypeAlias = AsyncIterator[VideoRequest]


class Side(Protocol[P_co]):
    """A closed end of a connection; it is pickled for the process that opens it."""

    def open(self) -> AbstractAsyncContextManager[P_co]: ...


@dataclass(frozen=True)
class Contender:
    """A row of the table.

    Attributes:
        name: how the command line and the results name it.
        module: the module with `connect`; imported only in the processes that measure it.
        what: a short description.
        uses_loop: whether it is driven by the event loop, and so is measured on more than one.
        is_limit: whether it only shows the speed of the machine, and is no alternative to aiotensor.
        alone: whether it is a single process, without a far side.
        drives_itself: whether its module has `near` and `far` in place of the workload's.
        in_quick: whether a quick run measures it too.
        needs: the modules that must be installed, and the names of their packages.
        group: the dependency group of this project that installs them.
        largest: the size of the largest tensor that it can carry, in bytes; None for any.
        lacks: the workloads in which it takes no part, with the reasons.
        carries: tensors one way, messages and their answers, publications to several readers, the videos of
            several API servers, or tensors from process to process.
        spans_hosts: whether its sides may be on two hosts.
    """

    name: str
    module: str
    what: str
    uses_loop: bool = False
    is_limit: bool = False
    alone: bool = False
    drives_itself: bool = False
    in_quick: bool = True
    needs: Mapping[str, str] = field(default_factory=dict)
    group: str = "bench-peers"
    largest: int | None = None
    lacks: Mapping[str, str] = field(default_factory=dict)
    carries: Cargo = "tensors"
    spans_hosts: bool = False
