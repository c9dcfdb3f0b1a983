"""The operations of a publisher's process in a round."""

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
import torch

from aiotensor import WouldBlockError
from aiotensor.broadcast import Publisher
from aiotensor.types import PublisherStatistics
from verification.chaos.here import ARENA_BYTES, account, here, left_running, opened, until
from verification.chaos.journal import Broken, Published
from verification.chaos.plan import LAST, Order, PublisherPlan, SenderPlan
from verification.internals import held_by_publisher, lost_bytes_of
from verification.processes.peers import State


class Issue(msgspec.Struct):
    """One message of a publisher: the tensors have the patterns from `key` on."""

    publisher: str
    key: int
    tensors: list[torch.Tensor] = []


class _Open:
    """The publisher of this process. A publication does not begin while it is being replaced."""

    def __init__(self) -> None:
        self.publisher: Publisher
        self.options: PublisherPlan
        self.replacing = asyncio.Lock()


_open = _Open()


async def open_sender(state: State, plan: SenderPlan) -> str:
    """Open a publisher, and return its id."""
    options = plan.publisher
    assert options is not None
    _open.options = options
    arguments = {**msgspec.structs.asdict(options), "keep_warm_s": plan.keep_warm_s, **here.arguments}
    _open.publisher = await opened(lambda: Publisher(state.endpoint, arena_bytes=ARENA_BYTES, **arguments))
    return _open.publisher.id


async def admit(state: State, count: int) -> None:
    """Wait until `count` subscribers are connected."""
    publisher = _open.publisher
    while publisher.statistics().subscribers < count:
        with contextlib.suppress(WouldBlockError):
            await publisher.wait_for_subscribers(count)


async def reopen(state: State, plan: SenderPlan) -> str:
    """Close the publisher during its operations, and open another."""
    async with _open.replacing:
        await _open.publisher.aclose()
        return await open_sender(state, plan)


async def carry_out(state: State, order: Order, sources: Sequence[torch.Tensor]) -> None:
    """Carry out an order; see `here.carry_out_all`."""
    async with _open.replacing:
        publisher = _open.publisher
    await account(order, _publish(publisher, order, sources))
    _check_limits(publisher)


async def _publish(publisher: Publisher, order: Order, sources: Sequence[torch.Tensor]) -> None:
    tensors = list(sources)
    if order.how == "allocate":
        for index, source in enumerate(sources):
            tensor = await publisher.allocate(tuple(source.shape), source.dtype)
            tensors[index] = tensor.copy_(source)
            del tensor
    issue = Issue(publisher.id, order.key, tensors)
    sent = publisher.publish_nowait(issue) if order.how == "nowait" else await publisher.publish(issue)
    here.journal(Published(order.key, publisher.id, sent.number))
    if order.how == "drain":
        await publisher.drain()


def _check_limits(publisher: Publisher) -> None:
    now, options = publisher.statistics(), _open.options
    if now.peak_bytes_in_use > now.arena_bytes:
        here.journal(Broken(f"more bytes in use than the arena has: {now}"))
    for lag in now.lags:
        if lag.behind > now.max_behind:
            here.journal(Broken(f"a subscriber is further behind than it may be: {now}"))
        if options.max_held_bytes is not None and lag.held_bytes > options.max_held_bytes:
            here.journal(Broken(f"a subscriber uses more memory than it may: {now}"))


async def told(state: State) -> int:
    """Wait until the memory of subscribers that ended is released, and return the bytes that were lost."""
    await until(lambda: not held_by_publisher(_open.publisher)["departures"])
    return lost_bytes_of(_open.publisher)


async def lost(state: State, pid: int) -> None:
    """Wait until no subscriber of a process that ended is connected."""
    await until(lambda: all(lag.pid != pid for lag in _open.publisher.statistics().lags))


async def finish(state: State, count: int) -> tuple[str, int]:
    """Publish one more message to `count` subscribers, after they have taken all others.

    Returns:
        the id of the publisher, and the number of the message.
    """
    publisher = _open.publisher
    while True:
        await publisher.drain()  # so that none is slow, and disconnected for that
        await admit(state, count)
        before = publisher.statistics()
        try:
            sent = await publisher.publish(Issue(publisher.id, LAST))
        except WouldBlockError:
            continue
        here.journal(Published(LAST, publisher.id, sent.number))
        await publisher.drain()
        # A connection may have ended before, without this side knowing it: its subscriber missed the message.
        after = publisher.statistics()
        if after.subscribers_lost == before.subscribers_lost and _names_in(after) == _names_in(before):
            break
    return publisher.id, sent.number


def _names_in(statistics: PublisherStatistics) -> set[str]:
    return {lag.subscriber for lag in statistics.lags}


async def settle(state: State, *, is_free: bool) -> None:
    """Wait until no subscriber uses memory, and check that the whole arena can be allocated if it is free.

    Args:
        state: the state of this process.
        is_free: whether all memory is free once the history is dropped.
    """
    publisher = _open.publisher
    await until(lambda: not any(lag.held_bytes for lag in publisher.statistics().lags))
    while is_free:
        with contextlib.suppress(WouldBlockError):
            await publisher.allocate((ARENA_BYTES,), torch.uint8)
            await until(lambda: not publisher.statistics().bytes_in_use)
            return


async def close(state: State) -> list[str]:
    """Close the publisher, wait until its threads and tasks have ended, and report held resources."""
    await _open.publisher.aclose()
    await until(lambda: not left_running())
    now, held = _open.publisher.statistics(), held_by_publisher(_open.publisher)
    del held["pinned blocks"]  # a subscriber may still read these blocks
    is_empty = not any(held.values()) and (now.subscribers, now.waiting, now.history) == (0, 0, 0)
    return [] if is_empty else [f"holds {held} after closing: {now}"]
