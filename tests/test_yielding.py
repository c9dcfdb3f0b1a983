"""Calls that need not wait do not suspend, as the docs say."""

import asyncio

import anyio
import pytest
import torch

from tests.pairs import pair
from verification.patterns import pattern
from verification.waiting import until

pytestmark = [pytest.mark.usefixtures("link"), pytest.mark.usefixtures("nothing_left_behind")]


async def test_a_call_that_need_not_wait_completes_in_an_expired_timeout_scope() -> None:
    async with pair() as (sender, receiver):
        async with asyncio.timeout(-1):
            handle = await sender.send(pattern(1, 3))
        await until(lambda: receiver.statistics().unclaimed_tensors == 1)
        with anyio.CancelScope() as scope:
            scope.cancel()
            assert torch.equal(await receiver.receive(handle), pattern(1, 3))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(-1):
                await receiver.receive(await sender.send(pattern(2, 3)))  # which has to arrive first
        sender.discard_all()
        await sender.drain()


async def test_a_run_of_calls_that_need_not_wait_lets_no_other_task_run() -> None:
    async with pair(max_concurrent_videos=100) as (sender, receiver):
        turns: list[int] = []
        asyncio.get_running_loop().call_soon(turns.append, 1)
        handles = [await sender.send(pattern(number, 3)) for number in range(100)]
        assert not turns
        await until(lambda: receiver.statistics().unclaimed_tensors == 100)
        asyncio.get_running_loop().call_soon(turns.append, 2)
        for handle in handles:
            await receiver.receive(handle)
        assert turns == [1]
