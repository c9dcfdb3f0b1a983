"""Pairs of a sender and a receiver in two processes, in the same way for every kind of connection."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from aiotensor import TensorHandle, TensorReceiver, TensorSender, WouldBlockError
from aiotensor.transports.endpoints import Endpoint
from verification.patterns import pattern
from verification.places import LINKS
from verification.processes import peers
from verification.processes.peers import Peer
from verification.waiting import settled

_FILLING = 1000  # elements of each tensor that fills a connection: it fits into a frame


class NearSender(NamedTuple):
    """A sender here; `engine` is the process of its receiver."""

    sender: TensorSender
    engine: Peer


class NearReceiver(NamedTuple):
    """A receiver here; `api` is the process of its sender, whose id is `name`."""

    receiver: TensorReceiver
    api: Peer
    name: str


class Clogged(NamedTuple):
    """A sender here, and its handles until the connection was full; `engine` is stopped."""

    sender: TensorSender
    engine: Peer
    handles: list[TensorHandle]


@dataclass(frozen=True)
class PairMaker:
    """Make pairs at one endpoint.

    Attributes:
        endpoint: the endpoint of both; no other test uses it.
    """

    endpoint: Endpoint

    @asynccontextmanager
    async def near_sender(
        self, max_concurrent_videos: int = 8, arena_bytes: int = 1 << 30
    ) -> AsyncIterator[NearSender]:
        """Open a sender here and its receiver in another process."""
        async with (
            peers.peers(self.endpoint, 1) as [engine],
            TensorSender(self.endpoint, max_concurrent_videos, arena_bytes) as sender,
        ):
            await engine.call(peers.open_receiver)
            # Both have received frames of each other, so the handshake is complete.
            assert await engine.call(peers.receive_pattern, await sender.send(pattern(0, 1)), 0)
            await settled(sender)
            yield NearSender(sender, engine)

    @asynccontextmanager
    async def near_receiver(
        self, max_concurrent_videos: int = 8, arena_bytes: int = 1 << 30
    ) -> AsyncIterator[NearReceiver]:
        """Open a receiver here and its sender in another process."""
        async with (
            peers.peers(self.endpoint, 1) as [api],
            TensorReceiver(self.endpoint) as receiver,
        ):
            name = await api.call(peers.open_sender, max_concurrent_videos, arena_bytes)
            yield NearReceiver(receiver, api, name)

    @asynccontextmanager
    async def clogged(
        self, max_concurrent_videos: int = 1000, arena_bytes: int = 1 << 30
    ) -> AsyncIterator[Clogged]:
        """Open a sender here whose receiver's process is stopped, and fill the connection between them."""
        async with (
            self.near_sender(max_concurrent_videos, arena_bytes) as (sender, engine),
            stopped(sender, engine) as handles,
        ):
            yield Clogged(sender, engine, handles)


@contextmanager
def pairs_over(link: str) -> Iterator[PairMaker]:
    """Create an endpoint for pairs, and check at the end that no file of it is left."""
    with LINKS[link].place() as place:
        yield PairMaker(place.endpoint)
        assert len(place.names()) <= 1  # the socket of a receiver that was killed


@asynccontextmanager
async def stopped(sender: TensorSender, engine: Peer) -> AsyncIterator[list[TensorHandle]]:
    """Stop the process of a receiver, and fill the connection to it."""
    await engine.stop()
    try:
        yield _fill(sender)
    finally:
        engine.go_on()  # a closing sender waits until its last record is written


def _fill(sender: TensorSender) -> list[TensorHandle]:
    """Send until the connection is full; the tensor of each handle is `pattern` of its index in the list."""
    handles: list[TensorHandle] = []
    try:
        while True:
            handles.append(sender.send_nowait(pattern(len(handles), _FILLING)))
    except WouldBlockError as error:
        assert "slow to read" in str(error)  # noqa: PT017
    return handles
