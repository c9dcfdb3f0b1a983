"""The library does not depend on the threads of the application."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio.from_thread
import anyio.to_thread
import httpx
import pytest
import torch
import uvicorn
from fastapi import FastAPI

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from tests.channel import peers
from tests.channel.parties import Answer, Place, Question, answer, channel, place
from verification.patterns import pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_LIMIT_S = 60  # for steps that take less than a second, and hung before
_REQUESTS = 60
_COUNT = 200_000  # elements of int64 in an answer: more than 1 MiB


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


async def test_large_replies_arrive_while_all_threads_of_anyio_are_blocked() -> None:
    with place() as here:
        async with (
            asyncio.timeout(_LIMIT_S),
            peers.process(here) as engine,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            await engine.call(peers.open_server, here, answers=False)
            app = FastAPI()

            @app.get("/{seed}")
            def get(seed: int) -> int:
                got = anyio.from_thread.run(client.request, Question(seed, wish=str(_COUNT)))
                assert got.tensor is not None
                return int(got.tensor[-1])

            web = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
            serving = asyncio.create_task(web.serve())
            await until(lambda: web.started)
            [listener] = web.servers[0].sockets
            port = listener.getsockname()[1]
            try:
                async with httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{port}", timeout=_LIMIT_S, trust_env=False
                ) as http:
                    asking = [asyncio.create_task(http.get(f"/{seed}")) for seed in range(_REQUESTS)]
                    threads = anyio.to_thread.current_default_thread_limiter()
                    await until(lambda: client.statistics().in_flight == (threads.total_tokens,))
                    await engine.call(peers.begin_to_answer)
                    got = [int((await one).text) for one in asking]
            finally:
                web.should_exit = web.force_exit = True
                await serving
    assert got == [int(pattern(seed, _COUNT)[-1]) for seed in range(_REQUESTS)]


async def send_and_receive_a_copy(here: Place) -> None:
    async with (
        TensorReceiver(here.tensors) as receiver,
        TensorSender(here.tensors, arena_bytes=64 << 20) as sender,
    ):
        allocated = await sender.allocate((1 << 20,), torch.uint8)
        allocated.fill_(7)
        for tensor in (allocated, pattern(1, 1 << 20), torch.zeros(1 << 10, 1 << 10).t()):
            handle = await sender.send(tensor)
            assert torch.equal(await receiver.receive(handle, copy=True), tensor)


async def ask_with_a_large_body(here: Place) -> None:
    more = {str(number): [] for number in range(10_000)}  # type: dict[str, list[torch.Tensor]]
    async with (
        MessageServer(here.messages, Question) as server,
        MessageClient(here.messages, reply_type=Answer) as client,
    ):
        asking = asyncio.create_task(client.request(Question(1, more=more)))
        request = await anext(server)
        assert request.message.more == more
        await request.reply(Answer(1, tensor=torch.zeros(1 << 10, 1 << 10).t()))
        assert (await asking).seed == 1


async def ask_with_tensors_by_a_sender(here: Place) -> None:
    async with channel() as ends:
        serving = asyncio.create_task(ends.server.serve(answer))
        got = await ends.client.request(Question(2, pattern(2, _COUNT), wish=str(_COUNT)))
        assert got.total == int(pattern(2, _COUNT).sum())
        serving.cancel()


WORKS: dict[str, Callable[[Place], Awaitable[None]]] = {
    "send and receive(copy=True)": send_and_receive_a_copy,
    "a large body and a large reply": ask_with_a_large_body,
    "tensors by a sender": ask_with_tensors_by_a_sender,
}


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
async def test_operations_need_no_thread_of_the_application(
    work: Callable[[Place], Awaitable[None]],
) -> None:
    with place() as here, no_threads_left():
        async with asyncio.timeout(_LIMIT_S):
            await work(here)
