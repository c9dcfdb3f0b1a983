"""The calls of an application on a pipe whose other rank is a rogue: every wait must end."""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not declare it

from aiotensor import PeerLostError, RefusedError, UsageError, WouldBlockError
from aiotensor.ranks import RankPipe, entries
from verification.fuzz.engine import Troubles, in_memory
from verification.fuzz.joining import RANKS
from verification.fuzz.ranks import MAX_BYTES
from verification.patterns import pattern
from verification.waiting import until

__all__ = ["RECEIVED", "HonestRanks", "Used", "honest_ranks", "new_pipe", "on_other_machines", "use"]

RECEIVED = "received"

_MOMENT_S = 0.05  # for a pipe to open whose other rank has disconnected
_KEPT = 3  # tensors, some of which outlive the pipe
_HOST = "127.0.0.1"

# The first messages, as `verification.fuzz.ranks` expects them; all of them are within the limit. The third
# is in a block, or travels with its record. The fourth, whose values are not contiguous, is in a block.
_MESSAGES = (None, pattern(1, 3), pattern(2, 5000), pattern(3, 1500).view(60, 25).t())


class Used(NamedTuple):
    """The outcomes of calls, and the number of tensors of the rogue in shared memory."""

    outcomes: Counter[str]
    in_memory: int


@contextmanager
def on_other_machines() -> Iterator[None]:
    """Let each pipe of this process assume that it runs on a separate machine."""
    before = entries.machine_of_this_process
    entries.machine_of_this_process = lambda: secrets.token_hex(8)
    try:
        yield
    finally:
        entries.machine_of_this_process = before


def new_pipe(store: HashStore, rank: int, **options: Any) -> RankPipe:
    """Return the pipe of one rank."""
    return RankPipe(store, 1 - rank, rank=rank, world_size=RANKS, host=_HOST, **options)


async def use(store: HashStore, rank: int, has_left: asyncio.Event, troubles: Troubles) -> Used:
    """Open a pipe to a rogue, and send and receive until that ends; raise errors that no peer may cause.

    Args:
        store: the store with the entry of the rogue.
        rank: the rank of this end.
        has_left: set when the rogue has disconnected: a pipe that is not open then will never be.
        troubles: collects errors.
    """
    pipe = new_pipe(store, rank, max_bytes=MAX_BYTES)
    outcome = await _open(pipe, has_left)
    if outcome:
        return Used(Counter([outcome]), 0)
    outcomes: Counter[str] = Counter(["opened"])
    kept: deque[torch.Tensor] = deque(maxlen=_KEPT)
    sending = asyncio.create_task(_send(pipe, outcomes))
    taken = await _receive(pipe, kept, outcomes, troubles)
    await sending
    await pipe.aclose()
    kept.clear()
    await until(lambda: not pipe.statistics().leases)
    left = pipe.statistics()
    for name in (
        "connected",
        "in_flight",
        "bytes_in_flight",
        "waiting_sends",
        "waiting_receives",
        "unclaimed",
    ):
        assert not getattr(left, name), left
    return Used(outcomes, taken)


async def _open(pipe: RankPipe, has_left: asyncio.Event) -> str:
    """Open a pipe, and return the outcome if it is not open."""
    opening, leaving = (asyncio.ensure_future(one) for one in (pipe.__aenter__(), has_left.wait()))
    await asyncio.wait([opening, leaving], return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    await asyncio.wait([opening], timeout=_MOMENT_S)
    opening.cancel()
    await asyncio.wait([opening, leaving])
    if opening.cancelled():
        return "never opened"
    error = opening.exception()
    if error is None:
        return ""
    if isinstance(error, PeerLostError | RefusedError | UsageError):
        return f"{type(error).__name__} while opening"
    raise error


async def _send(pipe: RankPipe, outcomes: Counter[str]) -> None:
    """Send until the rogue is gone, or has taken all messages."""
    try:
        for message in _MESSAGES:
            await pipe.send(message)
        outcomes["sent"] += 1
        await pipe.drain()
        outcomes["drained"] += 1
        for message in _MESSAGES:
            pipe.send_nowait(message)
        await pipe.send(_MESSAGES[-1])  # which waits, unless the rogue has freed a block
    except (PeerLostError, WouldBlockError) as error:
        outcomes[f"send: {type(error).__name__}"] += 1


async def _receive(
    pipe: RankPipe, kept: "deque[torch.Tensor]", outcomes: Counter[str], troubles: Troubles
) -> int:
    """Receive until the rogue is gone; return the number of tensors in shared memory."""
    taken = calls = 0
    while True:
        calls += 1
        try:
            tensor = await pipe.receive(copy=calls % 3 == 0)
        except PeerLostError as error:
            outcomes[f"receive: {type(error).__name__}"] += 1
            return taken
        outcomes[RECEIVED] += 1
        if tensor is not None:
            taken += in_memory(tensor.detach(), troubles)
            kept.append(tensor)
        del tensor


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
                if message is None:
                    assert received is None
                else:
                    assert received is not None
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
