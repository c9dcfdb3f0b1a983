"""Memory that callers allocated: sent without a copy, counted, and released."""

import asyncio
import gc
import tempfile
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from aiotensor import (
    DiscardedError,
    TensorReceiver,
    TensorSender,
    TooLargeError,
    UnsupportedTensorError,
    WouldBlockError,
)
from aiotensor.protocol.frames import MAX_DIMENSIONS
from tests.pairs import endpoint, pair
from verification.internals import memory_of
from verification.patterns import BIG, pattern
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_allocated_memory_is_shared_and_in_use_until_its_last_view_is_freed() -> None:
    async with pair(arena_bytes=BIG * 8) as (sender, receiver):
        tensor = await sender.allocate((BIG // 100, 100), torch.int64)
        tensor.copy_(pattern(3, BIG).reshape(-1, 100))
        handle = await sender.send(tensor)
        part = sender.send_nowait(tensor[10:20])  # a contiguous view, from the same block
        assert sender.statistics().bytes_in_use == BIG * 8
        received, received_part = await receiver.receive(handle), await receiver.receive(part)
        tensor[15, 5] = -1
        assert received[15, 5] == received_part[5, 5] == -1
        waiting = asyncio.create_task(sender.allocate((BIG,), torch.int64))
        await until(lambda: sender.statistics().waiting == 1)
        del tensor, received
        gc.collect()
        assert not waiting.done()
        del received_part
        await waiting


@pytest.mark.promise(17)
async def test_a_long_wait_for_memory_is_logged_with_the_allocated_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with endpoint() as place:
        async with (
            TensorReceiver(place) as receiver,
            TensorSender(place, arena_bytes=BIG * 8, long_wait_s=0.01) as sender,
        ):
            tensor = await sender.allocate((BIG,), torch.int64)
            waiting = asyncio.create_task(sender.send(pattern(1, BIG)))
            await until(lambda: "has waited" in caplog.text)
            assert f"memory from allocate() (allocated, {BIG * 8} bytes" in caplog.text
            del tensor
            await receiver.receive(await waiting)


@pytest.mark.usefixtures("link")
async def test_allocated_frames_are_sent_as_a_permuted_view_without_a_copy() -> None:
    async with pair() as (sender, receiver):
        frames = await sender.allocate((4, 30, 40, 3), torch.float32)
        frames.copy_(torch.randn(4, 30, 40, 3))
        view = frames.permute(0, 3, 1, 2)
        received = await receiver.receive(await sender.send(view))
        assert torch.equal(received, view)
        assert received.is_contiguous(memory_format=torch.channels_last)
        assert sender.statistics().bytes_in_use == frames.nbytes
        assert sender.statistics().tensors_copied == 0


async def test_allocated_tensors_may_be_empty_small_or_dropped_unsent() -> None:
    async with pair() as (sender, receiver):
        assert (await sender.allocate((0, 3), torch.bool)).shape == (0, 3)
        small = await sender.allocate((), torch.float8_e5m2)
        small.fill_(2.0)
        received = await receiver.receive(await sender.send(small))
        assert received.float() == 2.0
        await sender.allocate((BIG,), torch.int64)
        del small, received
        await settled(sender)


async def test_what_cannot_be_allocated_or_sent_is_refused() -> None:
    async with pair(arena_bytes=4096) as (sender, _), sender.message() as message:
        for allocate in (sender.allocate, message.allocate):
            for shape in ((0, 2**62, 2**62), (0, 2**63), (2**63, 0), (2**62, 4), (2**63,), (4097,)):
                with pytest.raises(TooLargeError) as caught:
                    await allocate(shape, torch.uint8)
                assert caught.value.requested > caught.value.limit > 0
            with pytest.raises(UnsupportedTensorError, match=r"torch\.quint8 cannot be sent: allocate torch"):
                await allocate((1,), torch.quint8)
            with pytest.raises(TypeError, match=r"such as torch\.uint8, got <class 'numpy\.float32'>"):
                await allocate((1,), np.float32)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="negative"):
                await allocate((2, -1), torch.uint8)
        assert (await sender.allocate((0, 2**63 - 1), torch.uint8)).shape == (0, 2**63 - 1)
        assert sender.statistics().bytes_in_use == 0


async def test_a_deadlock_of_an_allocated_tensor_and_a_send_is_detected() -> None:
    async with pair(max_concurrent_videos=1, arena_bytes=BIG * 8) as (sender, receiver):
        tensor = await sender.allocate((BIG,), torch.int64)
        tensor.copy_(pattern(1, BIG))
        plain = asyncio.create_task(sender.send(pattern(2, BIG)))  # has the permit, waits for bytes
        await until(lambda: sender.statistics().waiting == 1)
        allocated = asyncio.create_task(sender.send(tensor))  # has the bytes, waits for the permit
        with pytest.raises(WouldBlockError, match="never end"):
            await plain
        assert torch.equal(await receiver.receive(await allocated), pattern(1, BIG))


async def test_copying_an_allocated_tensor_does_not_wait_for_its_own_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = f"unix://{folder}/socket"
        async with TensorSender(place, arena_bytes=BIG * 8) as sender:
            tensor = await sender.allocate((BIG,), torch.int64)
            async with TensorReceiver(place) as receiver:
                view = await receiver.receive(await sender.send(tensor))
            async with TensorReceiver(place) as receiver:
                await until(lambda: sender.receiver_id == receiver.id)
                # The first receiver may still use the memory of the tensor.
                await until(lambda: any(block.lost for block in memory_of(sender).blocks.values()))
                with pytest.raises(WouldBlockError, match="send a clone"):
                    await sender.send(tensor)
                tensor = tensor.clone()
                gc.collect()  # the traceback of the error held the old one
                assert torch.equal(await receiver.receive(await sender.send(tensor)), tensor)
            del view


async def test_allocated_tensors_can_be_sent_up_to_the_limit_of_dimensions() -> None:
    async with pair() as (sender, receiver):
        for count in (16, BIG):
            tensor = await sender.allocate([1] * (MAX_DIMENSIONS - 1) + [count], torch.int64)
            tensor.view(-1).copy_(pattern(0, count))
            assert torch.equal(await receiver.receive(await sender.send(tensor)), tensor)
            del tensor
            more = await sender.allocate([1] * MAX_DIMENSIONS + [count], torch.int64)
            with pytest.raises(UnsupportedTensorError, match=f"{MAX_DIMENSIONS + 1} dimensions"):
                await sender.send(more)
            del more
        gc.collect()
        await settled(sender)


async def _allocate_twice(sender: TensorSender, shape: tuple[int]) -> None:
    async with sender.message() as message:
        tensor = await message.allocate(shape, torch.int64)
        await message.send(tensor)
        del tensor
        await message.send(await message.allocate(shape, torch.int64))


async def test_one_of_two_messages_that_wait_for_each_others_memory_is_refused() -> None:
    async with pair(arena_bytes=10 * BIG * 8) as (sender, receiver):
        both = [_allocate_twice(sender, (4 * BIG,)) for _ in range(2)]
        ended = await asyncio.gather(*both, return_exceptions=True)
        assert sorted(map(type, ended), key=str) == [type(None), WouldBlockError]
        assert "so the wait would never end" in str(next(filter(None, ended)))
        for _ in range(2):
            await anext(receiver)
        await settled(sender)


async def test_unsent_allocated_memory_counts_for_the_message_that_allocated_it() -> None:
    async def hold_and_ask_for_more(sender: TensorSender) -> bool:
        async with sender.message() as message:
            held = await message.allocate((4 * BIG,), torch.int64)
            try:
                await message.allocate((4 * BIG,), torch.int64)
            except WouldBlockError:
                return False
            del held
            return True

    async with pair(arena_bytes=10 * BIG * 8) as (sender, _):
        both = [hold_and_ask_for_more(sender) for _ in range(2)]
        assert sorted(await asyncio.gather(*both)) == [False, True]


async def test_a_task_in_no_message_waits_for_memory_that_open_messages_hold() -> None:
    async with pair(arena_bytes=10 * BIG * 8) as (sender, receiver):
        async with sender.message() as message:
            await message.send(await message.allocate((8 * BIG,), torch.int64))
            outside = asyncio.create_task(sender.allocate((8 * BIG,), torch.int64))
            await until(lambda: sender.statistics().waiting == 1)
        await anext(receiver)
        await outside


async def test_the_statistics_list_allocated_memory_by_its_last_use() -> None:
    async with pair(arena_bytes=10 * BIG * 8) as (sender, receiver):
        async with sender.message() as message:
            tensor = await message.allocate((BIG,), torch.int64)
            (holder,) = sender.statistics().holders
            assert holder.state == "being sent"
        (holder,) = sender.statistics().holders
        assert (holder.message, holder.state, holder.bytes) == (None, "allocated", BIG * 8)
        handle = await sender.send(tensor)
        (holder,) = sender.statistics().holders
        assert (holder.message, holder.bytes) == (handle.message, BIG * 8)
        del tensor
        received = await receiver.receive(handle)
        await until(lambda: sender.statistics().in_flight == 0)
        (holder,) = sender.statistics().holders
        assert (holder.message, holder.state) == (handle.message, "taken, its tensors still in use")
        del received


async def test_discarding_a_message_fails_its_pending_allocation() -> None:
    async with pair(arena_bytes=10 * BIG * 8) as (sender, _):
        held = await sender.allocate((8 * BIG,), torch.int64)
        with pytest.raises(DiscardedError):  # of the end of the block
            async with sender.message() as message:
                await message.send(pattern(0, 3))
                waiting = asyncio.create_task(message.allocate((8 * BIG,), torch.int64))
                await until(lambda: sender.statistics().waiting == 1)
                sender.discard_all()
                del held
                with pytest.raises(DiscardedError):
                    await waiting
                with pytest.raises(DiscardedError):
                    await message.allocate((1,), torch.int64)
        await settled(sender)


async def test_announcing_a_tensor_refuses_a_wait_of_its_message_that_cannot_end() -> None:
    async with pair(arena_bytes=10 * BIG * 8) as (sender, _):
        async with sender.message() as message:
            tensor = await sender.allocate((4 * BIG,), torch.int64)
            waiting = asyncio.create_task(message.allocate((8 * BIG,), torch.int64))
            await until(lambda: sender.statistics().waiting == 1)
            await message.send(tensor)
            with pytest.raises(WouldBlockError, match="so the wait would never end"):
                await waiting
        del tensor, waiting
        sender.discard_all()
        await settled(sender)


VIEWS = {
    "conjugate": lambda tensor: tensor.view(torch.complex64).conj(),
    "misaligned": lambda tensor: tensor.numpy().view(np.uint8)[4:-4].view(np.float64),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(
    ("held", "size"), [(0, 6), (3, 4)], ids=["alone", "in a message that holds the rest"]
)
async def test_a_view_that_must_be_copied_does_not_wait_for_the_memory_of_its_tensor(
    view: Callable[[torch.Tensor], torch.Tensor | npt.NDArray[np.float64]], held: int, size: int
) -> None:
    async with pair(arena_bytes=10 * BIG * 8) as (sender, receiver):
        async with sender.message() as message:
            if held:
                await message.send(pattern(1, held * BIG))
            tensor = await sender.allocate((size * BIG,), torch.int64)
            with pytest.raises(WouldBlockError, match="send a clone"):
                await message.send(view(tensor))
            handle = await message.send(pattern(2, 3))
            del tensor
        assert torch.equal(await receiver.receive(handle), pattern(2, 3))
        if held:
            await anext(receiver)
        gc.collect()  # the traceback of the error held the tensor
        await settled(sender)
