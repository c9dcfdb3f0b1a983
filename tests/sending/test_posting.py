"""Posted messages: failed copies, several tensors in one message, and resources after each end."""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import weakref
from collections.abc import Iterator

import pytest
import torch

from aiotensor import ClosedError, DiscardedError, PeerLostError, TensorHandle, TensorSender, WouldBlockError
from aiotensor.sender import SentMessage, abandon_posted, finish_posted, post_in
from tests.cancellation.situations import SLOW, HeldUp, clog, held_back, strided, unread
from tests.pairs import endpoint, pair
from verification.internals import begin_posted
from verification.patterns import BIG, pattern
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let copies to new memory fail, until the fixture is undone."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    yield monkeypatch
    monkeypatch.undo()


def _events(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", "") == "post_failed"]


def _post(sender: TensorSender, message: SentMessage, tensor: torch.Tensor) -> TensorHandle:
    return post_in(sender, message, tensor)[1]


# Failed copies


@pytest.mark.promise(11)
@pytest.mark.usefixtures("link")
async def test_a_failed_copy_is_logged_and_counted_once_and_discards_its_message(
    no_memory: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        handle = sender.post(strided(1, BIG))
        receiving = asyncio.create_task(receiver.receive(handle))
        for _ in range(2):
            with pytest.raises(OSError, match="No space left") as caught:
                await sender.copied(handle)
            assert caught.value.errno == errno.ENOSPC
        with pytest.raises(DiscardedError):
            await receiving
        await settled(sender)
        [record] = _events(caplog)
        assert (record.levelname, record.name) == ("ERROR", "aiotensor.sender")
        assert vars(record)["sender_id"] == sender.id
        assert vars(record)["error"] == "OSError"
        assert "No space left" in vars(record)["reason"]
        assert record.exc_info is None
        seen = sender.statistics()
        assert (seen.errors, seen.messages_discarded, seen.messages_sent) == ({"OSError": 1}, 1, 0)
        await sender.drain()

        no_memory.undo()
        handle = sender.post(strided(2, BIG))
        assert torch.equal(await receiver.receive(handle), pattern(2, BIG))


async def test_a_copied_tensor_waits_for_a_receiver_that_reads_for_at_most_max_wait_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_up = HeldUp(monkeypatch)
    with endpoint() as place, unread(place) as far:
        async with TensorSender(place, max_concurrent_videos=1000, max_wait_s=0.02) as sender:
            held_up.stop()
            handle = sender.post(pattern(1, SLOW))
            await until(held_up.is_copying)
            in_flight = clog(sender)
            held_up.go_on()
            with pytest.raises(WouldBlockError, match="the receiver read nothing"):
                await sender.copied(handle)
            await until(lambda: sender.statistics().bytes_in_use == 0)
            assert sender.statistics().in_flight == in_flight
            closing = asyncio.create_task(sender.aclose())
            while not closing.done():
                far.read()
                await asyncio.sleep(0)


# In the middle of a copy


@pytest.mark.promise(16)
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_a_discard_during_a_copy_releases_the_permit_before_the_block(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up = HeldUp(monkeypatch)
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        held_up.stop()
        handle = sender.post(pattern(1, SLOW))
        receiving = asyncio.create_task(receiver.receive(handle))
        copying = asyncio.create_task(sender.copied(handle))
        await until(held_up.is_copying)
        (sender if side == "sender" else receiver).discard(handle)
        await until(lambda: sender.statistics().in_flight == 0)
        with pytest.raises(DiscardedError):
            await receiving
        assert sender.statistics().bytes_in_use == SLOW * 8
        assert not copying.done()  # the tensor must not change before the thread has stopped
        held_up.go_on()
        with pytest.raises(DiscardedError):
            await copying
        await settled(sender)


# Many posts


@pytest.mark.promise(8)
@pytest.mark.usefixtures("link")
async def test_the_strides_of_a_tensor_may_change_after_send_nowait() -> None:
    async with pair() as (sender, receiver):
        await sender.ready()
        for kind in (torch.Tensor, torch.nn.Parameter):
            source = torch.arange(40_000.0).reshape(200, 200)
            source = torch.nn.Parameter(source) if kind is torch.nn.Parameter else source
            expected = source.detach().clone()
            handle = sender.send_nowait(source)
            source.data = source.data.t()
            received = await receiver.receive(handle)
            assert torch.equal(received, expected)
            assert type(received) is kind
            assert received.requires_grad == source.requires_grad


# Several tensors in one message


async def _mixed(sender: TensorSender) -> list[torch.Tensor]:
    allocated = await sender.allocate((BIG,), torch.int64)
    return [
        pattern(0, 3),
        strided(1, BIG),
        allocated.copy_(pattern(2, BIG)),
        pattern(3, 3),
        torch.complex(pattern(4, BIG).double(), pattern(4, BIG).double()).conj(),
        pattern(5, 0),
        pattern(6, BIG),
    ]


@pytest.mark.promise(12)
@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("finishes", ["during the copies", "after the copies"])
async def test_several_tensors_of_any_placement_arrive_in_order_as_one_message(finishes: str) -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        tensors = await _mixed(sender)
        expected = [tensor.resolve_conj().clone() for tensor in tensors]
        message = begin_posted(sender)
        handles = [_post(sender, message, tensor) for tensor in tensors]
        if finishes == "after the copies":
            await sender.copied(handles[-1])
            with pytest.raises(WouldBlockError):
                receiver.receive_nowait(handles[0])
        for _ in range(2):
            finish_posted(sender, message)
        with pytest.raises(DiscardedError, match="has ended"):
            _post(sender, message, pattern(7, 3))
        for handle, tensor in zip(handles, expected, strict=True):
            found = await anext(receiver)
            assert (found.handle, found.tensors) == (handle, len(tensors))
            assert torch.equal(found.tensor, tensor)
            del found
        seen = sender.statistics()
        assert (seen.messages_sent, seen.tensors_sent) == (1, len(tensors))
        assert seen.errors == {"DiscardedError": 1}  # of the post after the end
        del tensors, tensor
        await settled(sender)
        finish_posted(sender, message)
        abandon_posted(sender, message)
    assert sender.statistics().messages_discarded == 0


async def test_abandoning_a_message_releases_everything_immediately() -> None:
    async with pair() as (sender, receiver):
        tensors = await _mixed(sender)
        message = begin_posted(sender)
        async with held_back(sender):
            handles = [_post(sender, message, tensor) for tensor in tensors]
            receiving = asyncio.create_task(receiver.receive(handles[0]))
            for _ in range(2):
                abandon_posted(sender, message)
            finish_posted(sender, message)
            assert sender.statistics().in_flight == 0
            tensors.clear()
            await settled(sender)
            for handle in (handles[0], handles[-1]):
                with pytest.raises(DiscardedError):
                    await sender.copied(handle)
            with pytest.raises(DiscardedError):
                await receiving
            with pytest.raises(DiscardedError):
                _post(sender, message, pattern(7, 3))
        assert sender.statistics().messages_discarded == 1


async def test_closing_discards_a_message_that_was_not_finished() -> None:
    async with pair() as (sender, receiver):
        message = begin_posted(sender)
        async with held_back(sender) as go_on:
            handles = [_post(sender, message, strided(seed, BIG)) for seed in range(2)]
            copying = asyncio.create_task(sender.copied(handles[1]))
            await asyncio.sleep(0)
            go_on.set()
            await sender.aclose()
            with pytest.raises(ClosedError):
                await copying
        with pytest.raises(DiscardedError):
            await receiver.receive(handles[0])


# Memory


@pytest.mark.promise(29)
@pytest.mark.parametrize("end", ["copied", "discarded", "no memory", "receiver lost", "closed", "cancelled"])
async def test_the_source_is_freed_after_its_copy_without_the_garbage_collector(
    end: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    if end == "no memory":
        request.getfixturevalue("no_memory")
    async with pair() as (sender, receiver):
        await sender.ready()
        gc.disable()
        try:
            async with held_back(sender) as go_on:
                tensor = strided(1, BIG)
                freed = weakref.ref(tensor)
                handle = sender.post(tensor)
                del tensor
                closing = None
                match end:
                    case "discarded":
                        sender.discard(handle)
                    case "receiver lost":
                        await receiver.aclose()
                    case "closed" | "cancelled":
                        closing = asyncio.create_task(sender.aclose())
                        await asyncio.sleep(0)
                        if end == "cancelled":
                            closing.cancel()
                go_on.set()
                await _outcome(sender, handle)
                if closing is not None:
                    await asyncio.wait([closing])
            if end == "cancelled":
                await until(lambda: freed() is None)  # its thread ends later
            await sender.aclose()  # the thread that copied has ended
            assert freed() is None
        finally:
            gc.enable()


async def _outcome(sender: TensorSender, handle: TensorHandle) -> None:
    with contextlib.suppress(DiscardedError, PeerLostError, ClosedError, OSError):
        await sender.copied(handle)
