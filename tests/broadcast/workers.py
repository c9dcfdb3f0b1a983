"""Functions that subscribers and publishers in other processes run."""

from typing import Any

import torch

from aiotensor import AioTensorError
from aiotensor.broadcast import Publisher, Subscriber
from verification.patterns import pattern
from verification.processes.peers import State


async def subscribe(state: State) -> str:
    subscriber = Subscriber[Any](state.endpoint)
    state.others["subscriber"] = await state.stack.enter_async_context(subscriber)
    return subscriber.id


async def receive(state: State, count: int, *, keep: bool = False) -> list[int]:
    """Receive patterns whose seeds are the numbers of the publications, and return these."""
    numbers = []
    for _ in range(count):
        publication = await state.others["subscriber"].receive()
        expected = pattern(publication.number, publication.message.numel())
        assert torch.equal(publication.message, expected), (
            publication,
            (publication.message != expected).nonzero(),
        )
        publication.message.zero_()  # no other process sees it
        numbers.append(publication.number)
        if keep:
            state.tensors.append(publication.message)
    return numbers


async def receive_for_ever(state: State) -> int:
    """Receive patterns until the publisher has closed, and return the number of publications."""
    count = 0
    async for publication in state.others["subscriber"]:
        assert torch.equal(publication.message, pattern(publication.number, publication.message.numel()))
        count += 1 + publication.missed
    return count


async def missed(state: State) -> int:
    count: int = state.others["subscriber"].missed
    return count


async def failure(state: State) -> str:
    """Return the error of the next call."""
    try:
        await state.others["subscriber"].receive()
    except AioTensorError as error:
        return f"{type(error).__name__}: {error}"
    return "received"


async def keep(state: State) -> list[bool]:
    """Return whether each tensor that was kept is zero, as this process has written."""
    return [not tensor.any() for tensor in state.tensors]


async def forget(state: State) -> None:
    state.tensors.clear()


async def close(state: State) -> None:
    await state.stack.aclose()


async def start(state: State, subscribers: int, history: int = 0, arena_bytes: int = 1 << 30) -> None:
    opening = Publisher(state.endpoint, history=history, arena_bytes=arena_bytes)
    publisher = await state.stack.enter_async_context(opening)
    state.others["publisher"] = publisher
    await publisher.wait_for_subscribers(subscribers)


async def publish(state: State, count: int, size: int) -> int:
    """Publish patterns, and return the number of the last publication."""
    publisher: Publisher = state.others["publisher"]
    number = -1
    for _ in range(count):
        number = (await publisher.publish(pattern(publisher.statistics().published, size))).number
    return number
