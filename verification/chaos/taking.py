"""The operations of the receiver's process in a round."""

import asyncio
import contextlib
import gc
import random
import weakref
from collections.abc import Mapping, Sequence

import torch

from aiotensor import (
    AioTensorError,
    ClosedError,
    DiscardedError,
    PeerLostError,
    ReceiverStatistics,
    RefusedError,
    TensorHandle,
    TensorReceiver,
    UsageError,
)
from verification.chaos.here import MAX_MAPPED_BYTES, here, token_of
from verification.chaos.journal import Answered, Broken, Dropped, Taken
from verification.chaos.plan import Hold, TakerPlan
from verification.processes.peers import State

__all__ = ["Cycle", "answer", "close", "heard", "open_receiver", "settle", "stop", "take", "take_probe"]

_NEVER = 1 << 40  # the number of a message that no sender ever reaches


class Cycle:
    """Cyclic garbage that refers to a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.me = self


class _Taking:
    """One round of one receiver."""

    def __init__(self, state: State, plan: TakerPlan, firsts: Mapping[str, int]) -> None:
        self.receiver = state.receiver
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.kept: list[tuple[int, torch.Tensor]] = []
        self.losses: dict[str, asyncio.Future[int | None]] = {}
        self.tasks = [asyncio.create_task(self._iterate()) for _ in range(plan.iterators)]
        for sender, first in firsts.items():
            self.losses[sender] = asyncio.get_running_loop().create_future()
            self.tasks.append(asyncio.create_task(self._wait_in_vain(sender)))
            for index in plan.by_handle:
                self.tasks.append(asyncio.create_task(self._ask(_handle(sender, first + index))))
            for index in plan.discards:
                self.tasks.append(asyncio.create_task(self._discard(_handle(sender, first + index))))

    async def _iterate(self) -> None:
        await asyncio.sleep(self.plan.stuck_ms / 1000)
        async for delivery in self.receiver:
            self.took(delivery.handle, delivery.tensor)
            del delivery
            if self.plan.slow_ms:
                await asyncio.sleep(self.plan.slow_ms / 1000)

    async def _ask(self, handle: TensorHandle) -> None:
        await asyncio.sleep(self.plan.stuck_ms / 1000)
        try:
            copies = self.rng.random() < self.plan.copies
            self.took(handle, await self.receiver.receive(handle, copy=copies))
        except AioTensorError:
            return  # its outcome is requested again at the end

    async def _discard(self, handle: TensorHandle) -> None:
        await asyncio.sleep(self.rng.uniform(0, 0.02))
        here.journal(Dropped(handle.sender, handle.message))
        with contextlib.suppress(ClosedError):
            self.receiver.discard(handle)

    async def _wait_in_vain(self, sender: str) -> None:
        """Wait for a tensor that is never sent, until the sender is lost."""
        try:
            await self.receiver.receive(_handle(sender, _NEVER))
        except (PeerLostError, RefusedError) as error:
            self.losses[sender].set_result(error.pid)
        except AioTensorError:
            self.losses[sender].set_result(None)

    def took(self, handle: TensorHandle, tensor: torch.Tensor) -> None:
        token = token_of(tensor)
        if token is None:
            here.journal(Broken(f"{handle} arrived with values that were never sent: {tensor[:9]}"))
            return
        here.journal(Taken(token, handle.sender, handle.message, handle.tensor))
        now = self.receiver.statistics()
        if now.mapped_bytes > MAX_MAPPED_BYTES:
            here.journal(Broken(f"more mapped than allowed: {now}"))
        if here.collects_in_finalizers:
            _collecting.add(weakref.ref(tensor, _collect))
        match self.plan.hold:
            case Hold.KEEP:
                self.kept.append((token, tensor))
                asyncio.get_running_loop().call_later(self.plan.hold_ms / 1000, self._let_go)
            case Hold.CYCLE:
                Cycle(tensor)
                asyncio.get_running_loop().call_later(self.plan.hold_ms / 1000, gc.collect)

    def _let_go(self) -> None:
        """Drop the oldest kept tensor, and check that its values have not changed."""
        token, tensor = self.kept.pop(0)
        if token_of(tensor) != token:
            here.journal(Broken(f"the values of {token} changed while the receiver kept it: {tensor[:9]}"))

    async def stop(self, *, waits: bool) -> None:
        for task in self.tasks:
            task.cancel()
        for ended in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
                raise ended
        while waits and self.kept:
            await asyncio.sleep(0.001)


_collecting: set["weakref.ref[torch.Tensor]"] = set()


def _collect(reference: "weakref.ref[torch.Tensor]") -> None:
    _collecting.discard(reference)
    gc.collect()


_taking: _Taking | None = None


def _handle(sender: str, message: int, tensor: int = 0) -> TensorHandle:
    return TensorHandle(sender, message, tensor, "int64", (1,), "cpu")


async def open_receiver(state: State, plan: TakerPlan) -> None:
    del plan
    while True:
        receiver = TensorReceiver(state.endpoint, max_mapped_bytes=MAX_MAPPED_BYTES, **here.arguments)
        try:
            await receiver.__aenter__()
        except (OSError, UsageError):  # this process currently has no descriptors
            await asyncio.sleep(0.005)
        else:
            state.receivers.append(receiver)
            return


async def take(state: State, plan: TakerPlan, firsts: Mapping[str, int]) -> None:
    """Start taking tensors, until `stop` or `close`.

    Args:
        state: the state of this process.
        plan: the plan of the round.
        firsts: the senders, and the number of the next message of each.
    """
    global _taking
    _taking = _Taking(state, plan, firsts)


async def heard(state: State, sender: str) -> int | None:
    """Wait until the loss of a sender has ended the wait for its tensor, and return the pid that it names."""
    assert _taking is not None
    return await asyncio.shield(_taking.losses[sender])


async def close(state: State) -> None:
    """Close the receiver during its operations; tensors are kept for as long as planned."""
    await state.receiver.aclose()
    await _stop(waits=False)


async def answer(state: State, handles: Sequence[TensorHandle]) -> None:
    """Request the tensor of each handle, and record the outcome."""
    for handle in handles:
        try:
            tensor = await state.receiver.receive(handle)
        except AioTensorError as error:
            here.journal(Answered(handle.sender, handle.message, handle.tensor, type(error).__name__))
        else:
            token = token_of(tensor)
            if token is None:
                here.journal(Broken(f"{handle} arrived with values that were never sent: {tensor[:9]}"))
            else:
                here.journal(Taken(token, handle.sender, handle.message, handle.tensor))


async def take_probe(state: State, handle: TensorHandle) -> bool:
    """Take the tensor that a probe sent, and return whether it has arrived.

    It does not arrive if its number was discarded before, if the refusal of its sender is in transit, or
    between two machines if only the receiver has detected a loss.
    """
    try:
        tensor = await state.receiver.receive(handle)
    except (DiscardedError, PeerLostError, RefusedError):
        return False
    if token_of(tensor) != 0:
        raise ValueError("a probe arrived with other values")
    return True


async def stop(state: State) -> None:
    """Stop taking tensors, and wait until all kept ones are dropped."""
    del state
    await _stop(waits=True)


async def _stop(*, waits: bool) -> None:
    global _taking
    taking, _taking = _taking, None
    if taking is not None:
        await taking.stop(waits=waits)


async def settle(state: State, senders: int | None) -> ReceiverStatistics:
    """Wait until nothing is held, and forget the closed receivers.

    Args:
        state: the state of this process.
        senders: over a network, the number of living senders: the end of another may still be in transit.
    """
    gc.collect()
    while senders is not None and state.receiver.statistics().senders != senders:
        await asyncio.sleep(0.001)
    for receiver in state.receivers:
        while (now := receiver.statistics()).leases or now.waiting or now.unclaimed_tensors:
            await asyncio.sleep(0.001)
    del state.receivers[:-1]
    return state.receiver.statistics()
