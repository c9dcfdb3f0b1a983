"""Several senders in several processes, one receiver, one endpoint."""

import asyncio
import gc
import os
import pickle
import signal
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from aiotensor import PeerLostError, TensorHandle, TensorQueue, TensorReceiver, TensorSender, UsageError
from aiotensor.links import Endpoint
from tests.pairs import BIG, pattern, settled, until
from tests.processes import peers

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_senders_in_several_processes_feed_one_receiver_in_any_order(endpoint: Endpoint) -> None:
    async with peers.peers(endpoint, 3, "spawn") as children, TensorReceiver(endpoint) as receiver:
        for child in children:
            await child.call(peers.open_sender, 64)
        sending = [
            child.start(peers.send_pattern, seed, BIG if seed % 3 == 0 else 20)
            for seed in range(30)
            for child in children
        ]
        handles = list(reversed(await asyncio.gather(*sending)))
        assert len(set(handles)) == 90
        for handle in handles:
            tensor = await receiver.receive(handle)
            assert torch.equal(tensor, pattern(int(tensor[0]), handle.shape[0]))
        for child in children:
            await child.call(peers.drain)
        assert receiver.statistics().senders == 3


async def test_a_receiver_in_a_child_takes_from_senders_in_parent_and_child(endpoint: Endpoint) -> None:
    async with peers.peers(endpoint, 2) as [engine, api], TensorSender(endpoint) as sender:
        await engine.call(peers.open_receiver)
        await api.call(peers.open_sender)
        async with sender.message() as message:
            ours = [await message.send(pattern(1, BIG)), await message.send(pattern(2, 7))]
        theirs = await api.call(peers.send_message, 3, [5, BIG])
        for seed, handle in ((3, theirs[0]), (2, ours[1]), (4, theirs[1]), (1, ours[0])):
            assert await engine.call(peers.receive_pattern, handle, seed)
        await settled(sender)
        await api.call(peers.drain)


async def test_a_permit_comes_back_from_another_process_only_when_its_message_was_taken(
    endpoint: Endpoint,
) -> None:
    async with (
        peers.peers(endpoint, 1) as [engine],
        TensorSender(endpoint, max_concurrent_videos=2) as sender,
    ):
        await engine.call(peers.open_receiver)
        handles = [await sender.send(pattern(seed, BIG)) for seed in range(2)]
        third = asyncio.create_task(sender.send(pattern(2, BIG)))
        await until(lambda: sender.statistics().waiting == 1)
        # The engine answers this call, so it has run: that the queue was read returns no permit.
        await engine.call(peers.forget_tensors)
        assert not third.done()
        assert await engine.call(peers.receive_pattern, handles[1], 1, keep=True)
        assert await engine.call(peers.receive_pattern, await third, 2, keep=True)
        assert sender.statistics().peak_in_flight == 2
        # The memory comes back when the engine lets go of the tensors, not when it takes them.
        assert sender.statistics().bytes_in_use == 3 * BIG * 8
        await engine.call(peers.forget_tensors)
        await until(lambda: sender.statistics().bytes_in_use == BIG * 8)


async def test_tensors_of_100_messages_leave_memory_and_descriptors_as_they_were(endpoint: Endpoint) -> None:
    async with peers.peers(endpoint, 1) as [child], TensorReceiver(endpoint) as receiver:
        await child.call(peers.open_sender)
        await receiver.receive(await child.call(peers.send_pattern, 0, BIG))
        before = len(os.listdir("/proc/self/fd")), await child.call(_descriptors)
        for seed in range(100):
            tensor = await receiver.receive(await child.call(peers.send_pattern, seed, BIG))
            assert torch.equal(tensor, pattern(seed, BIG))
            del tensor
        await child.call(_settled)
        assert (len(os.listdir("/proc/self/fd")), await child.call(_descriptors)) == before


async def _descriptors(state: peers.State) -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def _settled(state: peers.State) -> None:
    await settled(state.sender)


