"""Rogue senders for a receiver, with an honest sender beside them."""

import asyncio
import contextlib
from collections import Counter, deque

import torch

from aiotensor import Delivery, TensorReceiver, TensorSender
from verification.fuzz.living import TROUBLES, Live
from verification.fuzz.observing import in_memory, threads_started
from verification.fuzz.speaking import connecting_to, converse, heard_by
from verification.fuzz.steps import Conversation
from verification.internals import connections_at, mappings_of, worker_of
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

_KEPT = 3  # so that some tensors outlive their senders
_ENGINE = "engine"


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


async def _open(state: peers.State) -> None:
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
    state.others[_ENGINE].taking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await state.others[_ENGINE].taking


class LiveReceiver(Live):
    """A receiver, as seen by its senders."""

    _honest: TensorSender
    _sent = 0

    async def open(self) -> None:
        """Open the receiver, and connect an honest sender to it."""
        await self.process.call(_open)
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
        """Wait until all rogues are gone, and nothing is held for them."""
        await heard_by(self.address, self.things)
        self.outcomes = await self.process.call(_settle)
        assert self.outcomes["honest tensors"] == self._sent
        assert self._honest.statistics().receivers_lost == 0
