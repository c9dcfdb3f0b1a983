"""Rogue clients of a server in a separate process, with an honest client beside them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.transports.endpoints import Endpoint
from verification import inside
from verification.descriptors import accepted_at
from verification.fuzz.children import child_process
from verification.fuzz.engine import Figures, Troubles, figures, threads_started
from verification.fuzz.notes import Note, ask_rightly, messages_at, respond
from verification.fuzz.rogues import ask_as_client, heard_by_server
from verification.fuzz.steps import Conversation
from verification.internals import worker_of
from verification.patterns import BIG
from verification.processes import peers
from verification.waiting import until

__all__ = ["LiveServer", "live_server"]

_PATIENCE_S = 20  # for steps of milliseconds; a slower server hangs
_MAX_WAITING = 32


class _Serving:
    """The server of the child, and its task that answers."""

    def __init__(self, server: MessageServer[Note], receiver: TensorReceiver) -> None:
        self.server = server
        self.receiver = receiver
        self.troubles = Troubles()
        self.troubles.watch()
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


_serving: list[_Serving] = []  # of the child


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
    _serving.append(_Serving(server, receiver))


async def _settle(state: peers.State) -> Figures:
    serving = _serving[-1]
    try:
        async with asyncio.timeout(_PATIENCE_S / 2):
            await until(serving.is_settled)
    except TimeoutError:
        held = serving.server.statistics(), serving.receiver.statistics(), inside.arriving(serving.server)
        raise AssertionError(f"it holds something of rogues that are gone: {held}") from None
    return figures()


async def _look(state: peers.State) -> tuple[list[str], int, int]:
    troubles = _serving[-1].troubles
    return troubles.found, troubles.cut_off, _serving[-1].server.statistics().messages_received


async def _stop(state: peers.State) -> None:
    await _serving[-1].server.aclose()
    await _serving[-1].taking
    _serving[-1].troubles.leave()


class LiveServer:
    """A server, as seen by its clients."""

    def __init__(self, endpoint: Endpoint, child: peers.Peer, honest: MessageClient[Note]) -> None:
        self.conversations = self.honest_answers = self.cut_off = self.heard = 0
        self.context = zmq.Context()
        self._endpoint = endpoint
        self._child = child
        self._honest = honest

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue's conversation while an honest client asks and receives an answer."""
        async with asyncio.timeout(_PATIENCE_S):
            self.conversations += 1
            await asyncio.gather(
                ask_as_client(self.context, self._endpoint, conversation), self._ask(), self._ask()
            )
            await self._ask()

    async def _ask(self) -> None:
        self.honest_answers += 1
        size = BIG if self.honest_answers % 8 == 0 else 3
        await ask_rightly(self._honest, self.honest_answers, size, 3)

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return (
            f"{self.cut_off} clients cut off, {self.honest_answers} honest questions in between, "
            f"{self.heard} questions came"
        )

    async def look(self) -> Figures:
        """Wait until all rogues are gone, check for errors, and measure the held resources."""
        async with asyncio.timeout(_PATIENCE_S):
            await heard_by_server(self.context, self._endpoint)
            held = await self._child.call(_settle)
            troubles, self.cut_off, self.heard = await self._child.call(_look)
        assert not troubles, "\n".join(troubles)
        now = self._honest.statistics()
        assert (now.servers_lost, now.failures, now.in_flight) == (0, 0, (0,))
        return held


@asynccontextmanager
async def live_server(endpoint: Endpoint, *, uvloop: bool) -> AsyncIterator[LiveServer]:
    """Start a server in a separate process, and connect an honest client to it."""
    async with child_process(endpoint, uvloop=uvloop) as child:
        await child.call(_start)
        async with (
            TensorSender(endpoint) as sender,
            MessageClient(messages_at(endpoint), sender=sender, reply_type=Note) as honest,
        ):
            await ask_rightly(honest, 0, BIG)
            live = LiveServer(endpoint, child, honest)
            try:
                yield live
            finally:
                live.context.destroy(linger=0)
        await child.call(_stop)
