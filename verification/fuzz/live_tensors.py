"""Rogue senders for a receiver with an honest sender beside them, and rogue receivers for senders.

Each rogue receiver is followed by an honest one; every call of the senders must end.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable

import torch

from aiotensor import (
    Delivery,
    DiscardedError,
    PeerLostError,
    RefusedError,
    TensorReceiver,
    TensorSender,
    UsageError,
    WouldBlockError,
)
from verification.fuzz.living import TROUBLES, Live, LiveConnector, count_end, released
from verification.fuzz.observing import in_memory, threads_started
from verification.fuzz.speaking import connecting_to, converse
from verification.fuzz.steps import Conversation
from verification.internals import connections_at, held_by_sender, mappings_of, memory_of, worker_of
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import settled, until

_PERMITS = 4
_ARENA_BYTES = 4 << 20
_ENDS = (PeerLostError, RefusedError, DiscardedError, WouldBlockError, UsageError)  # of sends to a rogue
_KEPT = 3  # so that some tensors outlive their senders
_ENGINE = "engine"


# The receiver.


class Engine:
    """A receiver that takes, checks and frees every tensor; a part of the process of the peers."""

    def __init__(self, state: peers.State) -> None:
        self.receiver = state.receiver
        self.honest = ""  # the id of the honest sender
        self.reserved = (0, 0)  # for the honest sender
        self.taken: Counter[str] = Counter()
        self.kept: deque[torch.Tensor] = deque(maxlen=_KEPT)
        self.troubles = state.others[TROUBLES]
        self.taking = asyncio.create_task(self._take(), name="fuzz-taking")
        self.taking.add_done_callback(self._stopped)

    async def _take(self) -> None:
        async for delivery in self.receiver:
            self._look_at(delivery)
            self.kept.append(delivery.tensor)
            del delivery  # it would keep the tensor until the next delivery

    def _stopped(self, taking: "asyncio.Task[None]") -> None:
        if not taking.cancelled():
            self.troubles.found.append(f"taking ended: {taking.exception()!r}")

    def _look_at(self, delivery: Delivery) -> None:
        handle, tensor = delivery.handle, delivery.tensor.detach()
        if tuple(tensor.shape) != handle.shape:
            self.troubles.found.append(f"a tensor of shape {tuple(tensor.shape)} came for {handle}")
        elif handle.sender != self.honest:
            self.taken["tensors of rogues"] += 1
            self.taken["tensors in shared memory"] += in_memory(tensor, self.troubles)
        elif torch.equal(tensor, pattern(handle.message, tensor.numel())):
            self.taken["honest tensors"] += 1
        else:
            self.troubles.found.append(f"an honest tensor is not what was sent: {handle}")

    def is_settled(self) -> bool:
        """Free all tensors; return whether nothing is held for any rogue, or taking has failed."""
        self.kept.clear()  # also tensors that arrived since the last check
        now, mappings = self.receiver.statistics(), mappings_of(self.receiver)
        held = now.leases, now.unclaimed_tensors, mappings.lingering_bytes
        return self.taking.done() or (connections_at(self.receiver) == 1 and not any(held))


async def _open_receiver(state: peers.State) -> None:
    state.receivers.append(await TensorReceiver(state.endpoint).__aenter__())
    state.others[_ENGINE] = Engine(state)
    await threads_started(worker_of(state.receiver))


async def _trust(state: peers.State, sender: str) -> None:
    engine: Engine = state.others[_ENGINE]
    await until(lambda: engine.receiver.statistics().senders == 1)
    engine.honest, engine.reserved = sender, _reserved(engine.receiver)


def _reserved(receiver: TensorReceiver) -> tuple[int, int]:
    """Return the shared memory and the messages that count towards the limits."""
    now = receiver.statistics()
    return now.mapped_bytes, now.promised_messages


async def _settle(state: peers.State) -> Counter[str]:
    """Wait until every rogue has disconnected, and its memory is unmapped."""
    engine: Engine = state.others[_ENGINE]
    await until(engine.is_settled)
    await mappings_of(engine.receiver).settle()
    assert not engine.taking.done(), engine.taking
    assert _reserved(engine.receiver) == engine.reserved, engine.receiver.statistics()
    return engine.taken


async def _stop(state: peers.State) -> None:
    await _end(state.others[_ENGINE].taking)


async def _end(taking: "asyncio.Task[None]") -> None:
    taking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await taking


class LiveReceiver(Live):
    """A receiver, as seen by its senders."""

    settled = staticmethod(_settle)
    _honest: TensorSender
    _sent = 0

    async def open(self) -> None:
        """Open the receiver, and connect an honest sender to it."""
        await self.process.call(_open_receiver)
        self._honest = await TensorSender(self.address).__aenter__()
        await self.process.call(_trust, self._honest.id)

    async def close(self) -> None:
        """Close the honest sender."""
        await self._honest.aclose()
        await self.process.call(_stop)

    async def talk(self, said: Conversation) -> None:
        """Run a rogue's conversation, then send a valid tensor and wait until it is taken."""
        with connecting_to(self.address, self.things) as connect:
            await converse(connect, said)
        await self._honest.send(pattern(self._sent, BIG if self.conversations % 8 == 0 else 3))
        self._sent += 1
        await self._honest.drain()

    async def settle(self) -> None:
        """Check also that each honest tensor was taken."""
        await super().settle()
        assert self.outcomes["honest tensors"] == self._sent
        assert self._honest.statistics().receivers_lost == 0


