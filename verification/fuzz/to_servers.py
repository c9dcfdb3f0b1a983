"""Rogue clients of a server, with an honest client beside them."""

import asyncio
from collections import Counter

import torch

from aiotensor import TooLargeError
from aiotensor.channel import MessageClient, MessageServer, Request
from verification import inside
from verification.fuzz.living import TROUBLES, Live
from verification.fuzz.notes import FIRST_HONEST, LAST_HONEST, Note, answer_to, ask_rightly
from verification.fuzz.observing import in_memory, threads_started
from verification.fuzz.speaking import connecting_to, converse, heard_by
from verification.fuzz.steps import Conversation
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

_PATIENCE_S = 10  # for steps of milliseconds; a slower server hangs
_SERVING = "serving"
_MAX_WAITING = 32


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
        server = self.server
        others = {
            "rogues": server.statistics().clients - 1,
            "tasks": len(self._answers),
            "unidentified": inside.unidentified_at(server),
        }
        return {name: count for name, count in (inside.held_by_server(server) | others).items() if count}


async def _start(state: peers.State) -> None:
    server = MessageServer(state.endpoint, Note, max_waiting=_MAX_WAITING, max_body_bytes=1 << 16)
    await server.__aenter__()
    await threads_started(*inside.workers_of(server))
    state.others[_SERVING] = _Serving(state, server)


async def _settle(state: peers.State) -> Counter[str]:
    """Wait until nothing is held for any rogue."""
    serving: _Serving = state.others[_SERVING]
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await until(lambda: not serving.held())
    except TimeoutError:
        raise AssertionError(f"held for rogues that are gone: {serving.held()}") from None
    assert not serving.taking.done(), serving.taking
    return serving.seen


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
        """Wait until all rogues are gone, and nothing is held for them."""
        await heard_by(self.address, self.things)
        self.outcomes = await self.process.call(_settle)
        now = self._honest.statistics()
        assert (now.servers_lost, now.failures, now.in_flight) == (0, 0, 0)
