"""The operations of the receiver's process in a round."""

import asyncio
import gc
from collections.abc import Sequence

import torch

from aiotensor import AioTensorError, PeerLostError, RefusedError, TensorHandle, TensorReceiver, UsageError
from verification.chaos.here import ARENA_BYTES, MAX_MAPPED_BYTES, Kept, here, opened, token_of, until
from verification.chaos.journal import Answered, Broken, Taken, key_of
from verification.chaos.plan import SLOTS, TakerPlan
from verification.processes.peers import State

_NEVER = 1 << 40  # the number of a message that no sender ever reaches


class _Taking:
    """One round of one receiver."""

    def __init__(self, receiver: TensorReceiver, plan: TakerPlan, senders: Sequence[str]) -> None:
        self.receiver = receiver
        self.plan = plan
        self.kept = Kept(plan)
        self.losses: dict[str, asyncio.Future[int | None]] = {}
        self.tasks = [asyncio.create_task(self._iterate()) for _ in range(plan.iterators)]
        for sender in senders:
            self.losses[sender] = asyncio.get_running_loop().create_future()
            self.tasks.append(asyncio.create_task(self._wait_in_vain(sender)))

    async def _iterate(self) -> None:
        await asyncio.sleep(self.plan.stuck_ms / 1000)
        async for delivery in self.receiver:
            self._took(delivery.handle, delivery.tensor)
            del delivery
            if self.plan.slow_ms:
                await asyncio.sleep(self.plan.slow_ms / 1000)

    async def _wait_in_vain(self, sender: str) -> None:
        """Wait for a tensor that is never sent, until the sender is lost."""
        try:
            await self.receiver.receive(TensorHandle(sender, _NEVER, 0, "int64", (1,), "cpu"))
        except (PeerLostError, RefusedError) as error:
            self.losses[sender].set_result(error.pid)
        except AioTensorError:
            self.losses[sender].set_result(None)

    def _took(self, handle: TensorHandle, tensor: torch.Tensor) -> None:
        token = _note(handle, tensor)
        now = self.receiver.statistics()
        if now.mapped_bytes > MAX_MAPPED_BYTES:
            here.journal(Broken(f"more mapped than allowed: {now}"))
        if token is not None:
            self.kept.add(tensor, token)

    async def stop(self, *, waits: bool) -> None:
        for task in self.tasks:
            task.cancel()
        for ended in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
                raise ended
        if waits:
            await self.kept.dropped()


def _note(handle: TensorHandle, tensor: torch.Tensor) -> int | None:
    """Record a tensor that was taken, and return its token."""
    token = token_of(tensor)
    if token is None:
        here.journal(Broken(f"{handle} arrived with values that were never sent: {tensor[:9]}"))
    else:
        here.journal(Taken(token, key_of(handle)))
    return token


_taking: _Taking | None = None


async def open_receiver(state: State, plan: TakerPlan) -> None:
    arguments = {"max_mapped_bytes": MAX_MAPPED_BYTES, **here.arguments}
    state.receivers.append(
        await opened(lambda: TensorReceiver(state.endpoint, **arguments), (OSError, UsageError))
    )


async def take(state: State, plan: TakerPlan, senders: Sequence[str] = ()) -> None:
    """Start taking the tensors of some senders, until `stop` or `close`."""
    global _taking
    _taking = _Taking(state.receiver, plan, senders)


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
            here.journal(Answered(key_of(handle), type(error).__name__))
        else:
            _note(handle, tensor)


async def take_probe(state: State, handle: TensorHandle) -> bool:
    """Take the tensor that a probe sent, and return whether it has arrived.

    It does not arrive if the refusal of its sender is in transit, or only the receiver has noticed a loss.
    """
    try:
        tensor = await state.receiver.receive(handle)
    except (PeerLostError, RefusedError):
        return False
    if token_of(tensor) != 0:
        raise ValueError("a probe arrived with other values")
    return True


async def stop(state: State) -> None:
    """Stop taking tensors, and wait until all kept ones are dropped."""
    await _stop(waits=True)


async def _stop(*, waits: bool) -> None:
    global _taking
    taking, _taking = _taking, None
    if taking is not None:
        await taking.stop(waits=waits)


def _is_used(receiver: TensorReceiver) -> bool:
    now = receiver.statistics()
    return bool(now.leases or now.waiting or now.unclaimed_tensors)


async def settle(state: State) -> list[str]:
    """Wait until nothing is held, forget the closed receivers, and return the problems."""
    gc.collect()
    # Over a network, the end of another sender may still be in transit.
    await until(lambda: state.receiver.statistics().senders == SLOTS)
    await until(lambda: not any(_is_used(receiver) for receiver in state.receivers))
    del state.receivers[:-1]
    now = state.receiver.statistics()
    is_right = (now.leased_bytes, now.unclaimed_bytes, now.mapped_bytes) == (0, 0, SLOTS * ARENA_BYTES)
    return [] if is_right else [f"is not at rest: {now}"]
