"""Arguments: numbers of numpy work like Python's, and wrong objects raise errors that name a remedy."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from aiotensor import RemoteError, TensorReceiver, TensorSender, blocking
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.queues import MessageQueue
from aiotensor.ranks import RankPipe
from tests.channel.parties import Place, place
from verification.patterns import BIG, pattern

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

# Type checkers refuse numbers of numpy, but values that other code has computed are often such numbers.
_N: Any = np.int64(4)
_ONE: Any = np.int64(1)
_BYTES: Any = np.int64(1 << 20)
_S: Any = np.float32(60)


@pytest.fixture
def here() -> Any:
    """Return addresses for messages and tensors."""
    with place() as here:
        yield here


async def _send(here: Place) -> torch.Tensor:
    async with (
        TensorReceiver(
            here.tensors, max_senders=_N, max_mapped_bytes=_BYTES, max_unclaimed_messages=_N, max_wait_s=_S
        ) as receiver,
        TensorSender(
            here.tensors, _N, _BYTES, keep_warm_s=_S, long_wait_s=_S, max_wait_s=_S, grace_s=_S
        ) as sender,
    ):
        await sender.ready(nbytes=_N)
        return (await receiver.receive(await sender.send(pattern(1, BIG)))).clone()


async def _request(here: Place) -> torch.Tensor:
    async def answer(message: torch.Tensor) -> torch.Tensor:
        return message

    async def answer_all(messages: list[torch.Tensor]) -> list[torch.Tensor]:
        return messages

    async with (
        MessageServer(
            here.messages,
            torch.Tensor,
            max_clients=_N,
            max_waiting=_N,
            max_waiting_bytes=_BYTES,
            high_water_mark=_N,
            max_part_bytes=_BYTES,
            max_body_bytes=_BYTES,
            linger_s=_S,
        ) as server,
        MessageClient(
            here.messages,
            reply_type=torch.Tensor,
            high_water_mark=_N,
            max_part_bytes=_BYTES,
            max_body_bytes=_BYTES,
            max_wait_s=_S,
            grace_s=_S,
            linger_s=_S,
        ) as client,
    ):
        serving = asyncio.create_task(
            server.serve(answer_all, max_batch=_ONE, batch_wait_s=_S, max_concurrent=_N)
        )
        answered = await client.request(pattern(1, BIG))
        await server.aclose()
        await serving
        return answered


async def _publish(here: Place) -> torch.Tensor:
    async with (
        Publisher(
            here.tensors,
            arena_bytes=_BYTES,
            max_behind=_N,
            max_held_bytes=_BYTES,
            history=_ONE,
            max_subscribers=_N,
            keep_warm_s=_S,
            long_wait_s=_S,
            max_wait_s=_S,
        ) as publisher,
        Subscriber(here.tensors, torch.Tensor, max_mapped_bytes=_BYTES, max_wait_s=_S) as subscriber,
    ):
        await publisher.wait_for_subscribers(_ONE)
        await publisher.publish(pattern(1, BIG))
        return (await subscriber.receive()).message.clone()


async def _put(here: Place) -> torch.Tensor:
    with MessageQueue(
        torch.Tensor,
        producers=_ONE,
        consumers=_ONE,
        max_messages=_N,
        arena_bytes=_BYTES,
        max_body_bytes=_BYTES,
        grace_s=_S,
    ) as queue:
        async with queue.consumer() as consumer, queue.producer() as producer:
            await producer.put(pattern(1, BIG), timeout=_S)
            return (await consumer.get(timeout=_S)).clone()


async def _pipe(here: Place) -> torch.Tensor | None:
    store = HashStore()
    async with AsyncExitStack() as stack:
        pipes = [
            RankPipe(
                store,
                _ONE * (1 - rank),
                rank=_ONE * rank,
                world_size=_ONE * 2,
                max_bytes=_BYTES,
                max_wait_s=_S,
            )
            for rank in range(2)
        ]
        low, high = await asyncio.gather(*map(stack.enter_async_context, pipes))
        await low.send(pattern(1, BIG))
        return await high.receive(copy=True)


@pytest.mark.parametrize("use", [_send, _request, _publish, _put, _pipe])
async def test_numbers_of_numpy_are_valid_limits(
    use: Callable[[Place], Awaitable[torch.Tensor | None]], here: Place
) -> None:
    received = await use(here)
    assert received is not None
    assert torch.equal(received, pattern(1, BIG))


def test_numbers_of_the_wrong_type_are_refused_with_their_name(here: Place) -> None:
    roles: list[tuple[Callable[..., object], str]] = [
        (lambda **wrong: TensorReceiver(here.tensors, **wrong), "max_senders"),
        (lambda **wrong: TensorSender(here.tensors, **wrong), "arena_bytes"),
        (lambda **wrong: MessageServer(here.messages, int, **wrong), "max_clients"),
        (lambda **wrong: MessageClient(here.messages, reply_type=int, **wrong), "max_body_bytes"),
        (lambda **wrong: Publisher(here.tensors, **wrong), "max_behind"),
        (lambda **wrong: Subscriber(here.tensors, **wrong), "max_mapped_bytes"),
        (lambda **wrong: MessageQueue(**wrong), "max_messages"),
    ]
    for make, limit in roles:
        for wrong in ("5", 1.5):
            with pytest.raises(TypeError, match=f"{limit} must be an integer, got {wrong!r}"):
                make(**{limit: wrong})
    for make, _ in roles[:2]:
        with pytest.raises(TypeError, match="max_wait_s must be a number of seconds, got '5'"):
            make(max_wait_s="5")


def test_objects_for_threads_and_for_event_loops_are_not_mixed(here: Place) -> None:
    threads = (blocking.TensorSender(here.tensors), blocking.TensorReceiver(here.tensors))
    loops = (TensorSender(here.tensors), TensorReceiver(here.tensors))
    roles: list[tuple[Callable[..., object], Any, str]] = [
        (lambda **ends: MessageServer(here.messages, int, **ends), threads, "aiotensor"),
        (lambda **ends: MessageClient(here.messages, reply_type=int, **ends), threads, "aiotensor"),
        (lambda **ends: blocking.MessageServer(here.messages, int, **ends), loops, "aiotensor.blocking"),
        (
            lambda **ends: blocking.MessageClient(here.messages, reply_type=int, **ends),
            loops,
            "aiotensor.blocking",
        ),
    ]
    for make, (sender, receiver), package in roles:
        for one in (sender, [sender]):
            with pytest.raises(TypeError, match=rf"sender must be an {package}\.TensorSender, got <"):
                make(sender=one)
        with pytest.raises(TypeError, match=rf"receiver must be an {package}\.TensorReceiver, got <"):
            make(receiver=receiver)


async def test_the_wrong_with_statement_names_the_right_one(here: Place) -> None:
    with (
        pytest.raises(TypeError, match="use `async with` for this TensorSender, or `with` for an"),
        TensorSender(here.tensors),  # type: ignore[attr-defined]
    ):
        pass
    with pytest.raises(TypeError, match="use `with` for this TensorSender, or `async with` for the class in"):
        async with blocking.TensorSender(here.tensors):  # type: ignore[attr-defined]
            pass


async def test_a_handler_of_the_wrong_kind_is_reported(here: Place) -> None:
    def answer(message: object) -> object:
        return message

    async def answer_in_a_loop(message: object) -> object:
        return message

    wrong: Any = answer
    options: dict[str, Any]
    for options in ({}, {"max_batch": 2}):
        async with (
            MessageServer(here.messages, int) as server,
            MessageClient(here.messages, reply_type=int) as client,
        ):
            serving = asyncio.create_task(server.serve(wrong, **options))
            with pytest.raises(RemoteError, match="in place of a coroutine: define it with `async def`"):
                await client.request(1)
            await server.aclose()
            await serving

    def serve_in_a_thread() -> None:
        with (
            blocking.MessageServer(here.messages, int) as server,
            pytest.raises(TypeError, match="is a coroutine function"),
        ):
            server.serve(answer_in_a_loop)

    await asyncio.to_thread(serve_in_a_thread)
