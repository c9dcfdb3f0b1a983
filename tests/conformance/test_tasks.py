"""Tasks that are cancelled, or use objects of other tasks, threads and processes, lose and block nothing."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

import pytest
import torch

from aiotensor import PeerLostError, TensorHandle, TensorQueue, TensorReceiver, TensorSender, UsageError
from aiotensor.transports.endpoints import Endpoint
from tests.conformance.makers import PairMaker
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import settled, until

_TURNS = 8


@pytest.mark.parametrize("count", [5, BIG], ids=["small", "large"])
async def test_a_send_cancelled_in_any_iteration_releases_its_resources(count: int, pairs: PairMaker) -> None:
    async with pairs.near_sender(max_concurrent_videos=1, arena_bytes=BIG * 8) as (sender, engine):
        for turns in range(_TURNS):
            sending = asyncio.create_task(sender.send(pattern(turns, count)))
            for _ in range(turns):
                await asyncio.sleep(0)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                sender.discard(await sending)
            await settled(sender)
            assert await engine.call(peers.receive_pattern, await sender.send(pattern(9, count)), 9)
            await settled(sender)


async def test_a_send_cancelled_during_its_copy_releases_its_resources(pairs: PairMaker) -> None:
    async with pairs.near_sender(max_concurrent_videos=1) as (sender, engine):
        before = await sender.send(pattern(1, 5))
        assert await engine.call(peers.receive_pattern, before, 1)
        await settled(sender)
        sending = asyncio.create_task(sender.send(torch.ones(1 << 26, dtype=torch.uint8)))
        await until(lambda: sender.statistics().bytes_in_use > 0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert sender.statistics().in_flight == 0
        await settled(sender)
        following = await sender.send(pattern(2, BIG))
        assert following.message == before.message + 1  # the engine has no record of the other one
        assert await engine.call(peers.receive_pattern, following, 2)


@pytest.mark.parametrize("copy", [False, True], ids=["view", "copy"])
async def test_a_receive_cancelled_at_any_turn_of_the_loop_loses_nothing(
    copy: bool, pairs: PairMaker
) -> None:
    async with pairs.near_receiver() as (receiver, api, name):
        for turns in range(_TURNS):
            handle = TensorHandle(name, turns, 0, "int64", (BIG,), "cpu")
            receiving = asyncio.create_task(receiver.receive(handle, copy=copy))
            sending = api.start(peers.send_pattern, turns, BIG)
            await until(lambda: receiving.done() or receiver.statistics().unclaimed_tensors == 1)  # noqa: B023
            for _ in range(turns):
                await asyncio.sleep(0)
            receiving.cancel()
            try:
                tensor = await receiving
            except asyncio.CancelledError:
                tensor = await receiver.receive(handle, copy=copy)
            assert torch.equal(tensor, pattern(turns, BIG))
            assert await sending == handle
            assert receiver.statistics().waiting == 0
        await api.call(peers.drain)


async def test_both_ends_are_opened_in_one_task_and_closed_in_another(endpoint: Endpoint) -> None:
    receiver, sender = (
        TensorReceiver(endpoint),
        TensorSender(endpoint),
    )
    await asyncio.create_task(receiver.__aenter__())
    await asyncio.create_task(sender.__aenter__())
    handle = await asyncio.create_task(sender.send(pattern(0, BIG)))
    received = await asyncio.create_task(receiver.receive(handle))
    assert torch.equal(received, pattern(0, BIG))
    del received
    await asyncio.create_task(sender.aclose())
    await asyncio.create_task(receiver.aclose())


async def test_use_in_another_thread_or_loop_raises_usage_error(endpoint: Endpoint) -> None:
    async with (
        TensorReceiver(endpoint) as receiver,
        TensorSender(endpoint) as sender,
    ):
        handle = await sender.send(pattern(0, 3))
        for use in (
            lambda: sender.send_nowait(torch.ones(3)),
            sender.statistics,
            lambda: receiver.receive_nowait(handle),
            receiver.statistics,
        ):
            with pytest.raises(UsageError, match="another thread"):
                await asyncio.to_thread(use)
        with pytest.raises(UsageError, match="another thread"):
            await asyncio.to_thread(asyncio.run, sender.send(torch.ones(3)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_use_in_a_forked_child_raises_usage_error(endpoint: Endpoint) -> None:
    async with (
        TensorReceiver(endpoint) as receiver,
        TensorSender(endpoint) as sender,
    ):
        handle = await sender.send(pattern(1, BIG))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            _report_from_fork(write, endpoint, sender, receiver, handle)
        os.close(write)
        with os.fdopen(read) as report:
            lines = await asyncio.to_thread(report.read)
        assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
        assert lines.split() == ["UsageError"] * (6 if isinstance(endpoint, TensorQueue) else 5)
        assert torch.equal(await receiver.receive(handle), pattern(1, BIG))


def _report_from_fork(
    write: int, endpoint: Endpoint, sender: TensorSender, receiver: TensorReceiver, handle: TensorHandle
) -> None:
    try:
        uses: list[Callable[[], object]] = [
            lambda: sender.send_nowait(torch.ones(3)),
            lambda: sender.discard(handle),
            sender.statistics,
            lambda: receiver.receive_nowait(handle),
            lambda: receiver.discard(handle),
        ]
        if isinstance(endpoint, TensorQueue):
            uses.append(endpoint.open_reader)
        names = []
        for use in uses:
            try:
                use()
            except UsageError as error:
                names.append(type(error).__name__ if "fork" in str(error) else str(error))
        os.write(write, " ".join(names).encode())
        os._exit(0)
    finally:
        os._exit(1)  # in any case: a child must not continue with the tests


async def test_a_receivers_forked_child_does_not_keep_its_senders_waiting(pairs: PairMaker) -> None:
    async with pairs.near_sender(max_concurrent_videos=1) as (sender, engine):
        grandchild = await engine.call(peers.fork_and_sleep)
        await sender.send(pattern(1, 3))
        waiting = asyncio.create_task(sender.send(pattern(2, 3)))
        await until(lambda: sender.statistics().waiting == 1)
        engine.kill()
        try:
            with pytest.raises(PeerLostError):
                await waiting
        finally:
            os.kill(grandchild, signal.SIGKILL)
