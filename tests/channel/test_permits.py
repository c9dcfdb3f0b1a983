"""Permits of a client, which are acquired before the tensors of a request exist, and waits for them."""

import asyncio
import weakref
from contextlib import AsyncExitStack, suppress

import pytest
import torch

from aiotensor import ClosedError, TooLargeError, UsageError, WouldBlockError
from aiotensor.channel import MessageClient, MessageServer, Permit
from tests.cancelling import Attempt, cancel_everywhere
from tests.channel.parties import (
    Answer,
    Question,
    answer_one,
    channel,
    channels,
    place,
    serving,
    settled,
    still_waits,
)
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SHORT_S = 0.02


@pytest.mark.usefixtures("way")
async def test_tensors_of_a_permit_are_sent_without_a_copy_and_with_the_permit_alone() -> None:
    async with channel(1, client={"max_wait_s": 5}) as ends, serving(ends.server):
        async with ends.client.permit() as permit:
            first, second = await asyncio.gather(
                permit.allocate((BIG,), torch.int64), permit.allocate((3,), torch.int64)
            )
            first.copy_(pattern(1, BIG))
            second.copy_(pattern(2, 3))
            assert ends.client.statistics().bytes_in_use >= BIG * 8
            got = await ends.client.request(Question(5, first, {"more": [second]}), inside=permit)
            assert got.total == int(pattern(1, BIG).sum() + pattern(2, 3).sum())
            assert ends.client.statistics().tensors_copied == 0
        del first, second
        await settled(ends)


async def test_a_permit_is_for_one_request_of_its_client_in_its_block() -> None:
    async with channel(1) as ends, serving(ends.server):
        client = ends.client
        async with client.permit() as permit, MessageClient(ends.place, Answer) as other:
            with pytest.raises(UsageError, match="already entered"):
                await permit.__aenter__()
            with pytest.raises(ValueError, match="must be a permit of this client"):
                await other.request(Question(0), inside=permit)
            await client.request(Question(1), inside=permit)
            for misuse in (
                client.request(Question(2), inside=permit),
                client.send(Question(2), inside=permit),
                permit.allocate((3,), torch.int64),
            ):
                with pytest.raises(UsageError, match="not in use"):
                    await misuse
        async with client.permit() as permit:
            pass
        with pytest.raises(UsageError, match="not in use"):
            await client.request(Question(3), inside=permit)
        await client.request(Question(4))
    with pytest.raises(ClosedError):
        client.permit()


@pytest.mark.promise(14)
async def test_permits_in_use_never_exceed_max_concurrent_videos() -> None:
    async with channel(2, client={"max_wait_s": 0.1}) as ends, AsyncExitStack() as held:
        for _ in range(2):
            await held.enter_async_context(ends.client.permit())
        for call in (ends.client.permit().__aenter__(), ends.client.send(Question(1))):
            with pytest.raises(
                WouldBlockError, match=r"no permit was free for 0.1 s \(2 of 2 messages"
            ) as caught:
                await call
            assert caught.value.messages is not None
            assert caught.value.messages.in_use == 2
        assert [holder.state for holder in ends.client.statistics().holders] == [
            "acquired, its request not begun"
        ] * 2
        await held.aclose()
        async with ends.client.permit():
            pass


@pytest.mark.promise(29)
@pytest.mark.usefixtures("no_collections")
async def test_a_permit_is_freed_without_a_collection() -> None:
    async with channel() as ends, serving(ends.server):

        async def use(message: dict[str, object] | None) -> "weakref.ref[Permit]":
            async with ends.client.permit() as permit:
                frames = await permit.allocate((BIG,), torch.int64)
                if message is not None:
                    with suppress(TypeError):
                        await ends.client.request({"seed": 1, "tensor": frames, **message}, inside=permit)
            return weakref.ref(permit)

        for message in (None, {}, {"wish": object()}):  # no request, and one that succeeds or fails
            permit = await use(message)
            await until(lambda: permit() is None)  # noqa: B023
            await settled(ends)


@pytest.mark.promise(14)
async def test_calls_that_hold_all_memory_and_wait_for_more_raise_would_block_error() -> None:
    async with channel(2, BIG * 8 + (1 << 16)) as ends, ends.client.permit() as permit:
        first = await permit.allocate((BIG,), torch.int64)
        with pytest.raises(TooLargeError):
            await permit.allocate((2 * BIG,), torch.int64)
        with pytest.raises(WouldBlockError, match="all shared memory is used by permits") as caught:
            await permit.allocate((BIG,), torch.int64)
        assert caught.value.bytes is not None
        assert caught.value.bytes.in_use >= BIG * 8
        del first


# `ready`


async def test_ready_waits_for_a_server_and_with_bytes_for_a_permit_and_memory() -> None:
    with place() as here:
        async with MessageClient(here, Answer, 1, 1 << 20) as client:
            ready = [asyncio.create_task(client.ready(nbytes=nbytes)) for nbytes in (None, 0, 1 << 20)]
            for one in ready:
                assert await still_waits(one)
            async with MessageServer(here, Question):
                await asyncio.gather(*ready)
                async with client.permit() as permit:
                    await client.ready()
                    tensor = await permit.allocate((BIG,), torch.int64)
                    for_permit = asyncio.create_task(client.ready(nbytes=0))
                    for_memory = asyncio.create_task(client.ready(nbytes=1 << 20))
                    assert await still_waits(for_permit)
                await for_permit
                assert await still_waits(for_memory)
                del tensor
                await for_memory
                assert client.statistics().in_flight == 0
                with pytest.raises(TooLargeError):
                    await client.ready(nbytes=2 << 20)


async def test_ready_returns_while_any_server_is_connected_and_calls_wait_for_none_of_them() -> None:
    async with channels(2, 1) as (client, servers):
        await servers[0].aclose()
        await until(lambda: client.statistics().servers == 1)
        await client.ready(nbytes=0)
        asking = asyncio.create_task(client.request(Question(5)))
        await servers[1].arrived()
        ready = asyncio.create_task(client.ready(nbytes=0))
        assert await still_waits(ready)
        await answer_one(servers[1])
        await asyncio.gather(ready, asking)


async def test_ready_times_out_after_max_wait_s_and_ends_with_the_client() -> None:
    async with channel(1, client={"max_wait_s": SHORT_S}) as ends, ends.client.permit():
        with pytest.raises(WouldBlockError):
            await ends.client.ready(nbytes=0)
        assert ends.client.statistics().errors == {"WouldBlockError": 1}
    with place() as here:
        async with MessageClient(here, Answer) as client:
            ready = asyncio.create_task(client.ready())
            assert await still_waits(ready)
        with pytest.raises(ClosedError):
            await ready


async def test_a_cancelled_ready_holds_nothing() -> None:
    async with channel(1) as ends, serving(ends.server):
        client = ends.client

        async def attempt(attempt: Attempt) -> None:
            permit = client.permit()
            await permit.__aenter__()
            ready = attempt.start(client.ready(nbytes=0))
            releasing: list[asyncio.Task[None]] = []
            await ready.bring(
                lambda: releasing.append(asyncio.create_task(permit.__aexit__(None, None, None)))
            )
            await ready.completed()
            await releasing[0]
            assert (await client.request(Question(1))).seed == 1

        assert await cancel_everywhere(attempt, client, ends.server)
