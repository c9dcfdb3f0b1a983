"""aiotensor over one `MessageQueue` each way, with one consumer; each message is a tensor."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import torch

from aiotensor.queues import MessageQueue
from bench.contenders.aiotensor_links import arena_bytes
from bench.contenders.base import Layout, Port, Sides


@asynccontextmanager
async def opened(
    outgoing: MessageQueue[torch.Tensor] | None, incoming: MessageQueue[torch.Tensor] | None
) -> AsyncIterator[Port]:
    port = Port()
    async with AsyncExitStack() as stack:
        if incoming is not None:
            port = Port(receive=(await stack.enter_async_context(incoming.consumer())).get)
        if outgoing is not None:
            producer = await stack.enter_async_context(outgoing.producer())
            port = Port(producer.put, port.receive, overlaps=True)
        yield port


def connect(layout: Layout) -> Sides[Port]:
    there, back = (
        MessageQueue(
            torch.Tensor,
            producers=producers,
            max_messages=layout.depth,
            arena_bytes=arena_bytes(layout),
            folder=layout.folder / name,
        )
        for name, producers in (("there", layout.peers), ("back", 1))
    )
    returns = back if layout.both_ways else None
    return [partial(opened, there, returns)] * layout.peers, partial(opened, returns, there)
