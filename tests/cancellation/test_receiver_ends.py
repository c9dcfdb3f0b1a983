"""Cancelling the opening and the closing of a receiver."""

import asyncio
import fcntl
import os
import socket
import threading

import pytest
import torch

from aiotensor import ClosedError, PeerLostError, TensorReceiver, TensorSender
from aiotensor.tensors.mapping import MappedSegment
from tests.cancelling import Attempt, cancel_everywhere
from tests.pairs import endpoint, is_local, on_one_machine
from verification.internals import pause_reading, resume_reading, senders_of, session_of, shrink_send_buffer
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def _opens(place: str, stale: int = 0) -> None:
    """Check that an endpoint has no new files, and that a receiver can be opened and reached there."""
    if place.startswith("unix://"):
        with os.scandir(os.path.dirname(place.removeprefix("unix://"))) as entries:
            assert {entry.inode() for entry in entries} <= {stale}
    async with TensorReceiver(place) as receiver, TensorSender(place) as sender:
        assert torch.equal(await receiver.receive(await sender.send(pattern(0, 3))), pattern(0, 3))


@pytest.mark.usefixtures("link")
async def test_opening_a_receiver_does_not_suspend_without_contention() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            receiver = TensorReceiver(place)
            assert await attempt.start(receiver.__aenter__()).completed()
            await receiver.aclose()

    assert not await cancel_everywhere(attempt)


@pytest.mark.parametrize("has_stale_socket", [True, False])
async def test_an_opening_cancelled_while_the_folder_is_locked_leaves_nothing(
    has_stale_socket: bool,
) -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint("unix") as place:
            assert isinstance(place, str)
            path = place.removeprefix("unix://")
            stale = 0
            if has_stale_socket:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
                    dead.bind(path)
                stale = os.stat(path).st_ino
            folder = os.open(os.path.dirname(path), os.O_RDONLY)
            fcntl.flock(folder, fcntl.LOCK_EX)
            receiver = TensorReceiver(place)
            opening = attempt.start(receiver.__aenter__())
            await opening.until(lambda: opening.suspensions)
            await opening.bring(lambda: os.close(folder))
            if await opening.completed():
                await receiver.aclose()
            with pytest.raises(ClosedError):
                await receiver.__aenter__()
            await _opens(place, stale)

    assert await cancel_everywhere(attempt)


@pytest.mark.usefixtures("link")
async def test_closing_cancelled_anywhere_still_closes_and_ends_all_waits() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            receiver = await TensorReceiver(place).__aenter__()
            async with TensorSender(place, max_concurrent_videos=2) as sender:
                kept = await receiver.receive(await sender.send(pattern(0, BIG)))
                await until(lambda: sender.statistics().in_flight == 0)
                message, other = await sender.message().__aenter__(), await sender.message().__aenter__()
                half = await message.send(pattern(1, BIG))
                sending = asyncio.create_task(sender.send(pattern(3, 3)))
                receiving = asyncio.create_task(receiver.receive(half))
                iterating = asyncio.create_task(_next(receiver))
                await until(lambda: receiver.statistics().waiting == 2)
                await until(lambda: receiver.statistics().unclaimed_tensors == 1)
                await attempt.start(receiver.aclose()).completed()
                with pytest.raises(ClosedError):
                    await receiving
                assert await iterating
                for ending in (sending, message.__aexit__(None, None, None), other.send(pattern(0, 3))):
                    with pytest.raises(PeerLostError):
                        await ending
                await receiver.aclose()
                with pytest.raises(ClosedError):
                    await receiver.receive(half)
                assert torch.equal(kept, pattern(0, BIG))
                assert sender.statistics().in_flight == 0
            if isinstance(place, str):
                await _opens(place)

    # Sockets accept the last records at once; between machines the peer confirms them.
    assert bool(await cancel_everywhere(attempt)) != is_local()


async def _next(receiver: TensorReceiver) -> bool:
    """Iterate over a receiver that gets no tensor, and return whether the iteration ended."""
    return [delivery async for delivery in receiver] == []


@pytest.mark.usefixtures("link")
async def test_closing_cancelled_while_it_unmaps_leaves_that_to_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    close = MappedSegment.close

    def slow_close(segment: MappedSegment) -> None:
        go_on.wait()
        close(segment)

    monkeypatch.setattr(MappedSegment, "close", slow_close)

    async def attempt(attempt: Attempt) -> None:
        go_on.clear()
        with endpoint() as place:
            receiver = await TensorReceiver(place).__aenter__()
            async with TensorSender(place) as sender:
                tensor = await receiver.receive(await sender.send(pattern(0, BIG)))
            await until(lambda: receiver.statistics().senders == 0)
            assert receiver.statistics().mapped_bytes > 0
            del tensor
            await until(lambda: receiver.statistics().mapped_bytes == 0)
            closing = attempt.start(receiver.aclose())
            await closing.bring(go_on.set)
            go_on.set()
            await closing.completed()
            # A reference to the receiver still exists.
            await until(
                lambda: not any(thread.name.startswith("aiotensor-r") for thread in threading.enumerate())
            )
            await receiver.aclose()

    assert await cancel_everywhere(attempt)


@on_one_machine
@pytest.mark.usefixtures("link")
async def test_closing_cancelled_while_a_sender_does_not_read_closes_at_once() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            receiver = await TensorReceiver(place).__aenter__()
            async with TensorSender(place, max_concurrent_videos=1000) as sender:
                await receiver.receive(await sender.send(pattern(0, 3)))
                near, far = (
                    session_of(sender).transport,
                    senders_of(receiver).connected[sender.id].transport,
                )
                pause_reading(near)
                shrink_send_buffer(far)
                while far.is_writable:
                    await receiver.receive(await sender.send(pattern(0, 3)))
                closing = attempt.start(receiver.aclose())
                await closing.bring(lambda: resume_reading(near))
                await closing.completed()
                await until(lambda: sender.statistics().receivers_lost == 1)
                assert sender.statistics().in_flight == 0

    assert await cancel_everywhere(attempt)
