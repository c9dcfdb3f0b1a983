"""Requests that tests send to a client or a server in another process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import torch

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Place, Question, answer
from verification.patterns import BIG, pattern
from verification.processes.peers import Peer, State, fork_and_sleep
from verification.waiting import until

__all__ = [
    "Peer",
    "State",
    "ask",
    "ask_many",
    "begin_to_answer",
    "begin_to_ask",
    "fork_and_sleep",
    "held",
    "listening",
    "open_client",
    "open_server",
    "outcomes",
    "process",
]


@asynccontextmanager
async def process(place: Place) -> AsyncIterator[Peer]:
    """Start a process, and end it with the block."""
    child = Peer(place.tensors)
    try:
        yield child
    finally:
        await child.close()


async def open_client(state: State, /, place: Place, **options: Any) -> None:
    """Open a client with a sender for its tensors."""
    sender = await state.stack.enter_async_context(TensorSender(place.tensors, 4, 64 << 20))
    client = MessageClient(place.messages, sender=sender, reply_type=Answer, **options)
    state.others |= {"sender": sender, "client": await state.stack.enter_async_context(client)}
    state.others["asking"] = []


async def open_server(state: State, /, place: Place, *, answers: bool = True, **options: Any) -> None:
    """Open a server, which answers if `answers` is true."""
    receiver = await state.stack.enter_async_context(TensorReceiver(place.tensors))
    server: MessageServer[Question] = MessageServer(place.messages, Question, receiver=receiver, **options)
    state.others |= {"receiver": receiver, "server": await state.stack.enter_async_context(server)}
    if answers:
        await begin_to_answer(state)


async def begin_to_answer(state: State) -> None:
    """Answer messages in a task of the process."""
    state.others["serving"] = asyncio.create_task(state.others["server"].serve(answer))


@asynccontextmanager
async def listening(
    place: Place, **options: Any
) -> AsyncIterator[tuple[MessageServer[Question], TensorReceiver]]:
    """Open a server here."""
    async with (
        TensorReceiver(place.tensors) as receiver,
        MessageServer(place.messages, Question, receiver=receiver, **options) as server,
    ):
        yield server, receiver


async def ask(state: State, seed: int, count: int = BIG) -> bool:
    """Ask once, and return whether the answer is right."""
    got = await state.others["client"].request(Question(seed, pattern(seed, count), wish="7"))
    return _is_right(got, seed, count)


async def begin_to_ask(state: State, seeds: list[int], count: int = BIG) -> None:
    """Start requests in tasks, and wait until they are sent."""
    state.others["asking"] += [asyncio.create_task(ask(state, seed, count)) for seed in seeds]
    await until(lambda: state.others["client"].statistics().messages_sent >= len(seeds))


async def outcomes(state: State) -> list[bool | Exception]:
    """Wait until all requests have ended, and return their outcomes."""
    asking, state.others["asking"] = state.others["asking"], []
    results: list[bool | Exception] = await asyncio.gather(*asking, return_exceptions=True)
    return results


async def ask_many(state: State, first: int, count: int, at_once: int) -> int:
    """Ask questions of all sizes, `at_once` at a time, and return the number of right answers."""
    seeds = iter(range(first, first + count))
    right = 0

    async def work() -> None:
        nonlocal right
        for seed in seeds:
            is_right = await ask(state, seed, (3, 2000, BIG)[seed % 3])
            right += is_right

    await asyncio.gather(*[work() for _ in range(at_once)])
    return right


async def held(state: State) -> dict[str, object]:
    """Wait until no resources are held for messages, and return the finished requests."""
    others = state.others
    if "client" in others:
        sender, client = others["sender"], others["client"]
        await until(
            lambda: (
                not (
                    sender.statistics().in_flight
                    or sender.statistics().bytes_in_use
                    or sum(client.statistics().in_flight)
                )
            )
        )
        done: dict[str, object] = msgspec.structs.asdict(client.statistics())
        return done
    receiver, server = others["receiver"], others["server"]
    await until(
        lambda: (
            not (receiver.statistics().leases or server.statistics().waiting or server.statistics().in_hand)
        )
    )
    return msgspec.structs.asdict(server.statistics())


def _is_right(got: Answer, seed: int, count: int) -> bool:
    return (
        got.seed == seed
        and got.total == int(pattern(seed, count).sum())
        and got.tensor is not None
        and torch.equal(got.tensor, pattern(seed, 7))
    )
