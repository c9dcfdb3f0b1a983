"""Limits of the bodies of messages, and of their tensors."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiotensor import RemoteError, TooLargeError
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.codec.payload import Payload
from tests.channel.parties import Answer, Question, key_options, place, said
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LIMIT = 50_000
TOO_LARGE: dict[str, Callable[[], dict[str, Any]]] = {
    "text": lambda: {"wish": "x" * 60_000},
    "many": lambda: {"more": {str(number): [] for number in range(20_000)}},
}
too_large = pytest.mark.parametrize("make", TOO_LARGE.values(), ids=TOO_LARGE)

ERROR = f"the peer accepts only max_body_bytes={LIMIT}"


@pytest.mark.promise(31)
@too_large
async def test_a_message_that_is_too_large_is_refused_before_it_is_sent(
    make: Callable[[], dict[str, Any]],
) -> None:
    with place() as here:
        async with MessageClient(here, Answer) as client:
            early = [
                asyncio.create_task(call(Question(2, **make()))) for call in (client.request, client.send)
            ]
            await until(lambda: client.statistics().waiting == 2)  # encoded before the limit is known
            async with MessageServer(here, Question, max_body_bytes=LIMIT) as server:
                other = asyncio.create_task(client.request(Question(1)))
                request = await anext(server)
                for call in (
                    *early,
                    client.request(Question(2, **make())),
                    client.send(Question(2, **make())),
                ):
                    with pytest.raises(TooLargeError, match=ERROR) as caught:
                        await call
                    assert caught.value.limit == LIMIT
                    assert caught.value.requested >= 60_000
                await request.answer(Answer(1))
                assert (await other).seed == 1
                seen = client.statistics()
                assert (seen.messages_sent, seen.servers_lost, seen.in_flight, seen.bytes_in_use) == (
                    1,
                    0,
                    0,
                    0,
                )


async def test_a_long_text_or_bytes_beyond_the_limit_are_refused_before_they_are_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("encoding would hold the GIL")

    with place() as here:
        async with (
            MessageServer(here, Any, max_body_bytes=LIMIT) as server,
            MessageClient(here, list[Any], max_body_bytes=LIMIT) as client,
        ):
            asking = asyncio.create_task(client.request(1))
            request = await anext(server)
            with monkeypatch.context() as patch:
                patch.setattr(Payload, "encode_body", fail)
                for message in (
                    b"x" * 200_000,
                    {"name": ["x" * 100_000] * 2},
                    Question(1, wish="x" * 200_000),
                ):
                    for call in (client.request, client.send, request.answer):
                        with pytest.raises(TooLargeError, match=ERROR):
                            await call(message)
            await request.answer([2])
            assert await asking == [2]


@too_large
async def test_an_answer_that_is_too_large_can_be_replaced_or_fails_only_its_request(
    make: Callable[[], dict[str, Any]],
) -> None:
    with place() as here, said():
        async with (
            MessageServer(here, Question) as server,
            MessageClient(here, Question, max_body_bytes=LIMIT) as client,
        ):
            other = asyncio.create_task(client.request(Question(0)))
            waiting = await anext(server)
            asking = asyncio.create_task(client.request(Question(7)))
            async with await anext(server) as request:
                with pytest.raises(TooLargeError, match=ERROR):
                    await request.answer(Question(7, **make()))
                await request.answer(Question(8))
            assert (await asking).seed == 8
            asking = asyncio.create_task(client.request(Question(9)))
            async with await anext(server) as request:
                await request.answer(Question(9, **make()))
            with pytest.raises(RemoteError, match=rf"bytes.*max_body_bytes={LIMIT}") as caught:
                await asking
            assert caught.value.type_name == "TooLargeError"
            await waiting.answer(waiting.message)
            assert (await other).seed == 0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("limit", [None, 60_000, 1 << 20])
async def test_a_body_of_exactly_the_limit_is_accepted_in_both_directions(limit: int | None) -> None:
    text = "x" * ((limit or 3 << 20) - (3 if limit == 60_000 else 5))  # and its length
    with place() as here:
        keys = key_options() if here.startswith("tcp") else ({}, {})
        async with (
            MessageServer(here, str, max_body_bytes=limit, **keys[0]) as server,
            MessageClient(here, str, max_body_bytes=limit, **keys[1]) as client,
        ):
            asking = asyncio.create_task(client.request(text))
            request = await anext(server)
            assert client.statistics().bytes_in_use >= len(text)  # a large body is placed in shared memory
            await request.answer(request.message)
            assert await asking == text
            await until(lambda: client.statistics().bytes_in_use == server.statistics().bytes_in_use == 0)


TENSORS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "many of one number": lambda: [torch.tensor(float(number)) for number in range(6000)],
    "many large ones, and small and empty ones": lambda: [
        *torch.zeros(1500, 9000, dtype=torch.uint8),
        *torch.ones(60, 256),
        *torch.zeros(4000, 0),
    ],
}


@pytest.mark.promise(27)
@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
async def test_large_tensors_do_not_count_towards_max_body_bytes(
    make: Callable[[], list[torch.Tensor]],
) -> None:
    tensors = make()
    total = sum(float(tensor.sum()) for tensor in tensors)
    with place() as here:
        async with (
            MessageServer(here, list[torch.Tensor], max_body_bytes=200_000) as server,
            MessageClient(here, list[torch.Tensor], max_body_bytes=200_000) as client,
        ):
            asking = asyncio.create_task(client.request(tensors))
            async with await anext(server) as request:
                assert [tensor.shape for tensor in request.message] == [tensor.shape for tensor in tensors]
                assert sum(float(tensor.sum()) for tensor in request.message) == total
                await request.answer(request.message)
            assert sum(float(tensor.sum()) for tensor in await asking) == total
