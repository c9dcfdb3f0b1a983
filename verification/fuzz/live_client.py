"""Rogue servers for a client in a separate process, each followed by an honest server."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.transports.endpoints import Endpoint
from verification import inside
from verification.fuzz.children import child_process, look, stop_watching, watch
from verification.fuzz.engine import Figures, listed, threads_started
from verification.fuzz.notes import Note, ask_rightly, messages_at, respond, work
from verification.fuzz.rogues import answer_as_server, rogue_server
from verification.fuzz.steps import Conversation
from verification.internals import worker_of
from verification.patterns import BIG
from verification.processes import peers
from verification.waiting import until

__all__ = ["LiveClient", "live_client"]

_PATIENCE_S = 20  # for steps of milliseconds; a slower client hangs

_clients: list[MessageClient[Note]] = []


def _back(endpoint: Endpoint) -> Endpoint:
    """Return the address where the client receives."""
    return f"{endpoint}-back"


async def _start(state: peers.State) -> None:
    await watch(state)
    sender = await TensorSender(state.endpoint, 4, 16 << 20).__aenter__()
    receiver = await TensorReceiver(_back(state.endpoint)).__aenter__()
    state.senders.append(sender)
    state.receivers.append(receiver)
    client = MessageClient(messages_at(state.endpoint), sender=sender, receiver=receiver, reply_type=Note)
    _clients.append(await client.__aenter__())
    await threads_started(worker_of(sender), worker_of(receiver), inside.worker_of(client))


async def _work(state: peers.State) -> Counter[str]:
    return await work(_clients[-1])


async def _check(state: peers.State) -> None:
    """Send requests to an honest server, and check that the client then holds nothing."""
    client = _clients[-1]
    await ask_rightly(client, 7, 3, BIG)
    try:
        async with asyncio.timeout(_PATIENCE_S / 2):
            await until(lambda: _is_settled(state))
    except TimeoutError:
        held = client.statistics(), state.sender.statistics(), state.receiver.statistics()
        raise AssertionError(f"it holds something of a server that is gone: {held}") from None


def _is_settled(state: peers.State) -> bool:
    client, sent, received = _clients[-1], state.sender.statistics(), state.receiver.statistics()
    return (
        not any(client.statistics().in_flight)
        and not inside.waiters_for_server(client)
        and (sent.in_flight, sent.bytes_in_use, sent.waiting) == (0, 0, 0)
        and (received.leases, received.unclaimed_tensors, received.waiting) == (0, 0, 0)
    )


async def _stop(state: peers.State) -> None:
    await _clients[-1].aclose()
    await stop_watching(state)


class LiveClient:
    """A client, as seen by its servers."""

    def __init__(self, endpoint: Endpoint, child: peers.Peer) -> None:
        self.conversations = self.cut_off = 0
        self.outcomes: Counter[str] = Counter()
        self._endpoint = endpoint
        self._child = child

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue server for a client in use, and check that the next server serves it."""
        async with asyncio.timeout(_PATIENCE_S):
            # Also for a rogue: the tensors of one-way messages are released when their receiver disconnects.
            async with TensorReceiver(self._endpoint), rogue_server(self._endpoint) as sock:
                working = self._child.start(_work)
                await answer_as_server(sock, _back(self._endpoint), conversation)
            self.conversations += 1
            async with self._honest_server():
                self.outcomes += await working
                await self._child.call(_check)

    async def look(self) -> Figures:
        """Check for errors, and measure the held resources."""
        async with asyncio.timeout(_PATIENCE_S), self._honest_server():
            await self._child.call(_check)  # with a connection, as in every measurement
            seen = await self._child.call(look)
        assert not seen.troubles, "\n".join(seen.troubles)
        self.cut_off = seen.cut_off
        return seen.figures

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        outcomes = listed(self.outcomes)
        return f"{self.cut_off} servers cut off; requests to rogues and their successors: {outcomes}"

    @asynccontextmanager
    async def _honest_server(self) -> AsyncIterator[None]:
        async with (
            TensorReceiver(self._endpoint) as receiver,
            MessageServer(messages_at(self._endpoint), Note, receiver=receiver) as server,
        ):
            serving = asyncio.create_task(_serve(server))
            try:
                yield
            finally:
                await server.aclose()
                await serving


async def _serve(server: MessageServer[Note]) -> None:
    async for request in server:
        await respond(request)
        del request


@asynccontextmanager
async def live_client(endpoint: Endpoint, *, uvloop: bool) -> AsyncIterator[LiveClient]:
    """Start a client in a separate process."""
    async with child_process(endpoint, uvloop=uvloop) as child:
        await child.call(_start)
        yield LiveClient(endpoint, child)
        await child.call(_stop)