async def test_a_stopped_receiver_holds_senders_back_and_nothing_is_lost(endpoint: Endpoint) -> None:
    count = 1000  # more than the link holds
    async with peers.peers(endpoint, 1) as [child]:
        await child.call(peers.open_sender, count)
        sending = child.start(_send_small, count)
        await child.call(peers.forget_tensors)
        assert not sending.done()  # nobody reads the link
        async with TensorReceiver(endpoint) as receiver:
            seen = Counter[int]()
            async for delivery in receiver:
                seen[int(delivery.tensor[0])] += 1
                if len(seen) == count:
                    break
            assert await sending == count
            assert set(seen.values()) == {1}


async def _send_small(state: peers.State, count: int) -> int:
    for seed in range(count):
        await state.sender.send(pattern(seed, 100))
    return count


async def test_a_queue_travels_only_to_children_that_are_being_spawned() -> None:
    queue = TensorQueue()
    with pytest.raises(UsageError, match="while it is spawned"):
        pickle.dumps(queue)
    assert repr(queue) == "<TensorQueue open>"
    queue.close()
    queue.close()
    assert repr(queue) == "<TensorQueue closed>"
    with pytest.raises(UsageError, match="was closed"):
        await TensorReceiver(queue).__aenter__()


async def test_open_ends_outlive_the_closing_of_their_queue() -> None:
    queue = TensorQueue()
    async with TensorReceiver(queue) as receiver, TensorSender(queue) as sender:
        queue.close()
        assert torch.equal(await receiver.receive(await sender.send(pattern(1, BIG))), pattern(1, BIG))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_is_told_at_once_and_does_not_hide_a_death(endpoint: Endpoint) -> None:
    async with TensorReceiver(endpoint) as receiver, TensorSender(endpoint) as sender:
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
    uses: list[Callable[[], object]] = [
        lambda: sender.send_nowait(torch.ones(3)),
        lambda: sender.discard(handle),
        sender.statistics,
        lambda: receiver.receive_nowait(handle),
        lambda: receiver.discard(handle),
    ]
    if isinstance(endpoint, TensorQueue):
        uses.append(endpoint._duplicate_reader)
    names = []
    for use in uses:
        try:
            use()
        except UsageError as error:
            names.append(type(error).__name__ if "fork" in str(error) else str(error))
    os.write(write, " ".join(names).encode())
    os._exit(0)


async def test_a_receivers_forked_child_does_not_keep_its_senders_waiting(endpoint: Endpoint) -> None:
    async with (
        peers.peers(endpoint, 1) as [engine],
        TensorSender(endpoint, max_concurrent_videos=1) as sender,
    ):
        await engine.call(peers.open_receiver)
        assert await engine.call(peers.receive_pattern, await sender.send(pattern(0, 3)), 0)
        grandchild = await engine.call(_fork_and_sleep)
        await sender.send(pattern(1, 3))
        waiting = asyncio.create_task(sender.send(pattern(2, 3)))
        await until(lambda: sender.statistics().waiting == 1)
        engine.kill()
        try:
            with pytest.raises(PeerLostError):
                await waiting
        finally:
            os.kill(grandchild, signal.SIGKILL)


async def _fork_and_sleep(state: peers.State) -> int:
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    return child


async def test_an_object_of_another_thread_or_loop_says_so_at_once(endpoint: Endpoint) -> None:
    async with TensorReceiver(endpoint) as receiver, TensorSender(endpoint) as sender:
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


async def test_a_queue_has_one_receiver_over_all_processes_whatever_was_closed() -> None:
    queue = TensorQueue()
    async with peers.peers(queue, 1) as [child]:
        async with TensorReceiver(queue):
            with pytest.raises(UsageError, match="has a receiver already"):
                await TensorReceiver(queue).__aenter__()
            queue.close()
            with pytest.raises(UsageError, match="has a receiver already"):
                await child.call(peers.open_receiver)
        await child.call(peers.open_receiver)


async def test_an_engine_that_dies_before_it_opened_its_receiver_is_noticed_once_the_queue_is_closed() -> (
    None
):
    queue = TensorQueue()
    async with (
        peers.peers(queue, 1) as [engine],
        TensorSender(queue, max_concurrent_videos=1) as sender,
    ):
        queue.close()
        await sender.send(pattern(0, BIG))
        waiting = asyncio.create_task(sender.send(pattern(1, BIG)))
        await until(lambda: sender.statistics().waiting == 1)
        engine.kill()
        with pytest.raises(PeerLostError):
            await waiting
