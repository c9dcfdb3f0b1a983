"""Requests are answered in any order, with their tensors in place."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
import torch

from aiotensor import (
    ClosedError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    TensorReceiver,
    TensorSender,
    TooLargeError,
    UnsupportedTensorError,
    UsageError,
)
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.codec import TensorMeta
from tests.channel.parties import Answer, Channel, Question, answer, channel, place, said, settled
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

any_way = pytest.mark.usefixtures("way")


@asynccontextmanager
async def served(max_concurrent_videos: int = 8) -> AsyncIterator[Channel]:
    """A channel whose server answers."""
    async with channel(max_concurrent_videos) as ends:
        serving = asyncio.create_task(ends.server.serve(answer))
        yield ends
        await settled(ends)
        await ends.server.aclose()
        await serving


@any_way
@pytest.mark.promise(22)
@pytest.mark.both_loops
async def test_a_request_arrives_with_its_tensors_in_their_places_and_is_answered() -> None:
    async with served() as ends:
        small, large = pattern(1, 5), pattern(2, BIG)
        question = Question(7, large, {"a": [small, large + 1], "b": []}, wish="50")

        got = await ends.client.request(question)

        assert got.seed == 7
        assert got.total == int(small.sum() + large.sum() + (large + 1).sum())
        assert got.tensor is not None
        assert torch.equal(got.tensor, pattern(7, 50))


async def test_tied_tensors_of_a_request_travel_once_and_arrive_tied() -> None:
    async with channel() as ends:
        tensor = pattern(1, BIG)
        asking = asyncio.create_task(ends.client.request(Question(7, tensor, {"tied": [tensor.detach()]})))
        async with await anext(ends.server) as request:
            message = request.message
            assert message.tensor is not None
            assert torch.equal(message.tensor, tensor)
            message.tensor.zero_()
            assert not message.more["tied"][0].any()
            await request.reply(Answer(7))
            del message
        await asking
        assert ends.sender.statistics().tensors_sent == 1
        del request
        await settled(ends)


@any_way
async def test_requests_are_answered_in_any_order() -> None:
    async with channel() as ends:
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(5)]
        requests = [await anext(ends.server) for _ in range(5)]
        for request in reversed(requests):
            await request.reply(Answer(request.message.seed * 10))

        assert [got.seed for got in await asyncio.gather(*asking)] == [0, 10, 20, 30, 40]


@any_way
async def test_a_message_without_an_answer_arrives_and_its_reply_returns_false() -> None:
    async with channel() as ends:
        tensor = pattern(1, BIG)
        await ends.client.send(Question(1, tensor))
        tensor.zero_()  # it is ours again
        await ends.client.send(Question(2, pattern(2, 5)))

        for _ in range(2):
            async with await anext(ends.server) as request:
                seed = request.message.seed  # in any order: one does not wait for the tensors of another
                assert request.message.tensor is not None
                assert torch.equal(request.message.tensor, pattern(seed, BIG if seed == 1 else 5))
                assert not request.is_wanted
                assert not await request.reply(Answer(1))
        await settled(ends)


@any_way
async def test_without_a_sender_tensors_arrive_in_the_message_and_are_writable() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            large, strided = pattern(1, BIG), pattern(2, 4 * BIG)[::2]
            asking = asyncio.create_task(client.request(Question(1, large, {"x": [strided, pattern(3, 3)]})))
            request = await anext(server)
            got = request.message
            assert got.tensor is not None
            assert torch.equal(got.tensor, large)
            assert torch.equal(got.more["x"][0], strided)
            got.tensor += 1  # it is writable
            answered = pattern(9, BIG)
            assert await request.reply(Answer(1, tensor=answered))
            answered.zero_()  # it is ours again
            received = (await asking).tensor
            assert received is not None
            assert torch.equal(received, pattern(9, BIG))
            received += 1


@any_way
@pytest.mark.promise(8)
async def test_a_tensor_sent_without_a_sender_may_be_modified_after_send() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            for seed in range(10):
                tensor = pattern(seed, BIG)
                await client.send(Question(seed, tensor))
                tensor.zero_()
                request = await anext(server)
                assert request.message.tensor is not None
                assert torch.equal(request.message.tensor, pattern(seed, BIG))


async def test_numpy_arrays_can_be_sent_in_a_message() -> None:
    async with served() as ends:
        array = np.arange(BIG)
        got = await ends.client.request({"seed": 1, "tensor": array, "more": {"x": [np.arange(3)]}})
        assert got.total == int(array.sum()) + 3


async def test_a_message_needs_one_permit_or_none_if_its_tensors_are_small() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(
            ends.client.request(Question(1, pattern(1, BIG), {"x": [pattern(i, BIG) for i in range(3)]}))
        )
        await until(lambda: ends.server.statistics().waiting == 1)
        assert ends.sender.statistics().in_flight == 1
        assert ends.sender.statistics().tensors_sent == 4
        request = await anext(ends.server)
        assert torch.equal(request.message.more["x"][2], pattern(2, BIG))
        await request.reply(Answer(1))
        assert (await asking).seed == 1

        asking = asyncio.create_task(ends.client.request(Question(2, pattern(2, 5))))
        request = await anext(ends.server)
        assert ends.sender.statistics().messages_sent == 1
        assert request.message.tensor is not None
        assert torch.equal(request.message.tensor, pattern(2, 5))
        await request.reply(Answer(2))
        await asking
        del request
        await settled(ends)


@pytest.mark.promise(14)
async def test_tensors_are_taken_together_with_their_request() -> None:
    async with channel(max_concurrent_videos=2) as ends:
        asking = [
            asyncio.create_task(ends.client.request(Question(seed, pattern(seed, BIG)))) for seed in range(4)
        ]
        await until(lambda: ends.server.statistics().waiting == 2)
        assert ends.sender.statistics().waiting == 2  # for a permit

        for _ in range(4):
            async with await anext(ends.server) as request:
                await request.reply(Answer(request.message.seed))
        assert sorted(got.seed for got in await asyncio.gather(*asking)) == [0, 1, 2, 3]
        await settled(ends)


async def test_a_tensor_that_is_removed_from_its_message_frees_its_memory_before_the_answer() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG))))
        async with await anext(ends.server) as request:
            assert ends.sender.statistics().bytes_in_use > 0
            request.message.tensor = None
            await until(lambda: ends.sender.statistics().bytes_in_use == 0)
            assert not asking.done()
            await request.reply(Answer(1))
        await asking


async def test_an_exception_of_the_handler_arrives_with_its_type_and_text() -> None:
    with said() as texts:
        async with served() as ends:
            with pytest.raises(RemoteError, match="ValueError: no answer to 3") as caught:
                await ends.client.request(Question(3, pattern(3, BIG), wish="raise"))
            assert caught.value.type_name == "ValueError"

            assert (await ends.client.request(Question(4))).seed == 4
    [text] = texts
    assert "ValueError: no answer to 3" in text


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (KeyError("frames"), "KeyError: 'frames'"),
        ("busy", "busy"),
        (ValueError("\udcff" * 30_000), "ValueError: .*udcff"),  # it cannot be encoded, and is long
    ],
    ids=["exception", "text", "unusual text"],
)
async def test_a_request_can_fail_with_an_exception_or_a_text(reason: Exception | str, text: str) -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        request = await anext(ends.server)
        assert await request.fail(reason)
        with pytest.raises(RemoteError, match=text):
            await asking


async def test_a_request_is_answered_once() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        request = await anext(ends.server)
        with pytest.raises(TypeError, match="a message cannot contain a 'object'"):
            await request.reply({"a": object()})
        with pytest.raises(UnsupportedTensorError):
            await request.reply(Answer(1, tensor=torch.eye(3).to_sparse()))
        assert request.is_wanted
        assert await request.reply(Answer(1))
        for again in (request.reply(Answer(2)), request.fail("no")):
            with pytest.raises(UsageError, match="already answered"):
                await again
        assert (await asking).seed == 1


async def test_a_request_that_is_left_without_an_answer_fails() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(2, pattern(1, BIG))))
        async with await anext(ends.server) as request:
            pass
        with pytest.raises(RemoteError, match="ended without a reply"):
            await asking
        with pytest.raises(UsageError, match="block has ended"):
            _ = request.message
        await settled(ends)


@pytest.mark.promise(31)
async def test_an_exception_in_the_block_of_a_request_is_sent_to_the_client() -> None:
    with said() as texts:
        async with channel() as ends:
            asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG))))
            async with await anext(ends.server) as request:
                raise LookupError("no such model")
            with pytest.raises(RemoteError, match="LookupError: no such model"):
                await asking
            with pytest.raises(UsageError, match="already entered"):
                await request.__aenter__()
            await settled(ends)
    assert "no such model" in texts[0]


@pytest.mark.promise(11)
async def test_a_message_that_cannot_be_encoded_acquires_no_resources() -> None:
    async with channel(arena_bytes=1 << 20) as ends:
        with pytest.raises(TypeError, match="a message cannot contain a 'object'"):
            await ends.client.request({"x": object()})
        with pytest.raises(UnsupportedTensorError, match="gradient history"):
            await ends.client.request(Question(1, torch.ones(3, requires_grad=True) * 2))
        with pytest.raises(TooLargeError):
            await ends.client.request(Question(1, torch.zeros(1 << 20)))
        assert ends.sender.statistics().messages_sent == 0
        assert ends.server.statistics().messages_received == 0
        await settled(ends)


class Pixels(msgspec.Struct):
    """A message whose tensor has a fixed dtype."""

    frames: Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8)]


async def test_a_tensor_that_does_not_match_its_annotation_is_refused_before_it_is_copied() -> None:
    async with served() as ends:
        await ends.client.ready()
        text = r"`\$\.frames` does not match its annotation: expected uint8 of any shape, found int64"
        with pytest.raises(TypeError, match=text):
            await ends.client.request(Pixels(pattern(1, BIG)))
        assert ends.sender.statistics().peak_bytes_in_use == 0


async def test_a_message_of_the_wrong_type_fails_only_its_request() -> None:
    async with served() as ends:
        with pytest.raises(RemoteError, match=r"Expected `int`, got `str` - at `\$.seed`") as caught:
            await ends.client.request({"seed": "one", "tensor": pattern(1, BIG)})
        assert caught.value.type_name == "ProtocolError"
        with pytest.raises(RemoteError, match="in a field that the type of this decoder does not have"):
            await ends.client.request({"seed": 1, "unknown": pattern(1, BIG)})

        assert (await ends.client.request(Question(2, pattern(2, BIG)))).seed == 2
        assert ends.server.statistics().failures == 2


async def test_an_answer_of_the_wrong_type_fails_only_its_request() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1)))
        await (await anext(ends.server)).reply({"seed": "one"})
        with pytest.raises(ProtocolError, match=r"Expected `int`, got `str` - at `\$.seed`"):
            await asking

        asking = asyncio.create_task(ends.client.request(Question(2)))
        await (await anext(ends.server)).reply(Answer(2))
        assert (await asking).seed == 2


@any_way
@pytest.mark.promise(10)
async def test_answers_that_were_given_before_a_close_still_arrive() -> None:
    async with channel() as ends:
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(10)]
        requests = [await anext(ends.server) for _ in range(10)]
        for request in requests:
            await request.reply(Answer(request.message.seed))
        await ends.server.aclose()
        assert [got.seed for got in await asyncio.gather(*asking)] == list(range(10))


async def test_messages_without_an_answer_survive_their_client() -> None:
    with place() as here:
        async with MessageServer(here.messages, Question) as server:
            async with MessageClient(here.messages, reply_type=Answer) as client:
                for seed in range(5):
                    await client.send(Question(seed, pattern(seed, BIG)))
            await until(lambda: server.statistics().clients_lost == 1)
            for seed in range(5):
                request = await anext(server)
                assert request.message.seed == seed


async def test_clients_and_servers_can_be_opened_only_once() -> None:
    async with channel() as ends:
        for opening in (ends.client.__aenter__(), ends.server.__aenter__()):
            with pytest.raises(UsageError, match="already open"):
                await opening
    for opening in (ends.client.__aenter__(), ends.server.__aenter__()):
        with pytest.raises(ClosedError, match="create a new one"):
            await opening
    unopened = MessageClient("ipc:///tmp/nowhere", reply_type=Answer)
    with pytest.raises(UsageError, match="not open yet"):
        await unopened.request(Question(1))


async def test_a_sender_is_used_only_for_answers_to_the_client_of_its_receiver() -> None:
    with place() as here:
        async with AsyncExitStack() as stack:
            open_ = stack.enter_async_context
            receiver = await open_(TensorReceiver(here.answers))
            sender = await open_(TensorSender(here.answers, max_concurrent_videos=1))
            server = await open_(MessageServer(here.messages, Question, sender=[sender]))
            near = await open_(MessageClient(here.messages, receiver=receiver, reply_type=Answer))
            far = await open_(MessageClient(here.messages, reply_type=Answer))
            await until(lambda: sender.receiver_id == receiver.id)
            serving = asyncio.create_task(server.serve(answer))

            for client, sent in ((near, 1), (far, 1), (near, 2)):
                got = (await client.request(Question(5, wish=str(BIG)))).tensor
                assert got is not None
                assert torch.equal(got, pattern(5, BIG))
                assert sender.statistics().tensors_sent == sent
                del got
            await until(lambda: sender.statistics().in_flight + sender.statistics().bytes_in_use == 0)
            await server.aclose()
            await serving


async def test_a_request_with_handles_fails_at_a_server_without_a_receiver() -> None:
    with place() as here:
        async with (
            TensorReceiver(here.tensors),
            TensorSender(here.tensors) as sender,
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, sender=sender, reply_type=Answer) as client,
        ):
            with pytest.raises(RemoteError, match="this server has no receiver"):
                await client.request(Question(1, torch.zeros(100_000)))
            assert server.statistics().failures == 1
            await until(lambda: sender.statistics().in_flight == 0)


async def test_a_sender_connected_to_another_receiver_raises_peer_lost_error() -> None:
    with place() as here:
        async with (
            TensorReceiver(here.tensors) as receiver,
            TensorReceiver(here.answers),
            TensorSender(here.answers) as astray,
            MessageServer(here.messages, Question, receiver=receiver),
            MessageClient(here.messages, sender=astray, reply_type=Answer) as client,
        ):
            with pytest.raises(PeerLostError, match="were sent to a receiver other than"):
                await client.request(Question(1, pattern(1, BIG)))
            await until(lambda: astray.statistics().in_flight == 0)


async def test_none_is_a_message_like_any_other() -> None:
    async def answer(message: object) -> object:
        return [message]

    async def answer_all(messages: list[object]) -> list[object]:
        return [[message] for message in messages]

    async def iterate(server: MessageServer[Any]) -> None:
        async for request in server:
            async with request:
                await request.reply([request.message])

    ways: list[Callable[[MessageServer[Any]], Coroutine[Any, Any, None]]] = [
        lambda server: server.serve(answer),
        lambda server: server.serve(answer_all, max_batch=4),
        iterate,
    ]
    for serve in ways:
        with place() as here:
            async with (
                MessageServer(here.messages, Any) as server,
                MessageClient(here.messages, reply_type=list[None]) as client,
            ):
                serving = asyncio.create_task(serve(server))
                assert await asyncio.gather(*(client.request(None) for _ in range(3))) == [[None]] * 3
                await server.aclose()
                await serving