# The senders.


async def _open_sender(state: peers.State) -> None:
    state.senders[:] = [await TensorSender(state.endpoint, _PERMITS, _ARENA_BYTES).__aenter__()]


async def _work(state: peers.State) -> Counter[str]:
    """Send in every way, and count the outcomes; raise errors that no peer may cause."""
    sender, outcomes = state.sender, Counter[str]()

    async def posted() -> None:
        await sender.send(pattern(1, 3))  # which waits for a receiver, unlike `post`
        await sender.copied(sender.post(pattern(7, BIG)))

    async def message() -> None:
        async with sender.message() as message:
            await message.send(pattern(3, 3))
            await message.send(pattern(4, BIG))

    async def allocated() -> None:
        tensor = (await sender.allocate((BIG,), torch.int64)).copy_(pattern(5, BIG))
        for _ in range(2):
            await sender.send(tensor)

    async def discarded() -> None:
        sender.discard(await sender.send(pattern(6, BIG)))

    async def ends(sending: Awaitable[object]) -> None:
        await count_end(outcomes, sending, *_ENDS)

    await ends(posted())  # alone: the others would take all permits first
    plain = [sender.send(pattern(seed, count)) for seed, count in ((1, 3), (2, BIG), (1, 3))]
    await asyncio.gather(*map(ends, (*plain, message(), allocated(), discarded())))
    return outcomes


async def _check(state: peers.State) -> None:
    """Wait until the sender has released all memory, and check that no block was released twice."""
    sender = state.sender
    await settled(sender)
    await released(lambda: held_by_sender(sender) | {"pinned blocks": len(memory_of(sender).blocks)})
    # The whole arena can be allocated again, and not a byte beyond it.
    async with asyncio.TaskGroup() as tasks:
        held = [tasks.create_task(sender.allocate((_ARENA_BYTES // 8,), torch.uint8)) for _ in range(8)]
    assert sender.statistics().bytes_in_use == _ARENA_BYTES
    assert memory_of(sender).try_acquire(1) is None
    del held, tasks
    await until(lambda: sender.statistics().bytes_in_use == 0)
    await sender.aclose()
    state.senders.clear()


class LiveSender(LiveConnector):
    """Senders, as seen by their receivers."""

    begin = staticmethod(_open_sender)
    work = staticmethod(_work)

    @contextlib.asynccontextmanager
    async def honest(self) -> AsyncIterator[None]:
        """Receive every tensor."""
        async with TensorReceiver(self.address) as receiver:
            taking = asyncio.create_task(_take(receiver))
            yield
            await _end(taking)

    async def finish(self) -> None:
        """Send to the honest receiver, and check that everything is back."""
        await self.process.call(_work)
        await self.process.call(_check)


async def _take(receiver: TensorReceiver) -> None:
    async for delivery in receiver:
        tensor = delivery.tensor
        assert tensor.numel() in (3, BIG)
        assert torch.equal(tensor, pattern(int(tensor[0]), tensor.numel()))
        del tensor
        del delivery
