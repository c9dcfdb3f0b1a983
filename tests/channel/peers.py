"""Requests that tests send to a client or a server in another process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import torch

from aiotensor import TensorQueue
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Question, answer
from verification.patterns import BIG, pattern
from verification.processes.peers import Peer
from verification.processes.peers import State as State
from verification.waiting import until


@asynccontextmanager
async def process() -> AsyncIterator[Peer]:
    """Start a process, and end it with the block."""
    child = Peer(TensorQueue())  # which clients and servers do not use
    try:
        yield child
    finally:
        await child.close()


async def open_client(state: State, /, place: str, **options: Any) -> None:
    """Open a client."""
    client = MessageClient(place, Answer, 4, 64 << 20, **options)
    state.others |= {"client": await state.stack.enter_async_context(client), "asking": []}


async def open_server(state: State, /, place: str, *, answers: bool = True, **options: Any) -> str:
    """Open a server, which answers if `answers` is true, and return its address."""
    server: MessageServer[Question] = MessageServer(place, Question, **options)
    state.others |= {"server": await state.stack.enter_async_context(server), "taken": []}
    if answers:
        await begin_to_answer(state)
    return server.address


async def begin_to_answer(state: State) -> None:
    """Answer messages in a task of the process."""
    state.others["serving"] = asyncio.create_task(state.others["server"].serve(answer))


async def take(state: State, count: int) -> list[int]:
    """Take requests without answering them, and return their seeds."""
    taken = [await anext(state.others["server"]) for _ in range(count)]
    state.others["taken"] += taken
    return [request.message.seed for request in taken]


async def close_server(state: State) -> None:
    """Close the server."""
    await state.others["server"].aclose()


async def ask(state: State, seed: int, count: int = BIG) -> bool:
    """Ask once, and return whether the answer is right."""
    got = await state.others["client"].request(Question(seed, pattern(seed, count), wish=str(count)))
    total = int(pattern(seed, count).sum())
    return (got.seed, got.total) == (seed, total) and torch.equal(got.tensor, pattern(seed, count))


async def begin_to_ask(state: State, seeds: list[int], count: int = BIG) -> None:
    """Start requests in tasks, and wait until they are sent."""
    state.others["asking"] += [asyncio.create_task(ask(state, seed, count)) for seed in seeds]
    await until(lambda: state.others["client"].statistics().messages_sent >= len(seeds))


async def all_taken(state: State) -> None:
    """Wait until the client is notified that its requests were taken."""
    await until(lambda: state.others["client"].statistics().in_flight == 0)


async def outcomes(state: State) -> list[bool | Exception]:
    """Wait until all requests have ended, and return their outcomes."""
    asking, state.others["asking"] = state.others["asking"], []
    results: list[bool | Exception] = await asyncio.gather(*asking, return_exceptions=True)
    return results


async def held(state: State) -> dict[str, object]:
    """Wait until no resources are held for messages, and return the statistics."""
    if (client := state.others.get("client")) is not None:
        await until(lambda: client.statistics().in_flight == client.statistics().bytes_in_use == 0)
        return msgspec.structs.asdict(client.statistics())
    server = state.others["server"]
    await until(
        lambda: not (server.statistics().leases or server.statistics().waiting or server.statistics().in_hand)
    )
    return msgspec.structs.asdict(server.statistics())
