"""Rogue ranks for pipes, all of whose calls must end, with two honest ranks beside them."""

import asyncio
import secrets
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not declare it

from aiotensor import PeerLostError, RefusedError, UsageError, WouldBlockError
from aiotensor.ranks import RankPipe, meeting
from verification.fuzz.grammar import PIPE_BYTES
from verification.fuzz.joining import RANKS, address_of, entry_of, joining, store_with
from verification.fuzz.living import TROUBLES, Live
from verification.fuzz.observing import in_memory
from verification.fuzz.steps import Conversation
from verification.patterns import pattern
from verification.processes import peers
from verification.waiting import until

_MOMENT_S = 0.05  # for a pipe to open whose other rank has disconnected
_KEPT = 3  # tensors, some of which outlive the pipe

# The first messages, all of which are within the limit. The last two are in blocks.
_MESSAGES = (None, pattern(1, 3), pattern(2, 5000), pattern(3, 1500).view(60, 25).t())

_HONEST, _LEFT, _STORE = "honest ranks", "the rogue has left", "store"


def new_pipe(store: HashStore, rank: int, **options: Any) -> RankPipe:
    """Return the pipe of one rank."""
    return RankPipe(store, 1 - rank, rank=rank, world_size=RANKS, host="127.0.0.1", **options)


class HonestRanks:
    """Two honest ranks of this process, which no rogue may disturb."""

    def __init__(self, low: RankPipe, high: RankPipe) -> None:
        self._ends = low, high
        self._seed = 0

    async def exchange(self) -> None:
        """Send messages in both directions, and check that they arrive."""
        self._seed += 1
        messages = (pattern(self._seed, 3), None, pattern(self._seed + 1, 5000), pattern(self._seed, 200_000))
        for sender, receiver in (self._ends, self._ends[::-1]):
            for message in messages[: 4 if self._seed % 8 == 1 else 3]:
                await sender.send(message)
                received = await receiver.receive()
                if message is None or received is None:
                    assert message is received
                else:
                    assert torch.equal(received, message)


@asynccontextmanager
async def honest_ranks() -> AsyncIterator[HonestRanks]:
    """Open a pipe whose ends are both in this process."""
    store = HashStore()
    low, high = (new_pipe(store, rank) for rank in range(RANKS))
    try:
        await asyncio.gather(low.__aenter__(), high.__aenter__())
        yield HonestRanks(low, high)
    finally:
        await asyncio.gather(low.aclose(), high.aclose())


async def _prepare(state: peers.State) -> None:
    """Open the honest ranks; over ``tcp://``, each pipe assumes that it runs on a separate machine."""
    if str(state.endpoint).startswith("tcp://"):
        apart = patch.object(meeting, "machine_of_this_process", lambda: secrets.token_hex(8))
        state.stack.enter_context(apart)
    state.others[_HONEST] = await state.stack.enter_async_context(honest_ranks())


async def _use(state: peers.State, rank: int) -> Counter[str]:
    """Open a pipe to a rogue of a rank, and send and receive until that ends.

    Raises errors that no peer may cause. A pipe that is not open when the rogue has left will never be.
    """
    has_left = state.others[_LEFT] = asyncio.Event()
    store = state.others[_STORE] = store_with(entry_of(str(state.endpoint), rank), rank)
    pipe = new_pipe(store, 1 - rank, max_bytes=PIPE_BYTES)
    opening, leaving = (asyncio.ensure_future(one) for one in (pipe.__aenter__(), has_left.wait()))
    await asyncio.wait([opening, leaving], return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    await asyncio.wait([opening], timeout=_MOMENT_S)
    opening.cancel()
    await asyncio.wait([opening, leaving])
    if opening.cancelled():
        return Counter(["never opened"])
    try:
        opening.result()
    except (PeerLostError, RefusedError, UsageError) as error:
        return Counter([f"{type(error).__name__} while opening"])
    outcomes: Counter[str] = Counter(["opened"])
    kept: deque[torch.Tensor] = deque(maxlen=_KEPT)
    await asyncio.gather(_send(pipe, outcomes), _receive(state, pipe, kept, outcomes))
    await pipe.aclose()
    kept.clear()
    await until(lambda: not pipe.statistics().leases)
    left = pipe.statistics()
    held = left.connected, left.in_flight, left.unclaimed  # not the bytes: the rogue may still read them
    assert not any((*held, left.waiting_sends, left.waiting_receives)), left
    return outcomes


async def _send(pipe: RankPipe, outcomes: Counter[str]) -> None:
    """Send until the rogue is gone, or has taken all messages."""
    try:
        for message in _MESSAGES:
            await pipe.send(message)
        await pipe.drain()
        outcomes["drained"] += 1
        for message in _MESSAGES:
            await pipe.send(message)
        await pipe.send(_MESSAGES[-1])  # which waits, unless the rogue has freed a block
    except (PeerLostError, WouldBlockError) as error:
        outcomes[f"send: {type(error).__name__}"] += 1


async def _receive(
    state: peers.State, pipe: RankPipe, kept: "deque[torch.Tensor]", outcomes: Counter[str]
) -> None:
    """Receive until the rogue is gone."""
    while True:
        try:
            tensor = await pipe.receive(copy=outcomes["received"] % 3 == 0)
        except PeerLostError:
            return
        outcomes["received"] += 1
        if tensor is not None:
            outcomes["tensors in shared memory"] += in_memory(tensor.detach(), state.others[TROUBLES])
            kept.append(tensor)
        del tensor


async def _address(state: peers.State, rank: int) -> meeting.Entry | None:
    await until(lambda: _STORE in state.others)
    return await address_of(state.others[_STORE], rank)


async def _exchange(state: peers.State) -> None:
    state.others[_LEFT].set()
    await state.others[_HONEST].exchange()
    del state.others[_STORE]


class LiveRank(Live):
    """The ends of pipes, as seen by the other ends."""

    async def open(self) -> None:
        """Open the honest pipe."""
        await self.process.call(_prepare)

    async def talk(self, said: Conversation) -> None:
        """Run a rogue rank for a new pipe, and check that two honest ranks are not affected."""
        rank = zlib.crc32(msgspec.json.encode(said)) % RANKS  # the same when it is repeated
        async with joining(self.address, rank, self.things) as talk:
            using = self.process.start(_use, rank)
            entry = await self.process.call(_address, 1 - rank) if rank else None
            await talk(entry, said)
        await self.process.call(_exchange)
        self.outcomes += await using
