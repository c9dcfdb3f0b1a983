"""aiotensor's senders and receivers, over each kind of address."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Literal, NamedTuple

import torch
import zmq

from aiotensor import TensorReceiver, TensorSender
from bench.contenders.base import Layout, Port, Sides
from verification.places import free_port


class Limits(NamedTuple):
    """The limits of a sender, and the key pair of all sides."""

    depth: int
    arena_bytes: int
    public_key: bytes | None = None
    secret_key: bytes | None = None


@asynccontextmanager
async def opened(outgoing: str | None, incoming: str | None, limits: Limits) -> AsyncIterator[Port]:
    port = Port()
    async with AsyncExitStack() as stack:
        if incoming is not None:
            keys = () if limits.public_key is None else [limits.public_key]
            receiver = TensorReceiver(incoming, secret_key=limits.secret_key, client_keys=keys)
            deliveries = aiter(await stack.enter_async_context(receiver))

            async def receive() -> torch.Tensor:
                return (await anext(deliveries)).tensor

            port = Port(receive=receive)
        if outgoing is not None:
            sender = TensorSender(
                outgoing,
                max_concurrent_videos=limits.depth,
                arena_bytes=limits.arena_bytes,
                secret_key=limits.secret_key,
                server_key=limits.public_key,
            )
            await stack.enter_async_context(sender)
            port = Port(
                sender.send, port.receive, lambda size: sender.allocate((size,), torch.uint8), overlaps=True
            )
        yield port


def arena_bytes(layout: Layout) -> int:
    """Return the default of the library for one sender, and less for several: the receiver bounds the sum."""
    return 1 << 30 if layout.peers == 1 or layout.both_ways else 64 << 20


def connect(layout: Layout, kind: Literal["unix", "tcp", "curve", "chain"] = "unix") -> Sides[Port]:
    keys = zmq.curve_keypair() if kind == "curve" else ()
    limits = Limits(layout.depth, arena_bytes(layout), *keys)
    local = kind in ("unix", "chain")

    def address(name: str) -> str:
        return f"unix://{layout.folder}/{name}.sock" if local else f"tcp://127.0.0.1:{free_port()}"

    if kind == "chain":
        names = [address(str(number)) for number in range(layout.peers + 1)]
        sources = [names[-1], *names[:-1]]
        near, *relays = (partial(opened, to, of, limits) for to, of in zip(names, sources, strict=True))
        return [*relays], near
    there, back = address("there"), address("back") if layout.both_ways else None
    return [partial(opened, there, back, limits)] * layout.peers, partial(opened, back, there, limits)
