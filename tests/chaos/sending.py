"""What a sender's process does in a round."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

import torch

from aiotensor import AioTensorError, PeerLostError, SenderStatistics, TensorHandle, TensorQueue, TensorSender
from tests.chaos.here import ARENA_BYTES, here
from tests.chaos.journal import Began, Broken, Ended, Sent, Withdrawn
from tests.chaos.plan import Order, SenderPlan
from tests.pairs import pattern
from tests.processes.peers import State

__all__ = ["begin_round", "open_sender", "probe", "reopen", "send_all", "settle", "told"]


class _GivenUpError(Exception):
    """A message's own block changed its mind."""


class _Now:
    """How far this round is."""

    def __init__(self, losses: int) -> None:
        self.pending = 0  # operations that have not ended
        self.losses = losses  # of receivers, when the round began
        self.pauses = False
        self.goes_on = asyncio.Event()


_now = _Now(0)


async def open_sender(state: State, plan: SenderPlan) -> str:
    sender = TensorSender(state.endpoint, plan.permits, ARENA_BYTES, keep_warm_seconds=plan.keep_warm_s)
    await sender.__aenter__()
    state.senders.append(sender)
    return sender.id


async def reopen(state: State, plan: SenderPlan) -> str:
    """Close the sender in the middle of what it does, and open another."""
    old = state.sender
    try:
        await open_sender(state, plan)
    except OSError:
        return old.id  # this process has no descriptors now
    await old.aclose()
    return state.sender.id


def _losses(state: State) -> int:
    return sum(sender.statistics().receivers_lost for sender in state.senders)


def _in_flight(state: State) -> int:
    return sum(sender.statistics().in_flight for sender in state.senders)


async def begin_round(state: State) -> None:
    """Forget the last round."""
    global _now
    _now = _Now(_losses(state))
    here.journal.begin_anew()


async def send_all(state: State, plan: SenderPlan, part: int, *, pauses: bool) -> None:
    """Carry out the orders of a part.

    Args:
        plan: of this sender.
        part: which of its orders.
        pauses: after the loss of a receiver, begin nothing new until `told` has looked.
    """
    _now.pauses = pauses
    orders = deque(
        (order, [pattern(order.key + i, n) for i, n in enumerate(order.counts)]) for order in plan.parts[part]
    )

    async def work() -> None:
        while orders:
            await _pause(state)
            if orders:
                await _carry_out(state, *orders.popleft())
                await asyncio.sleep(0)

    await asyncio.gather(*(work() for _ in range(plan.width)))


async def _pause(state: State) -> None:
    """After the loss of a receiver, begin nothing that waits for the next one before `told` has looked."""
    if _now.pauses and _losses(state) > _now.losses:
        await _now.goes_on.wait()


async def _carry_out(state: State, order: Order, sources: Sequence[torch.Tensor]) -> None:
    here.journal(Began(order.key, len(order.counts)))
    _now.pending += 1
    sender = state.sender
    how, text = "whole", ""
    handles: list[TensorHandle] = []
    try:
        if order.fate == "cancel":
            if await _cancel(
                asyncio.create_task(_send(state, order, sources, handles)), order.after_ms / 1000
            ):
                how = "cancelled"
        else:
            await _send(state, order, sources, handles)
    except _GivenUpError:
        how = "given up"
    except (AioTensorError, OSError) as error:
        how, text = type(error).__name__, str(error)
    finally:
        _now.pending -= 1
    here.journal(Ended(order.key, how, text))
    if order.fate == "discard" and handles:
        await asyncio.sleep(order.after_ms / 1000)
        here.journal(Withdrawn(order.key))
        if sender is state.sender:
            sender.discard(handles[0])
    _check_limits(sender.statistics())


async def _cancel(task: "asyncio.Task[None]", after_s: float) -> bool:
    """Cancel a task after a while, and say whether that ended it; raise what else did."""
    try:
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            return True
        task.result()
        return False
    finally:
        del task  # with its error it would keep this frame, and the tensor, until the garbage collector comes


async def _send(
    state: State, order: Order, sources: Sequence[torch.Tensor], handles: list[TensorHandle]
) -> None:
    sender = state.sender

    def sent(handle: TensorHandle) -> None:
        token = order.key + handle.tensor
        here.journal(Sent(token, handle.sender, handle.message, handle.tensor, _losses(state)))
        handles.append(handle)

    match order.how:
        case "send":
            sent(await sender.send(sources[0]))
        case "nowait":
            sent(sender.send_nowait(sources[0]))
        case "allocate":
            tensor = await sender.allocate(tuple(sources[0].shape), sources[0].dtype)
            tensor.copy_(sources[0])
            _now.pending -= 1
            try:
                await _pause(state)
            finally:
                _now.pending += 1
            sent(await sender.send(tensor))
        case "message":
            async with sender.message() as message:
                for source in sources:
                    sent(await message.send(source))
                if order.fate == "raise":
                    raise _GivenUpError
        case _:
            raise AssertionError(order.how)


def _check_limits(statistics: SenderStatistics) -> None:
    if statistics.peak_in_flight > statistics.max_concurrent_videos:
        here.journal(Broken(f"more messages in flight than permits: {statistics}"))
    if statistics.peak_bytes_in_use > statistics.arena_bytes:
        here.journal(Broken(f"more bytes in use than the arena has: {statistics}"))


async def told(state: State) -> int:
    """Wait until the loss of a receiver has ended every wait, let the round go on, and count the losses."""
    while _losses(state) == _now.losses:
        await asyncio.sleep(0.001)
    # Who got a permit in the very turn of the loss goes on to the next receiver.
    while _now.pending > _in_flight(state):
        await asyncio.sleep(0.001)
    _now.goes_on.set()
    return _losses(state)


async def probe(state: State, plan: SenderPlan) -> TensorHandle:
    """Send something to whoever receives now, or will."""
    while True:
        # A process that is being killed has its listening socket a little longer than its connections, and
        # one that is refused because of a limit is let in when there is room.
        with contextlib.suppress(PeerLostError):
            return await state.sender.send(pattern(0, 3))
        if isinstance(state.endpoint, TensorQueue):  # who was refused there has to be opened again
            await reopen(state, plan)
        await asyncio.sleep(0.001)


async def settle(state: State) -> tuple[SenderStatistics, int]:
    """Wait until nothing is held, forget the senders that were closed, and count the losses."""
    for sender in state.senders:
        _check_limits(sender.statistics())
    sender = state.sender  # of one that was closed, nobody says what became of its last messages
    while (now := sender.statistics()).in_flight or now.bytes_in_use or now.waiting:
        await asyncio.sleep(0.001)
    losses = _losses(state)
    del state.senders[:-1]
    return state.sender.statistics(), losses
