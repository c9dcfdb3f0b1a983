"""Rogue clients of a server, with an honest client beside them."""

import asyncio
from contextlib import AsyncExitStack

import zmq

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from verification import inside
from verification.descriptors import accepted_at
from verification.fuzz.living import Live
from verification.fuzz.notes import Note, ask_rightly, messages_at, respond
from verification.fuzz.observing import threads_started
from verification.fuzz.rogues import ask_as_client, heard_by_server
from verification.fuzz.steps import Conversation
from verification.internals import worker_of
from verification.patterns import BIG
from verification.processes import peers
from verification.waiting import until

_PATIENCE_S = 10  # for steps of milliseconds; a slower server hangs
_SERVING = "serving"
_MAX_WAITING = 32


class _Serving:
    """The server of the child, and its task that answers."""

    def __init__(self, server: MessageServer[Note], receiver: TensorReceiver) -> None:
        self.server = server
        self.receiver = receiver
        self.answers: set[asyncio.Task[None]] = set()
        self.taking = asyncio.create_task(self._take(), name="fuzz-taking")

    async def _take(self) -> None:
        async for request in self.server:
            task = asyncio.create_task(respond(request))
            self.answers.add(task)
            task.add_done_callback(self.answers.discard)
            del request, task

    def is_settled(self) -> bool:
        """Return whether the server holds nothing for any rogue."""
        server, now, received = self.server, self.server.statistics(), self.receiver.statistics()
        return (
            (now.clients, now.waiting, now.waiting_bytes, now.in_hand) == (1, 0, 0, 0)
            and (received.leases, received.unclaimed_tensors, received.waiting) == (0, 0, 0)
            and received.senders == 1
            and not (self.answers or inside.arriving(server) or inside.found(server) or inside.ready(server))
            and not inside.rejected(server)
            and len(accepted_at(self.server.address)) == 1
        )


async def _start(state: peers.State) -> None:
    receiver = await TensorReceiver(state.endpoint).__aenter__()
    server = MessageServer(
        messages_at(state.endpoint),
        Note,
        receiver=receiver,
        max_waiting=_MAX_WAITING,
        max_part_bytes=1 << 24,
        max_body_bytes=1 << 16,
    )
    await server.__aenter__()
    await threads_started(worker_of(receiver), inside.worker_of(server))
    state.receivers.append(receiver)
    state.others[_SERVING] = _Serving(server, receiver)


async def _settle(state: peers.State) -> int:
    """Wait until nothing is held for any rogue; return the number of messages so far."""
    serving: _Serving = state.others[_SERVING]
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await until(serving.is_settled)
    except TimeoutError:
        held = serving.server.statistics(), serving.receiver.statistics(), inside.arriving(serving.server)
        raise AssertionError(f"it holds something of rogues that are gone: {held}") from None
    return serving.server.statistics().messages_received


async def _stop(state: peers.State) -> None:
    serving: _Serving = state.others[_SERVING]
    await serving.server.aclose()
    await serving.taking


class LiveServer(Live):
    """A server, as seen by its clients."""

    _honest: MessageClient[Note]
    _asked = 0

    async def open(self) -> None:
        """Open the server, and connect an honest client to it."""
        await self.process.call(_start)
        self._stack = AsyncExitStack()
        sender = await self._stack.enter_async_context(TensorSender(self.address))
        honest = MessageClient(messages_at(self.address), sender=sender, reply_type=Note)
        self._honest = await self._stack.enter_async_context(honest)
        self._context = zmq.Context()
        self._stack.callback(self._context.destroy, linger=0)
        await ask_rightly(self._honest, 0, BIG)

    async def close(self) -> None:
        """Close the honest client, and the server."""
        await self._stack.aclose()
        await self.process.call(_stop)

    async def talk(self, said: Conversation) -> None:
        """Run a rogue's conversation while an honest client asks and receives an answer."""
        await asyncio.gather(ask_as_client(self._context, self.address, said), self._ask(), self._ask())
        await self._ask()

    async def _ask(self) -> None:
        self._asked += 1
        await ask_rightly(self._honest, self._asked, BIG if self._asked % 8 == 0 else 3, 3)

    async def settle(self) -> None:
        """Wait until all rogues are gone, and nothing is held for them."""
        await heard_by_server(self._context, self.address)
        self.outcomes["messages"] = await self.process.call(_settle)
        now = self._honest.statistics()
        assert (now.servers_lost, now.failures, now.in_flight) == (0, 0, (0,))
