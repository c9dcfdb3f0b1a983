"""Clients and servers that write arbitrary frames, over the transports of the library."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from aiotensor.protocol.frames import INLINE, Content, Frame, Message, PlacedTensor, encode
from aiotensor.transports.base import Transport
from aiotensor.transports.endpoints import Endpoint, route_to
from tests.frames import receiver_hello
from tests.rogues import RogueReceiver, RogueSender
from verification.waiting import until


def message(number: int, content: object, tensors: Sequence[PlacedTensor] = (), **changes: Any) -> Message:
    """Announce a message whose body is some content, or these bytes as they are, with some fields changed."""
    body = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    payload = msgspec.msgpack.encode(Content(memoryview(body), tuple(tensors)))
    fields: dict[str, Any] = {"payload": payload, "nbytes": len(payload), **changes}
    return Message(**{"message": number, "placement": INLINE, **fields})


async def heard(rogue: RogueSender | RogueReceiver, kind: type[Frame]) -> list[Any]:
    """Wait until a rogue has received frames of a kind, and return them."""
    await until(lambda: any(isinstance(frame, kind) for frame in rogue.received))
    return [frame for frame in rogue.received if isinstance(frame, kind)]


@asynccontextmanager
async def rogue_client(
    endpoint: Endpoint, *, reads: bool = True, **changes: object
) -> AsyncIterator[RogueSender]:
    """Connect a client with a hello in which some fields are changed."""
    rogue = RogueSender(endpoint, reads=reads)
    await rogue.connect(encode(rogue.hello(**{"role": "client", "max_messages": 100, **changes})))
    try:
        yield rogue
    finally:
        rogue.close()


class RogueServer(RogueReceiver):
    """A server that admits one client, and then writes arbitrary records.

    Args:
        changes: the fields of its hello that differ from that of a usual server.
    """

    def __init__(self, changes: dict[str, Any]) -> None:
        super().__init__()
        usual = {"role": "server", "pid": os.getpid(), "max_messages": 1 << 60, "max_waiting": 64}
        self._hello = receiver_hello(**{**usual, **changes})

    def connection_accepted(self, transport: Transport) -> None:
        self._transport = transport
        transport.start(self)
        self.write(self._hello)

    def close(self) -> None:
        """Close the connection without a last frame."""
        if self._transport is not None:
            self._transport.close()


@asynccontextmanager
async def rogue_server(endpoint: Endpoint, **changes: object) -> AsyncIterator[RogueServer]:
    """Listen for one client, with a hello in which some fields are changed."""
    rogue = RogueServer(changes)
    listener = await route_to(endpoint).listen(rogue.connection_accepted)
    try:
        yield rogue
    finally:
        listener.close()
        rogue.close()
