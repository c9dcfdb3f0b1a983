"""Rogue servers for a client, each followed by an honest server."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from verification import inside
from verification.fuzz.living import Live
from verification.fuzz.notes import Note, ask_rightly, messages_at, respond, work
from verification.fuzz.observing import Figures, threads_started
from verification.fuzz.rogues import answer_as_server, rogue_server
from verification.fuzz.steps import Conversation
from verification.internals import worker_of
from verification.patterns import BIG
from verification.processes import peers
from verification.waiting import until

_PATIENCE_S = 10  # for steps of milliseconds; a slower client hangs
_CLIENT = "client"


def _back(address: str) -> str:
    """Return the address where the client receives."""
    return f"{address}-back"


async def _start(state: peers.State) -> None:
    sender = await TensorSender(state.endpoint, 4, 16 << 20).__aenter__()
    receiver = await TensorReceiver(_back(str(state.endpoint))).__aenter__()
    state.senders.append(sender)
    state.receivers.append(receiver)
    client = MessageClient(messages_at(state.endpoint), sender=sender, receiver=receiver, reply_type=Note)
    state.others[_CLIENT] = await client.__aenter__()
    await threads_started(worker_of(sender), worker_of(receiver), inside.worker_of(client))


async def _work(state: peers.State) -> Counter[str]:
    return await work(state.others[_CLIENT])


async def _check(state: peers.State) -> None:
    """Send requests to an honest server, and check that the client then holds nothing."""
    client: MessageClient[Note] = state.others[_CLIENT]
    await ask_rightly(client, 7, 3, BIG)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await until(lambda: _is_settled(state, client))
    except TimeoutError:
        held = client.statistics(), state.sender.statistics(), state.receiver.statistics()
        raise AssertionError(f"it holds something of a server that is gone: {held}") from None


def _is_settled(state: peers.State, client: MessageClient[Note]) -> bool:
    sent, received = state.sender.statistics(), state.receiver.statistics()
    return (
        not any(client.statistics().in_flight)
        and not inside.waiters_for_server(client)
        and (sent.in_flight, sent.bytes_in_use, sent.waiting) == (0, 0, 0)
        and (received.leases, received.unclaimed_tensors, received.waiting) == (0, 0, 0)
    )


async def _stop(state: peers.State) -> None:
    await state.others[_CLIENT].aclose()


class LiveClient(Live):
    """A client, as seen by its servers."""

    async def open(self) -> None:
        """Open the client."""
        await self.process.call(_start)

    async def close(self) -> None:
        """Close the client."""
        await self.process.call(_stop)

    async def talk(self, said: Conversation) -> None:
        """Run a rogue server for a client in use, and check that the next server serves it."""
        # Also for a rogue: the tensors of one-way messages are released when their receiver disconnects.
        async with TensorReceiver(self.address), rogue_server(self.address) as sock:
            working = self.process.start(_work)
            await answer_as_server(sock, _back(self.address), said)
        async with self._honest_server():
            self.outcomes += await working
            await self.process.call(_check)

    async def settle(self) -> None:
        """Check that an honest server serves the client, and that nothing is held for rogues."""
        await self.process.call(_check)

    async def look(self) -> Figures:
        """Measure with a connection, as in every measurement."""
        async with self._honest_server():
            return await super().look()

    @asynccontextmanager
    async def _honest_server(self) -> AsyncIterator[None]:
        async with (
            TensorReceiver(self.address) as receiver,
            MessageServer(messages_at(self.address), Note, receiver=receiver) as server,
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
