"""The common part of all transports of aiotensor: one sender and one receiver."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

import aiotensor
from aiotensor.transports.endpoints import Endpoint
from bench.contenders.base import Layout

__all__ = ["Keys", "LinkSide", "arena_bytes"]

_ARENA_BYTES = 1 << 30
_ARENA_BYTES_OF_MANY = 64 << 20


class LinkPort:
    overlaps = True

    def __init__(
        self, sender: aiotensor.TensorSender | None, receiver: aiotensor.TensorReceiver | None
    ) -> None:
        self._sender = sender
        self._deliveries = None if receiver is None else aiter(receiver)

    async def send(self, tensor: torch.Tensor) -> None:
        if self._sender is None:
            raise TypeError("this side only receives")
        await self._sender.send(tensor)

    async def allocate(self, size: int) -> torch.Tensor:
        if self._sender is None:
            raise TypeError("this side only receives")
        return await self._sender.allocate((size,), torch.uint8)

    async def receive(self) -> torch.Tensor:
        if self._deliveries is None:
            raise TypeError("this side only sends")
        return (await anext(self._deliveries)).tensor


class Keys(NamedTuple):
    """The key pair of all sides."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class LinkSide:
    """The endpoints that a process sends to and receives from, the limits of its sender, and its keys."""

    outgoing: Endpoint | None
    incoming: Endpoint | None
    depth: int
    arena_bytes: int
    keys: Keys | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[LinkPort]:
        public, secret = (None, None) if self.keys is None else self.keys
        async with AsyncExitStack() as stack:
            receiver = sender = None
            if self.incoming is not None:
                receiver = await stack.enter_async_context(
                    aiotensor.TensorReceiver(
                        self.incoming, secret_key=secret, client_keys=() if public is None else [public]
                    )
                )
            if self.outgoing is not None:
                sender = await stack.enter_async_context(
                    aiotensor.TensorSender(
                        self.outgoing,
                        max_concurrent_videos=self.depth,
                        arena_bytes=self.arena_bytes,
                        secret_key=secret,
                        server_key=public,
                    )
                )
            yield LinkPort(sender, receiver)


def arena_bytes(layout: Layout) -> int:
    """Return the default of the library for one sender, and less for several: the receiver bounds the sum."""
    return _ARENA_BYTES if layout.peers == 1 else _ARENA_BYTES_OF_MANY
