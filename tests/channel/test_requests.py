"""Requests are answered in any order, with their tensors in place."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from aiotensor import (
    ProtocolError,
    RemoteError,
    TooLargeError,
    UnsupportedTensorError,
    UsageError,
)
from tests.channel.parties import Answer, Channel, Question, channel, said, serving, settled
from verification.inside import sessions_of
from verification.internals import shrink_send_buffer
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

any_way = pytest.mark.usefixtures("way")


@asynccontextmanager
async def served() -> AsyncIterator[Channel]:
    """Open a channel whose server answers."""
    async with channel() as ends, serving(ends.server):
        yield ends
        await settled(ends)


@any_way
@pytest.mark.promise(22)
@pytest.mark.both_loops
async def test_a_request_arrives_with_its_tensors_in_their_places_and_is_answered() -> None:
    async with served() as ends:
        small, large = pattern(1, 5), pattern(2, BIG)
        strided = pattern(3, 4 * BIG)[::2]
        for count in (50, BIG):
            question = Question(7, large, {"a": [small, strided], "b": []}, wish=str(count))
            got = await ends.client.request(question)
            assert (got.seed, got.total) == (7, int(small.sum() + large.sum() + strided.sum()))
            assert got.tensor is not None
            assert torch.equal(got.tensor, pattern(7, count))
            del got


@any_way
@pytest.mark.promise(8)
async def test_tensors_may_be_modified_after_a_call_and_views_of_them_are_writable() -> None:
    async with channel() as ends:
        asked = pattern(1, BIG)
        await ends.client.send(Question(1, asked))
        asked.zero_()
        request = await anext(ends.server)
        assert request.message.tensor is not None
        assert torch.equal(request.message.tensor, pattern(1, BIG))

        asking = asyncio.create_task(ends.client.request(Question(2)))
        answered = pattern(2, BIG)
        assert await (await anext(ends.server)).answer(Answer(2, tensor=answered))
        answered.zero_()
        got = (await asking).tensor
        assert got is not None
        assert torch.equal(got, pattern(2, BIG))
        for view in (request.message.tensor, got):
            view += 1
        del request, got, view, asking
        await settled(ends)


@pytest.mark.promise(39)
async def test_a_received_tensor_is_answered_without_a_copy() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG))))
        request = await anext(ends.server)
        assert await request.answer(Answer(1, tensor=request.message.tensor))
        got = (await asking).tensor
        assert got is not None
        assert torch.equal(got, pattern(1, BIG))
        seen = ends.server.statistics()
        assert (seen.bytes_forwarded, seen.tensors_copied) == (BIG * 8, 0)
        del got, request, asking
        await settled(ends)


@any_way
async def test_requests_are_answered_in_any_order() -> None:
    async with channel() as ends:
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(5)]
        requests = [await anext(ends.server) for _ in range(5)]
        for request in reversed(requests):
            await request.answer(Answer(request.message.seed * 10))

        assert [got.seed for got in await asyncio.gather(*asking)] == [0, 10, 20, 30, 40]


@any_way
async def test_messages_without_an_answer_arrive_in_order_and_answering_them_returns_false() -> None:
    async with channel() as ends:
        for seed, count in enumerate((BIG, 5)):
            await ends.client.send(Question(seed, pattern(seed, count)))
        for seed, count in enumerate((BIG, 5)):
            async with await anext(ends.server) as request:
                assert request.message.tensor is not None
                assert torch.equal(request.message.tensor, pattern(seed, count))
                assert not request.is_wanted
                assert not await request.answer(Answer(1))
        await settled(ends)


async def test_a_tensor_that_is_removed_from_its_message_frees_its_memory_before_the_answer() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(1, pattern(1, BIG))))
        async with await anext(ends.server) as request:
            assert ends.client.statistics().bytes_in_use > 0
            request.message.tensor = None
            await until(lambda: ends.client.statistics().bytes_in_use == 0)
            assert not asking.done()
            await request.answer(Answer(1))
        await asking


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
            await request.answer({"a": object()})
        with pytest.raises(UnsupportedTensorError):
            await request.answer(Answer(1, tensor=torch.eye(3).to_sparse()))
        assert request.is_wanted
        assert await request.answer(Answer(1))
        for again in (request.answer(Answer(2)), request.fail("no")):
            with pytest.raises(UsageError, match="already answered"):
                await again
        assert (await asking).seed == 1


async def test_a_request_that_is_left_without_an_answer_fails() -> None:
    async with channel() as ends:
        asking = asyncio.create_task(ends.client.request(Question(2, pattern(1, BIG))))
        async with await anext(ends.server) as request:
            pass
        with pytest.raises(RemoteError, match="ended without an answer"):
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
            with pytest.raises(RemoteError, match="LookupError: no such model") as caught:
                await asking
            assert caught.value.type_name == "LookupError"
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
        assert ends.client.statistics().messages_sent == 0
        assert ends.server.statistics().messages_received == 0
        await settled(ends)


async def test_a_message_of_the_wrong_type_fails_only_its_request() -> None:
    async with served() as ends:
        with pytest.raises(RemoteError, match=r"Expected `int`, got `str` - at `\$.seed`") as caught:
            await ends.client.request({"seed": "one", "tensor": pattern(1, BIG)})
        assert caught.value.type_name == "ProtocolError"
        with pytest.raises(RemoteError, match="in a field that the type of this decoder does not have"):
            await ends.client.request({"seed": 1, "unknown": pattern(1, BIG)})

        assert (await ends.client.request(Question(2, pattern(2, BIG)))).seed == 2
        assert ends.server.statistics().failures == 2


@any_way
@pytest.mark.promise(10)
async def test_answers_that_were_given_before_a_close_still_arrive() -> None:
    async with channel() as ends:
        asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(8)]
        requests = [await anext(ends.server) for _ in range(8)]
        for request in requests:
            await request.answer(Answer(request.message.seed, tensor=pattern(request.message.seed, 10 * BIG)))
        await ends.server.aclose()
        for seed, got in enumerate(await asyncio.gather(*asking)):
            assert got.tensor is not None
            assert torch.equal(got.tensor, pattern(seed, 10 * BIG))


@any_way
async def test_messages_without_an_answer_survive_their_client() -> None:
    with said() as texts:
        async with channel() as ends:
            for seed in range(5):
                await ends.client.send(Question(seed, pattern(seed, BIG)))
            await ends.client.aclose()
            await until(lambda: ends.server.statistics().clients_lost == 1)
            for seed in range(5):
                request = await anext(ends.server)
                assert request.message.tensor is not None
                assert torch.equal(request.message.tensor, pattern(seed, BIG))
                del request
            await until(lambda: ends.server.statistics().mapped_bytes == 0)
    assert not any("lost:" in text for text in texts)


@pytest.mark.parametrize("is_taken", [True, False])
async def test_no_message_is_delivered_twice_if_its_client_cannot_write_the_next_one(is_taken: bool) -> None:
    with said() as texts:
        async with channel() as ends:
            await ends.client.send(Question(1, pattern(1, BIG)))
            if is_taken:  # which the client does not know when it fails to write
                await anext(ends.server)
            [session] = sessions_of(ends.client)
            shrink_send_buffer(session.transport)  # of this connection: the kernel refuses a longer record
            await ends.client.send(Question(2, wish="x" * 10_000))
            request = await anext(ends.server)
            assert request.message.seed == 2
            del request
            await settled(ends)
            assert ends.client.statistics().servers_lost == 1
    assert sum("a message that was sent is lost" in text for text in texts) == 1


@pytest.mark.promise(29)
async def test_the_error_of_an_answer_of_another_type_keeps_no_memory_of_the_server() -> None:
    async def respond(question: Question) -> list[str]:
        return ["x" * 300_000]  # is placed in shared memory

    async with channel(server={"max_body_bytes": None}) as ends, serving(ends.server, handler=respond):
        with pytest.raises(ProtocolError) as caught:
            await ends.client.request(Question(1))
        await until(lambda: ends.server.statistics().bytes_in_use == 0)
        assert caught.value.__traceback__ is not None
