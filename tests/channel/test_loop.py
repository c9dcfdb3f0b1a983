"""Messages do not occupy the event loop for long, and need no threads of the application."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import anyio.from_thread
import anyio.to_thread
import httpx
import msgspec
import pytest
import torch
import uvicorn
from fastapi import FastAPI

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from tests.channel import peers
from tests.channel.parties import Answer, Place, Question, answer, channel, place
from tests.conformance.turns import Calls, Changes, Lengths, Turns, too_long
from verification import inside
from verification.patterns import pattern
from verification.processes import watch
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


Tensors = Callable[[], list[torch.Tensor]]
MESSAGES = [
    pytest.param(
        lambda: [torch.zeros(150 << 10, 1 << 10, dtype=torch.uint8).t()], id="150 MiB, not contiguous"
    ),
    pytest.param(lambda: [torch.zeros(3)] * 3000, id="three thousand tiny tensors"),
    *[
        pytest.param(make, id=name, marks=pytest.mark.extended)
        for name, make in {
            "150 MiB": lambda: [torch.zeros(150 << 20, dtype=torch.uint8)],
            "150 MiB in pieces that are not contiguous": lambda: [torch.zeros(512, 1024)[:, ::2]] * 150,
            "300 MiB that are not aligned on arrival": lambda: [
                torch.zeros(300 << 16, dtype=torch.complex128)
            ],
        }.items()
    ],
]


@pytest.mark.promise(19)
@pytest.mark.parametrize("make", MESSAGES)
async def test_no_message_keeps_the_loop_busy_for_long(make: Callable[[], list[torch.Tensor]]) -> None:
    tensors = make()
    # Freeing this much memory takes the kernel a while, and happens in the thread of the caller.
    kept: list[object] = []
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):

            async def ask() -> Lengths:
                with Turns() as turns:
                    asking = asyncio.create_task(client.request(Question(1, more={"x": tensors})))
                    request = await anext(server)
                    kept.append(request)
                    assert len(request.message.more["x"]) == len(tensors)
                    await request.reply(Answer(1))
                    await asking
                return {"request": turns.relative_length}

            assert await too_long(ask) == {}


ANSWERS: dict[str, Callable[[], torch.Tensor]] = {
    "taken": lambda: torch.zeros(300 << 16, dtype=torch.complex128),  # not aligned on arrival, so copied then
    "given up": lambda: torch.zeros(400 << 20, dtype=torch.uint8),
}


@pytest.mark.parametrize("fate", ["taken", pytest.param("given up", marks=pytest.mark.extended)])
async def test_no_answer_keeps_the_loop_busy_for_long(fate: str) -> None:
    tensor = ANSWERS[fate]()
    kept: list[object] = []
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):

            async def answer() -> Lengths:
                with Turns() as turns:
                    asking = asyncio.create_task(client.request(Question(1)))
                    request = await anext(server)
                    answering = asyncio.create_task(request.reply(Answer(1, tensor=tensor)))
                    if fate == "taken":
                        kept.append(await asking)
                    else:
                        [client_there] = inside.clients_of(server)
                        [incoming] = client_there.requests.values()
                        await until(lambda: incoming.is_answered)
                        asking.cancel()
                    assert await answering
                    later = asyncio.create_task(client.request(Question(2)))
                    await (await anext(server)).reply(Answer(2))
                    assert (await later).seed == 2  # by now the other one has come, too
                return {fate: turns.relative_length}

            assert await too_long(answer) == {}


async def test_three_thousand_tiny_tensors_are_handled_in_many_iterations() -> None:
    tensors = [torch.zeros(3)] * 3000
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Several) as client,
        ):

            async def ask(tensors: list[torch.Tensor]) -> int:
                with Calls() as calls:
                    asking = asyncio.create_task(client.request(Question(1, more={"x": tensors})))
                    request = await anext(server)
                    assert len(request.message.more["x"]) == len(tensors)
                    await request.reply(Several(tensors))
                    assert len((await asking).tensors) == len(tensors)
                return calls.most

            await ask(tensors[:1])  # the work for the first request alone is not counted
            calls_of_few = await ask(tensors[:100])
            # More than that is left to threads, which do it again from the beginning.
            assert await ask(tensors) < 1.3 * calls_of_few


class Several(msgspec.Struct):
    tensors: list[torch.Tensor]


@dataclass
class BothWays:
    """Ends of a channel whose tensors travel by senders in both directions."""

    client: MessageClient[Several]
    server: MessageServer[Question]
    asker: TensorSender
    questions: TensorReceiver
    answerer: TensorSender
    answers: TensorReceiver


@asynccontextmanager
async def both_ways() -> AsyncIterator[BothWays]:
    with place() as here:
        async with (
            TensorReceiver(here.tensors) as questions,
            TensorReceiver(here.answers) as answers,
            TensorSender(here.tensors) as asker,
            TensorSender(here.answers) as answerer,
            MessageServer(here.messages, Question, receiver=questions, sender=answerer) as server,
            MessageClient(here.messages, sender=asker, receiver=answers, reply_type=Several) as client,
        ):
            yield BothWays(client, server, asker, questions, answerer, answers)


async def test_many_tensors_of_a_sender_are_sent_and_taken_in_many_iterations() -> None:
    tensors = [torch.zeros(4096)] * 1000
    async with both_ways() as ends:
        both = [(ends.asker, ends.questions), (ends.answerer, ends.answers)]
        changes: list[Changes] = []
        for _ in range(2):  # memory that is new is filled by a thread, so each send waits
            with ExitStack() as stack:
                changes = [
                    stack.enter_context(Changes(number))
                    for sender, receiver in both
                    for number in (
                        lambda sender=sender: sender.statistics().tensors_sent,
                        lambda receiver=receiver: receiver.statistics().tensors_taken,
                    )
                ]
                asking = asyncio.create_task(ends.client.request(Question(1, more={"x": tensors})))
                request = await anext(ends.server)
                await request.reply(Several(tensors))
                answer = await asking
            leases = [receiver.statistics().leases for _, receiver in both]
            assert (len(answer.tensors), leases) == (1000, [0, 1000])
            del answer, request, asking
            for sender, _ in both:
                await settled(sender)
        assert all(0 < change.most <= 100 for change in changes)


@pytest.mark.parametrize("given_up", ["while it is sent", "while it is taken", "while the answer is taken"])
async def test_a_request_of_many_tensors_that_is_cancelled_between_two_iterations_leaves_nothing(
    given_up: str,
) -> None:
    tensors = [torch.zeros(4096)] * 1000
    async with both_ways() as ends:
        for amount in (1000, 500):  # the first time memory is new, so that each send waits
            asking = asyncio.create_task(ends.client.request(Question(1, more={"x": tensors[:amount]})))
            before = ends.asker.statistics().tensors_sent
            if given_up == "while it is sent" and amount == 500:
                await until(lambda before=before: ends.asker.statistics().tensors_sent > before)  # type: ignore[misc]
                assert ends.asker.statistics().tensors_sent < before + amount
                asking.cancel()
                await asyncio.wait([asking])
                break
            before = ends.questions.statistics().tensors_taken
            taking = asyncio.ensure_future(anext(ends.server))
            if given_up == "while it is taken" and amount == 500:
                await until(lambda before=before: ends.questions.statistics().tensors_taken > before)  # type: ignore[misc]
                assert ends.questions.statistics().tensors_taken < before + amount
                taking.cancel()
                await asyncio.wait([taking])
                taking = asyncio.ensure_future(anext(ends.server))  # continues with the next request
            request = await taking
            assert len(request.message.more["x"]) == amount
            before = ends.answers.statistics().tensors_taken
            replying = asyncio.create_task(request.reply(Several(tensors[:amount])))
            if given_up == "while the answer is taken" and amount == 500:
                await until(lambda before=before: ends.answers.statistics().tensors_taken > before)  # type: ignore[misc]
                assert ends.answers.statistics().tensors_taken < before + amount
                asking.cancel()
                await asyncio.wait([asking])
            await asyncio.wait([asking])
            await replying
            del request, taking, asking, replying
            for sender in (ends.asker, ends.answerer):
                await settled(sender)
        for sender, receiver in ((ends.asker, ends.questions), (ends.answerer, ends.answers)):
            await settled(sender)
            assert (receiver.statistics().unclaimed_tensors, receiver.statistics().leases) == (0, 0)


@pytest.mark.promise(20)
async def test_an_idle_client_and_its_server_use_no_processor_time() -> None:
    with place() as here:
        async with peers.process(here) as engine, peers.process(here) as api:
            await engine.call(peers.open_server, here)
            await api.call(peers.open_client, here)
            for count in (10, 100_000):
                assert await api.call(peers.ask, 1, count)
            for peer in (api, engine):
                await peer.call(peers.held)
            assert await watch.become_idle([engine.pid, api.pid])


# Threads


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


@pytest.mark.promise(28)
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


@pytest.mark.promise(28)
@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
async def test_operations_need_no_thread_of_the_application(
    work: Callable[[Place], Awaitable[None]],
) -> None:
    with place() as here, no_threads_left():
        async with asyncio.timeout(_LIMIT_S):
            await work(here)
