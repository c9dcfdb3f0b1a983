"""Rogue servers for clients, each followed by an honest one; every call of the clients must end."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable

import torch

from aiotensor import PeerLostError, ProtocolError, RefusedError, RemoteError, TooLargeError, UsageError
from aiotensor.channel import MessageClient, MessageServer
from verification import inside
from verification.fuzz.living import TROUBLES, LiveConnector
from verification.fuzz.notes import Note, answer_to, ask_rightly
from verification.fuzz.observing import in_memory
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

_CLIENT = "client"
_PATIENCE_S = 10  # for steps of milliseconds; a slower client hangs

# The errors of requests to a rogue.
_ENDS = (RemoteError, PeerLostError, RefusedError, ProtocolError, TooLargeError, UsageError)


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

    async def ends(asking: Awaitable[object]) -> None:
        try:
            await asking
        except _ENDS as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["ended"] += 1

    plain = [asked(Note(1, [pattern(1, count)])) for count in (3, 3000)]
    one_way = client.send(Note(3, [pattern(4, 3000)]))
    big = asked(Note(2, [pattern(2, BIG), pattern(3, 3)]), idempotent=True)
    await asyncio.gather(*map(ends, (*plain, big, allocated(), given_up(), one_way)))
    return outcomes


async def _check(state: peers.State) -> None:
    """Send requests to an honest server, and check that the client then holds nothing."""
    client: MessageClient[Note] = state.others[_CLIENT]
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                try:
                    await ask_rightly(client, 7, 3, BIG)
                    break
                except (TooLargeError, PeerLostError):  # of a rogue, whose end the client has not noticed yet
                    await asyncio.sleep(0.01)
            await until(lambda: not any(inside.held_by_client(client).values()))
    except TimeoutError:
        raise AssertionError(f"held for a server that is gone: {inside.held_by_client(client)}") from None
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
