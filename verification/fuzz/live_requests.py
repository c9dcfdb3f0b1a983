"""Rogue clients of a server with an honest client beside them, and rogue servers for clients.

Each rogue server is followed by an honest one; every call of the clients must end.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import torch

from aiotensor import PeerLostError, ProtocolError, RefusedError, RemoteError, TooLargeError, UsageError
from aiotensor.channel import MessageClient, MessageServer, Request
from verification import inside
from verification.fuzz.living import TROUBLES, Live, LiveConnector, count_end, released
from verification.fuzz.notes import FIRST_HONEST, LAST_HONEST, Note, answer_to, ask_rightly
from verification.fuzz.observing import in_memory, threads_started
from verification.fuzz.speaking import connecting_to, converse
from verification.fuzz.steps import Conversation
from verification.patterns import BIG, pattern
from verification.processes import peers

_CLIENT = "client"

# The errors of requests to a rogue.
_ENDS = (RemoteError, PeerLostError, RefusedError, ProtocolError, TooLargeError, UsageError)

_SERVING = "serving"
_MAX_WAITING = 32


# The server.


class _Serving:
    """The server of the child, and its tasks that answer."""

    def __init__(self, state: peers.State, server: MessageServer[Note]) -> None:
        self.server = server
        self.seen: Counter[str] = Counter()
        self._answers: set[asyncio.Task[None]] = set()
        self._troubles = state.others[TROUBLES]
        self.taking = asyncio.create_task(self._take(), name="fuzz-taking")

    async def _take(self) -> None:
        async for request in self.server:
            task = asyncio.create_task(self._respond(request))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)
            del request, task

    async def _respond(self, request: Request[Note]) -> None:
        async with request:
            note = request.message
            is_honest = FIRST_HONEST <= note.number <= LAST_HONEST
            if not is_honest:
                self.seen["requests of rogues"] += 1
                for tensor in note.tensors:
                    self.seen["tensors in shared memory"] += in_memory(tensor.detach(), self._troubles)
            for index, tensor in enumerate(note.tensors if is_honest else ()):
                if not torch.equal(tensor, pattern(note.number - FIRST_HONEST + index, tensor.numel())):
                    self._troubles.found.append(f"an honest tensor is not what was sent: {tensor[:9]}")
            try:
                self.seen["answers to rogues"] += await request.answer(answer_to(note))
            except TooLargeError as error:  # a rogue client accepts only a few bytes
                await request.fail(error)

    def held(self) -> dict[str, int]:
        """Count what is held for rogues, while the honest client does nothing."""
        rogues, unidentified = self.server.statistics().clients - 1, inside.unidentified_at(self.server)
        others = {"rogues": rogues, "tasks": len(self._answers), "unidentified": unidentified}
        return inside.held_by_server(self.server) | others


async def _start(state: peers.State) -> None:
    server = MessageServer(state.endpoint, Note, max_waiting=_MAX_WAITING, max_body_bytes=1 << 16)
    await server.__aenter__()
    await threads_started(*inside.workers_of(server))
    state.others[_SERVING] = _Serving(state, server)


async def _settle(state: peers.State) -> Counter[str]:
    """Wait until nothing is held for any rogue."""
    serving: _Serving = state.others[_SERVING]
    await released(serving.held)
    assert not serving.taking.done(), serving.taking
    return serving.seen


async def _stop(state: peers.State) -> None:
    serving: _Serving = state.others[_SERVING]
    await serving.server.aclose()
    await serving.taking


class LiveServer(Live):
    """A server, as seen by its clients."""

    settled = staticmethod(_settle)
    _honest: MessageClient[Note]
    _asked = 0

    async def open(self) -> None:
        """Open the server, and connect an honest client to it."""
        await self.process.call(_start)
        self._honest = await MessageClient(self.address, Note).__aenter__()
        await self._ask(BIG)

    async def close(self) -> None:
        """Close the honest client, and the server."""
        await self._honest.aclose()
        await self.process.call(_stop)

    async def talk(self, said: Conversation) -> None:
        """Run a rogue's conversation while an honest client asks and receives an answer."""
        with connecting_to(self.address, self.things) as connect:
            await asyncio.gather(converse(connect, said), self._ask(3), self._ask(3000))
        await self._ask(BIG if self.conversations % 8 == 0 else 3)

    async def _ask(self, size: int) -> None:
        self._asked += 1
        await ask_rightly(self._honest, self._asked, size, 3)

    async def settle(self) -> None:
        """Check also that the honest client has lost nothing."""
        await super().settle()
        now = self._honest.statistics()
        assert (now.servers_lost, now.failures, now.in_flight) == (0, 0, 0)


# The clients.


async def _open(state: peers.State) -> None:
    client = MessageClient(state.endpoint, Note, 4, 16 << 20, max_body_bytes=1 << 16)
    state.others[_CLIENT] = await client.__aenter__()


async def _work(state: peers.State) -> Counter[str]:
    """Ask in every way, and count the outcomes; raise errors that no peer may cause."""
    client: MessageClient[Note] = state.others[_CLIENT]
    outcomes: Counter[str] = Counter()

    async def asked(note: Note, *, idempotent: bool = False) -> None:
        answer = await client.request(note, idempotent=idempotent)
        for tensor in answer.tensors if answer.number != answer_to(note).number else ():  # of the rogue
            outcomes["tensors in shared memory"] += in_memory(tensor.detach(), state.others[TROUBLES])

    async def allocated() -> None:
        async with client.permit() as permit:
            tensor = (await permit.allocate((BIG,), torch.int64)).copy_(pattern(5, BIG))
            await client.request(Note(4, [tensor, pattern(6, 3000)]), inside=permit)

    async def given_up() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.005):
                await asked(Note(5, [pattern(7, 3000)]))

    plain = [asked(Note(1, [pattern(1, count)])) for count in (3, 3000)]
    one_way = client.send(Note(3, [pattern(4, 3000)]))
    big = asked(Note(2, [pattern(2, BIG), pattern(3, 3)]), idempotent=True)
    calls = (*plain, big, allocated(), given_up(), one_way)
    await asyncio.gather(*(count_end(outcomes, call, *_ENDS) for call in calls))
    return outcomes


async def _check(state: peers.State) -> None:
    """Send requests to an honest server, and check that the client then holds nothing."""
    client: MessageClient[Note] = state.others[_CLIENT]
    while True:
        try:
            await ask_rightly(client, 7, 3, BIG)
            break
        except (TooLargeError, PeerLostError):  # of a rogue, whose end the client has not noticed yet
            await asyncio.sleep(0.01)
    await released(lambda: inside.held_by_client(client))
    await client.aclose()
    assert not client.statistics().holders


class LiveClient(LiveConnector):
    """Clients, as seen by their servers."""

    begin = staticmethod(_open)
    work = staticmethod(_work)

    @contextlib.asynccontextmanager
    async def honest(self) -> AsyncIterator[None]:
        """Answer every request."""

        async def respond(note: Note) -> Note:
            return answer_to(note)

        async with MessageServer(self.address, Note) as server:
            serving = asyncio.create_task(server.serve(respond))
            yield
            await server.aclose()
            await serving

    async def finish(self) -> None:
        """Ask the honest server, and check that everything is back."""
        await self.process.call(_check)
