"""Messages do not occupy the event loop for long, and need no threads of the application."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio.from_thread
import anyio.to_thread
import pytest
import torch

from tests.channel import peers
from tests.channel.parties import Answer, Question, channel, place
from tests.conformance.turns import Lengths, Turns, too_long
from tests.selection import COMPLETE
from verification.patterns import pattern
from verification.processes import watch

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

Tensors = dict[str, list[torch.Tensor]]
MESSAGES: dict[str, Callable[[], Tensors]] = {
    "not contiguous": lambda: {"x": [torch.zeros(150 << 10, 1025, dtype=torch.uint8)[:, 1:].t()]},
    "three thousand tiny tensors": lambda: {"x": list(torch.zeros(3000, 3))},
    "a large body": lambda: {str(number): [] for number in range(50_000)},
}
if COMPLETE:
    MESSAGES |= {
        "150 MiB": lambda: {"x": [torch.zeros(150 << 20, dtype=torch.uint8)]},
        "pieces that are not contiguous": lambda: {"x": list(torch.zeros(150, 512, 1024)[:, :, ::2])},
        "not aligned on arrival": lambda: {"x": [torch.zeros(300 << 16, dtype=torch.complex128)]},
    }


@pytest.mark.promise(19)
@pytest.mark.parametrize("make", MESSAGES.values(), ids=MESSAGES)
async def test_neither_a_message_nor_its_answer_keeps_the_loop_busy_for_long(
    make: Callable[[], Tensors],
) -> None:
    tensors = make()
    # Freeing this much memory takes the kernel a while, and happens in the thread of the caller.
    kept: list[object] = []
    async with channel(client={"max_body_bytes": None}, server={"max_body_bytes": None}) as ends:

        async def ask() -> Lengths:
            with Turns() as turns:
                asking = asyncio.create_task(ends.client.request(Question(1, more=tensors)))
                request = await anext(ends.server)
                assert len(request.message.more) == len(tensors)
                kept.append(request.message)
                await request.answer(Answer(1, more=tensors))
                kept.append(await asking)
            return {"request": turns.relative_length}

        assert await too_long(ask) == {}
        kept.clear()


@pytest.mark.extended
@pytest.mark.promise(20)
async def test_an_idle_client_and_its_server_use_no_processor_time() -> None:
    with place() as here:
        async with peers.process() as engine, peers.process() as api:
            await engine.call(peers.open_server, here)
            await api.call(peers.open_client, here)
            for count in (10, 100_000):
                assert await api.call(peers.ask, 1, count)
            for peer in (api, engine):
                await peer.call(peers.held)
            assert await watch.become_idle([engine.pid, api.pid])


# Threads


_LIMIT_S = 60  # for steps that take less than a second, and hung before


@contextmanager
def no_threads_left() -> Iterator[None]:
    """Hold every token of anyio's default limiter, as busy handlers of an application do."""
    limiter = anyio.to_thread.current_default_thread_limiter()
    tokens = [object() for _ in range(int(limiter.total_tokens))]
    for token in tokens:
        limiter.acquire_on_behalf_of_nowait(token)
    try:
        yield
    finally:
        for token in tokens:
            limiter.release_on_behalf_of(token)


@pytest.mark.usefixtures("way")
@pytest.mark.promise(28)
async def test_operations_need_no_thread_of_the_application() -> None:
    more: Tensors = {str(number): [] for number in range(10_000)}
    with no_threads_left():
        async with asyncio.timeout(_LIMIT_S), channel() as ends:
            asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, 200_000), more)))
            request = await anext(ends.server)
            assert request.message.more == more
            await request.answer(Answer(1, tensor=torch.zeros(1 << 10, 2 << 10)[:, ::2]))
            assert (await asking).seed == 1
