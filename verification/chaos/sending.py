"""The operations of a sender's process in a round."""

import asyncio
import contextlib
from collections.abc import Sequence

import torch

from aiotensor import PeerLostError, RefusedError, SenderStatistics, TensorHandle, TensorSender
from verification.chaos.here import ARENA_BYTES, account, here, until
from verification.chaos.journal import Broken, Sent, key_of
from verification.chaos.plan import Order, SenderPlan
from verification.patterns import pattern
from verification.processes.peers import State


async def open_sender(state: State, plan: SenderPlan) -> str:
    sender = TensorSender(
        state.endpoint, plan.permits, ARENA_BYTES, keep_warm_s=plan.keep_warm_s, **here.arguments
    )
    await sender.__aenter__()
    state.senders.append(sender)
    here.open = sender
    return sender.id


async def reopen(state: State, plan: SenderPlan) -> str:
    """Close the sender during its operations, and open another."""
    old = state.sender
    try:
        await open_sender(state, plan)
    except OSError:
        return old.id  # this process currently has no descriptors
    await old.aclose()
    return state.sender.id


def _losses(state: State) -> int:
    return sum(sender.statistics().receivers_lost for sender in state.senders)


async def losses(state: State) -> int:
    """Count the receivers that were lost."""
    return _losses(state)


async def told(state: State, before: int) -> None:
    """Wait until more receivers are lost than before."""
    await until(lambda: _losses(state) > before)


async def carry_out(state: State, order: Order, sources: Sequence[torch.Tensor]) -> None:
    """Carry out an order; see `here.carry_out_all`."""
    sender = state.sender
    await account(order, _send(state, order, sources))
    _check_limits(sender.statistics())


async def _send(state: State, order: Order, sources: Sequence[torch.Tensor]) -> None:
    sender = state.sender

    def sent(handle: TensorHandle) -> None:
        here.journal(Sent(order.key + handle.tensor, key_of(handle), _losses(state)))

    match order.how:
        case "send":
            sent(await sender.send(sources[0]))
        case "nowait":
            sent(sender.send_nowait(sources[0]))
        case "post":
            handle = sender.post(sources[0])
            sent(handle)
            await sender.copied(handle)
        case "allocate":
            tensor = await sender.allocate(tuple(sources[0].shape), sources[0].dtype)
            sent(await sender.send(tensor.copy_(sources[0])))
        case "message":
            async with sender.message() as message:
                for source in sources:
                    sent(await message.send(source))
        case _:
            raise AssertionError(order.how)


def _check_limits(statistics: SenderStatistics) -> None:
    if statistics.peak_in_flight > statistics.max_concurrent_videos:
        here.journal(Broken(f"more messages in flight than permits: {statistics}"))
    if statistics.peak_bytes_in_use > statistics.arena_bytes:
        here.journal(Broken(f"more bytes in use than the arena has: {statistics}"))


async def probe(state: State) -> TensorHandle:
    """Send a tensor to the current receiver, or to the next one."""
    while True:
        # The listening socket of a killed process outlives its connections for a moment, and a sender that a
        # limit refused is accepted once another has left.
        with contextlib.suppress(PeerLostError, RefusedError):
            return await state.sender.send(pattern(0, 3))
        await asyncio.sleep(0.001)


async def settle(state: State) -> list[str]:
    """Wait until nothing is held, forget the senders that were closed, and return the problems."""
    for sender in state.senders:
        _check_limits(sender.statistics())
    del state.senders[:-1]  # the last messages of closed senders have no reported outcome
    sender = state.sender

    def is_used() -> bool:
        now = sender.statistics()
        return bool(now.in_flight or now.bytes_in_use or now.waiting)

    await until(lambda: not is_used())
    now = sender.statistics()
    return [f"holds something at rest: {now}"] if now.longest_wait_s or now.holders else []
