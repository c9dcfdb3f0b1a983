"""A sender sends only as many accounts as fit its buffers, regardless of the number of inquiries."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiotensor import TensorSender, WouldBlockError
from aiotensor.protocol.frames import MAX_FRAMES, MAX_HOLDERS, Inquire, encode
from aiotensor.sending import outbox
from aiotensor.sending.message import State
from aiotensor.sending.statistics_replies import account_of
from aiotensor.statistics.counters import ERROR_NAMES, WaitCounter
from aiotensor.transports.records import RecordSocket
from aiotensor.transports.unix import UnixSenderLink
from aiotensor.types import MAX_NUMBER, Holder, SenderStatistics, Waits
from tests.frames import NO_WAITS
from tests.looking import RogueReceiver, rogue_receiver
from verification.patterns import pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_an_account_tells_what_the_statistics_say_and_names_no_more_holders_than_it_may() -> None:
    holders = tuple(Holder(number, "being sent", number, 100.0 - number) for number in range(MAX_HOLDERS + 1))
    statistics = SenderStatistics(
        *(1, 2, 3, 4, 5.0, holders, 6, 7, 8, 9, 18, 10, 11, 12, 13, 14),
        *(Waits((1.0,), (2, 3), 4.0), NO_WAITS, 15, 16, {"OSError": 17}),
    )

    account = account_of(statistics)

    for name in set(account.__struct_fields__) - {"holders", "sender"}:
        assert getattr(account, name) == getattr(statistics, name)
    assert [holding.message for holding in account.holders] == list(range(MAX_HOLDERS))
    assert account.sender == ""


def test_no_account_of_ours_takes_more_than_the_outbox_counts_a_frame_as() -> None:
    numbers = WaitCounter().waits()
    waits = Waits(numbers.bounds_s, (MAX_NUMBER,) * len(numbers.counts), 2.0**63)
    longest = max((state.value for state in State), key=len)
    holders = tuple(Holder(MAX_NUMBER, longest, MAX_NUMBER, 2.0**63) for _ in range(MAX_HOLDERS))
    errors = dict.fromkeys(ERROR_NAMES, MAX_NUMBER)
    most = (MAX_NUMBER,) * 10
    statistics = SenderStatistics(*most[:4], 2.0**63, holders, *most, waits, waits, *most[:2], errors)

    assert 1024 < len(encode(account_of(statistics))) <= outbox._FRAME_BYTES


def _tasks() -> "list[asyncio.Task[object]]":
    """Find the tasks that wait to send an account."""
    return [task for task in asyncio.all_tasks() if task.get_name() == "aiotensor-account"]


@asynccontextmanager
async def clogged(address: str) -> AsyncIterator[tuple[TensorSender, RogueReceiver, RecordSocket, int]]:
    """Connect a sender to a receiver that does not read, until the sender queues frames."""
    async with rogue_receiver(address) as (sender, receiver):
        sent = 0
        while True:
            try:
                sender.send_nowait(pattern(sent, 1000))
            except WouldBlockError:
                break
            sent += 1
            await asyncio.sleep(0)  # the frames of one turn are written at its end
        link = sender._outgoing._link
        assert isinstance(link, UnixSenderLink)
        assert link._sock is not None
        yield sender, receiver, link._sock, sent


async def test_who_asks_often_in_one_turn_is_answered_once(address: str) -> None:
    async with rogue_receiver(address) as (sender, receiver):
        await sender.send(pattern(0, 3))
        await receiver.say(*[Inquire()] * MAX_FRAMES)
        [account] = await receiver.accounts(1)
        assert account.in_flight == 1
        await receiver.say(Inquire())
        assert len(await receiver.accounts(1)) == 1
        with pytest.raises(BlockingIOError):
            receiver.sock.recv(1)


async def test_who_asks_and_does_not_read_makes_nothing_grow_and_is_answered_once(address: str) -> None:
    async with clogged(address) as (_, receiver, sock, sent):
        queued = sock._unsent_bytes
        assert queued > 0
        for _ in range(20):
            await receiver.say(*[Inquire()] * MAX_FRAMES)
            await asyncio.sleep(0)
            assert len(_tasks()) <= 1
        await until(lambda: len(_tasks()) == 1)
        assert sock._unsent_bytes == queued
        [account] = await receiver.accounts(1)
        assert account.in_flight == sent
        await until(lambda: not _tasks())
        with pytest.raises(BlockingIOError):
            receiver.sock.recv(1)


async def test_an_account_that_waits_for_room_ends_with_its_receiver(address: str) -> None:
    async with clogged(address) as (sender, receiver, _, sent):
        await receiver.say(Inquire())
        await until(lambda: len(_tasks()) == 1)
        receiver.sock.close()
        await until(lambda: sender.statistics().receivers_lost == 1)
        await until(lambda: not _tasks())
        assert sender.statistics().in_flight == 0
        assert sent > 0


async def test_an_account_that_waits_for_room_ends_with_its_sender(address: str) -> None:
    async with clogged(address) as (sender, receiver, _, _):
        await receiver.say(Inquire())
        await until(lambda: len(_tasks()) == 1)
        [waiting] = _tasks()
        closing = asyncio.create_task(sender.aclose())  # which waits to send its closing record
        await asyncio.wait([waiting])
        await receiver.say(Inquire())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not _tasks()
        assert not closing.done()
        closing.cancel()
        await asyncio.wait([closing])
