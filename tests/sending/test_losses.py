"""Messages that are sent while the receiver closes, reconnects, or cannot be written to."""

import asyncio
import errno
import gc
import os
import resource
import tempfile
import weakref

import pytest
import torch

from aiotensor import PeerLostError, TensorReceiver, TensorSender
from aiotensor.memory.tensors import MAX_INLINE_BYTES
from aiotensor.transports.records import SocketTransport
from tests.memory.segments import lowered
from tests.pairs import endpoint, pair
from verification.patterns import BIG, pattern
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_messages_in_flight_are_lost_and_later_sends_reach_the_next_receiver() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = f"unix://{folder}/socket"
        async with TensorSender(place, max_concurrent_videos=2) as sender:
            async with TensorReceiver(place) as receiver:
                kept = await receiver.receive(await sender.send(pattern(0, BIG)))
                allocated = await sender.allocate((BIG,), torch.int64)
                allocated.copy_(pattern(5, BIG))
                lost = [await sender.send(pattern(seed, BIG)) for seed in (1, 2)]
                waiting = asyncio.create_task(sender.send(pattern(3, BIG)))
                draining = asyncio.create_task(sender.drain())
                await until(lambda: sender.statistics().waiting == 1)
            for task in (waiting, draining):
                with pytest.raises(PeerLostError):
                    await task
            assert sender.statistics().in_flight == 0
            async with TensorReceiver(place) as receiver:
                for seed in range(10, 20):  # as much as would overwrite the old memory
                    handle = await sender.send(pattern(seed, BIG))
                    assert torch.equal(await receiver.receive(handle), pattern(seed, BIG))
                handle = await sender.send(allocated)
                assert torch.equal(await receiver.receive(handle), pattern(5, BIG))
                for handle in lost:
                    with pytest.raises(PeerLostError):
                        await receiver.receive(handle)
            assert torch.equal(kept, pattern(0, BIG))
            await until(lambda: sender.statistics().receivers_lost == 2)
            del allocated
            await settled(sender)


FULL = MAX_INLINE_BYTES // 8  # elements; so few of such tensors fill a record that one message fills several


@pytest.mark.parametrize(
    "counts",
    [[3], [FULL] * 9, [3, BIG]],
    ids=["its own", "one that it filled", "one before its memory was attached"],
)
async def test_a_record_that_the_kernel_refuses_fails_the_send(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with pair() as (sender, receiver):
        await receiver.receive(await sender.send(pattern(0, 3)))
        tensors = [await sender.allocate((count,), torch.int64) for count in counts]
        monkeypatch.setattr(SocketTransport, "write", refuse)
        with pytest.raises(PeerLostError, match="No buffer space"):
            async with sender.message() as message:
                for tensor in tensors:
                    await message.send(tensor if tensor.numel() == BIG else tensor.clone())
        del tensors, tensor
        monkeypatch.undo()
        await settled(sender)
        assert (sender.statistics().messages_sent, sender.statistics().receivers_lost) == (1, 1)
    assert not errors


@pytest.mark.promise(17)
async def test_a_long_wait_for_memory_names_the_messages_of_lost_receivers_that_live_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with endpoint() as place:
        with lowered(resource.RLIMIT_FSIZE, 1 << 40):
            sender = TensorSender(place, arena_bytes=BIG * 8, long_wait_s=0.1)
        async with sender:
            kept = []
            for seed in range(2):
                async with TensorReceiver(place) as receiver:
                    kept.append(await receiver.receive(await sender.send(pattern(seed, BIG))))
                await until(lambda: sender.statistics().receivers_lost == len(kept))
            async with TensorReceiver(place) as receiver:
                waiting = asyncio.create_task(sender.send(pattern(2, BIG)))
                held = f"held by: message 1 (taken, its tensors still in use, {BIG * 8} bytes"
                await until(lambda: held in caplog.text)
                assert sender.statistics().bytes_in_use == BIG * 8
                del kept[0]
                assert torch.equal(await receiver.receive(await waiting), pattern(2, BIG))
            assert torch.equal(kept[0], pattern(1, BIG))
            kept.clear()


@pytest.mark.promise(5, 29)
@pytest.mark.parametrize(
    ("waits", "end"),
    [
        *((waits, end) for waits in ("permit", "copy") for end in ("loss", "closing", "cancelling")),
        ("copy", "no memory"),
    ],
)
async def test_a_tensor_whose_send_failed_is_freed_without_the_garbage_collector(
    waits: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        await sender.ready()  # a receiver of a queue that has not read of a sender cannot notify it
        if waits == "permit":
            await sender.send(pattern(0, 3))
        tensor = pattern(1, 1_000_000)
        freed = weakref.ref(tensor)
        gc.disable()
        try:
            if end == "no memory":
                monkeypatch.setattr(os, "posix_fallocate", _refuse)
            sending = asyncio.create_task(sender.send(tensor))
            del tensor
            await asyncio.sleep(0)
            if end == "loss":
                await receiver.aclose()
            elif end == "closing":
                await sender.aclose()
            elif end == "cancelling":
                sending.cancel()
            await asyncio.wait([sending])
            assert sending.cancelled() or sending.exception() is not None
            del sending
            await sender.aclose()  # the thread that copied has ended
            assert freed() is None
        finally:
            gc.enable()


def _refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
