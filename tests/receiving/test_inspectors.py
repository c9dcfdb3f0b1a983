"""Observing a receiver does not affect it, its senders or others; unauthorized observers are rejected."""

import asyncio
import contextlib
import os

import pytest

from aiotensor import PeerLostError, TensorReceiver, TensorSender
from aiotensor.inspection import inspect
from aiotensor.protocol.frames import (
    MAX_RECORD_BYTES,
    VERSION,
    Account,
    Bye,
    Hello,
    Inquire,
    Look,
    Report,
    ToObserver,
    Welcome,
    encode,
)
from aiotensor.receiving.incoming import MAX_UNIDENTIFIED
from aiotensor.transports import unix
from tests.frames import ACCOUNT
from tests.looking import PATIENCE_S, look_at, observers, observing
from tests.transports.unwritable import Unwritable
from verification.descriptors import accepted_at
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


_REPLACED = Bye(
    f"a newer connection replaced it: at most {MAX_UNIDENTIFIED} may be unidentified or inspect", retry=True
)


# Inquiries to senders


async def test_a_stopped_sender_is_told_as_silent_and_comes_back_without_being_cut_off(address: str) -> None:
    async with (
        TensorReceiver(address) as receiver,
        TensorSender(address) as other,
        peers.peers(address, 1) as [child],
    ):
        name = await child.call(peers.open_sender, 4, 1 << 22)
        await until(lambda: receiver.statistics().senders == 2)
        await child.stop()
        try:
            found = await inspect(address, patience_s=1.0)
            told = {sender.sender: sender.statistics for sender in found.senders}
            assert told[name] is None
            assert told[other.id] is not None
            late = asyncio.create_task(look_at(address))
            await until(lambda: observers(receiver) == 1)
        finally:
            child.go_on()
        for found in (await late, await look_at(address)):
            assert all(sender.statistics is not None for sender in found.senders)
        assert receiver.statistics().senders == 2
        assert receiver.statistics().senders_lost == 0
        await child.call(peers.send_pattern, 0, BIG)
        await anext(receiver)


async def test_a_stopped_sender_is_asked_once_however_often_somebody_looks(address: str) -> None:
    async with TensorReceiver(address) as receiver, peers.peers(address, 1) as [child]:
        name = await child.call(peers.open_sender)
        await until(lambda: receiver.statistics().senders == 1)
        await child.stop()
        try:
            written = _written_to(receiver, name)
            async with observing(address) as first, observing(address) as second:
                for observer in (first, second):
                    await observer.reports()
                for _ in range(50):
                    async with observing(address) as passing:
                        await passing.reports()
                await until(lambda: observers(receiver) == 2)
                assert written == [encode(Inquire())]
                child.go_on()
                for observer in (first, second):
                    [account] = await observer.read() or []
                    assert isinstance(account, Account)
                    assert account.sender == name
        finally:
            child.go_on()
        # The sender also answers the inquiry of the observers that are gone, once, and within the protocol.
        assert (await look_at(address)).senders[0].statistics is not None
        assert written == [encode(Inquire())] * 2
        assert receiver.statistics().senders == 1


def _written_to(receiver: TensorReceiver, sender: str) -> list[bytes]:
    """Record the records that the receiver writes to a sender from now on."""
    link = receiver._incoming.link_of(sender)
    assert link is not None
    written: list[bytes] = []
    write = link.write

    def noted(data: bytes) -> None:
        written.append(data)
        write(data)

    link.write = noted  # type: ignore[method-assign]
    return written


async def test_a_sender_that_dies_before_it_has_answered_owes_nothing_any_more(address: str) -> None:
    async with TensorReceiver(address) as receiver, peers.peers(address, 1) as [child]:
        await child.call(peers.open_sender)
        await until(lambda: receiver.statistics().senders == 1)
        await child.stop()
        async with observing(address) as observer:
            await observer.reports()
            child.kill()
            await until(lambda: receiver.statistics().senders == 0)
            assert not receiver._incoming._observers._asked
            assert observers(receiver) == 1
        await until(lambda: observers(receiver) == 0)


async def test_those_who_look_at_once_are_all_answered(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        await until(lambda: receiver.statistics().senders == 1)
        written = _written_to(receiver, sender.id)

        found = await asyncio.gather(*(look_at(address) for _ in range(20)))

        assert all(one.senders[0].statistics is not None for one in found)
        assert set(written) == {encode(Inquire())}
        assert len(written) < 20
        assert not receiver._incoming._observers._asked
        await until(lambda: observers(receiver) == 0)


# Costs that other peers do not pay


async def test_looking_takes_nobodys_place_and_counts_as_nothing(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address, max_senders=1, max_unclaimed_messages=2) as receiver:
        async with observing(address) as early:
            assert [report.senders for report in await early.reports()] == [()]
            async with TensorSender(address, 2) as sender:
                await sender.send(pattern(0, 3))
                async with observing(address) as late:
                    assert [len(report.senders) for report in await late.reports()] == [1]
                    assert (await look_at(address)).statistics == receiver.statistics()
                    assert receiver.statistics().senders == 1
                    assert receiver.statistics().promised_messages == 2
                await until(lambda: observers(receiver) == 1)
                await anext(receiver)
                await sender.drain()
        await until(lambda: receiver.statistics().senders == 0)
        await until(lambda: observers(receiver) == 0)
        assert receiver.statistics().senders_lost == receiver.statistics().senders_refused == 0
    assert not caplog.records


async def test_those_who_look_make_room_for_whoever_comes_the_first_of_them_first(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address) as receiver, contextlib.AsyncExitStack() as stack:
        crowd = [await stack.enter_async_context(observing(address)) for _ in range(MAX_UNIDENTIFIED)]
        for observer in crowd:
            await observer.reports()
        async with TensorSender(address) as sender:
            await receiver.receive(await sender.send(pattern(0, 3)))
        assert (await look_at(address)).statistics.senders_refused == 0
        await until(lambda: observers(receiver) == MAX_UNIDENTIFIED - 1)
        [bye] = await crowd[0].read_all()
        assert bye == _REPLACED
        assert not caplog.records
        await until(lambda: receiver.statistics().senders == 0)
        await stack.enter_async_context(observing(address))
        async with TensorSender(address) as sender:
            await receiver.receive(await sender.send(pattern(0, 3)))
        assert [type(frame) for frame in await crowd[1].read_all()] == [Bye]


async def test_where_none_inspects_a_new_connection_replaces_the_oldest_unidentified_one(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address) as receiver, contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(observing(address))
        await first.reports()
        silent = [
            await stack.enter_async_context(observing(address, looks=False)) for _ in range(MAX_UNIDENTIFIED)
        ]
        assert await first.read_all() == [_REPLACED]
        assert not caplog.records
        async with TensorSender(address) as sender:
            await receiver.receive(await sender.send(pattern(0, 3)))
        assert await silent[0].read_all() == [_REPLACED]
        await silent[1].say(encode(Look(VERSION, 1)))
        assert await silent[1].reports()
        assert receiver.statistics().senders_refused == 1
        [record] = caplog.records
        assert vars(record)["event"] == "connection_cut_off"
        assert vars(record)["peer_pid"] == os.getpid()
        await stack.aclose()
        await until(lambda: not accepted_at(address))
        # Nor does it count them: the full number of unidentified peers can still connect.
        for _ in range(MAX_UNIDENTIFIED):
            await stack.enter_async_context(observing(address, looks=False))
        await until(lambda: len(accepted_at(address)) == MAX_UNIDENTIFIED)
        assert receiver.statistics().senders_refused == 1
        await stack.aclose()
        await until(lambda: not accepted_at(address))
        assert (await look_at(address)).senders == ()


async def test_those_who_go_in_the_middle_of_a_look_are_forgotten_at_once(address: str) -> None:
    async with TensorReceiver(address) as receiver, peers.peers(address, 1) as [child]:
        await child.call(peers.open_sender)
        await until(lambda: receiver.statistics().senders == 1)
        await child.stop()
        try:
            for _ in range(3):
                async with observing(address) as observer:
                    await observer.reports()
                await until(lambda: observers(receiver) == 0)
                assert list(receiver._incoming._observers._asked.values()) == [set()]
            looking = asyncio.create_task(look_at(address))
            await until(lambda: observers(receiver) == 1)
            looking.cancel()
            await asyncio.wait([looking])
            await until(lambda: observers(receiver) == 0)
        finally:
            child.go_on()
        await until(lambda: not receiver._incoming._observers._asked)  # it has answered correctly
        assert receiver.statistics().senders == 1


async def test_who_looks_and_does_not_read_harms_nobody_and_is_not_waited_for(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TensorReceiver(address, max_senders=None) as receiver, contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(TensorSender(address, 1, arena_bytes=1))
        await until(lambda: receiver.statistics().senders == 1)
        for _ in range(MAX_UNIDENTIFIED - 2):
            await stack.enter_async_context(observing(address))
        await until(lambda: observers(receiver) == MAX_UNIDENTIFIED - 2)
        assert (await look_at(address)).senders[0].statistics is not None
        await sender.send(pattern(0, 3))
        await anext(receiver)
        await sender.drain()
        # Neither is an inspector whose socket is full: records that the kernel does not accept are queued, up
        # to a limit.
        monkeypatch.setattr(unix, "MAX_UNREAD_BYTES", 1 << 20)
        before = set(receiver._incoming._observers._observers)
        await stack.enter_async_context(observing(address))
        await until(lambda: observers(receiver) == MAX_UNIDENTIFIED - 1)
        [deaf] = set(receiver._incoming._observers._observers) - before
        while deaf in receiver._incoming._observers:
            deaf.write(bytes(60_000))
        await sender.send(pattern(1, 3))
        await anext(receiver)
        assert receiver.statistics().senders_lost == 0


async def test_one_who_cannot_be_told_anything_is_forgotten_and_nobody_is_asked(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address):
        await until(lambda: receiver.statistics().senders == 1)
        link = Unwritable(receiver)
        receiver._incoming.link_opened(link)
        receiver._incoming.record_arrived(link, encode(Look(VERSION, 1)), [])
        assert observers(receiver) == 0
        assert not receiver._incoming._observers._asked


async def test_a_sender_that_cannot_be_asked_is_lost_and_the_others_are_asked(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address) as honest:
        await until(lambda: receiver.statistics().senders == 1)
        link = Unwritable(receiver)
        receiver._incoming.link_opened(link)
        link.write = lambda data: None  # type: ignore[method-assign]
        receiver._incoming.record_arrived(link, encode(Hello(VERSION, 7, "s", 4, 1)), [])
        del link.write
        async with observing(address) as observer:
            [report] = await observer.reports()
            assert [row.sender for row in report.senders] == [honest.id, "s"]
            [account] = await observer.read() or []
            assert isinstance(account, Account)
            assert account.sender == honest.id
        assert not receiver._incoming._observers._asked
        assert receiver.statistics().senders_lost == 1


async def test_a_receiver_that_closes_waits_for_nobody_who_looks(address: str) -> None:
    async with TensorReceiver(address) as receiver, observing(address) as observer:
        [report] = await observer.reports()
        [link] = receiver._incoming._observers._observers
        for _ in range(20):
            link.write(encode(report) + bytes(60_000))  # unread until the receiver has closed
        async with asyncio.timeout(PATIENCE_S):
            await receiver.aclose()


async def test_a_look_at_a_receiver_that_goes_says_so(address: str) -> None:
    async with peers.peers(address, 1) as [child]:
        async with TensorReceiver(address) as receiver:
            await child.call(peers.open_sender)
            await until(lambda: receiver.statistics().senders == 1)
            await child.stop()
            looking = asyncio.create_task(look_at(address))
            await until(lambda: observers(receiver) == 1)
        with pytest.raises(PeerLostError, match="is gone") as caught:
            await looking
        assert caught.value.pid == os.getpid()
        child.go_on()


async def test_nothing_is_done_while_nobody_looks(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        await until(lambda: receiver.statistics().senders == 1)
        await look_at(address)
        await until(lambda: observers(receiver) == 0)
        accountant = sender._outgoing.conversation._accountant
        assert accountant._telling is not None
        assert accountant._telling.done()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("aiotensor")]


# Violations of the protocol


async def _is_cut_off(address: str, *records: bytes) -> list[ToObserver]:
    """Send records, and return all replies until the end of the connection."""
    async with observing(address, looks=False) as observer:
        for record in records:
            await observer.say(record)
        return await observer.read_all()


@pytest.mark.parametrize(
    "second",
    [
        encode(Look(VERSION, 1)),
        encode(Hello(VERSION, 1, "s", 1, 1)),
        encode(ACCOUNT),
        encode(Bye()),
        b"nonsense",
    ],
    ids=["a look", "an introduction", "an account", "a goodbye", "nonsense"],
)
@pytest.mark.parametrize("together", [False, True])
async def test_whoever_looks_may_say_nothing_else(
    second: bytes, together: bool, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        await until(lambda: receiver.statistics().senders == 1)
        look = encode(Look(VERSION, 1))
        if together and second != b"nonsense":
            frames = await _is_cut_off(address, b"\x92" + look[1:] + second[1:])
        else:
            frames = await _is_cut_off(address, look, second)
        assert [type(frame) for frame in frames[:2]] == [Welcome, Report]
        assert "broke the protocol" in caplog.text
        await until(lambda: observers(receiver) == 0)
        assert receiver.statistics().senders == 1
        assert receiver.statistics().senders_lost == 0
        await receiver.receive(await sender.send(pattern(0, 3)))


async def test_a_sender_that_looks_breaks_the_protocol(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address) as receiver:
        [welcome] = await _is_cut_off(address, encode(Hello(VERSION, 1, "s", 1, 1), Look(VERSION, 1)))
        assert isinstance(welcome, Welcome)
        assert "introduced itself twice" in caplog.text
        assert receiver.statistics().senders_lost == 1


async def test_an_account_that_nobody_asked_for_breaks_the_protocol(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        await until(lambda: receiver.statistics().senders == 1)
        await look_at(address)
        sender._outgoing.conversation._outbox.add(ACCOUNT)  # a second answer to one question
        await until(lambda: receiver.statistics().senders_lost == 1)
        assert "an account that nobody asked for" in caplog.text


async def test_another_version_is_told_by_both_sides(address: str, caplog: pytest.LogCaptureFixture) -> None:
    async with TensorReceiver(address) as receiver:
        [welcome] = await _is_cut_off(address, encode(Look(VERSION + 1, 1)))
        assert welcome == Welcome(VERSION, os.getpid(), MAX_RECORD_BYTES, receiver.id)
        assert f"speaks version {VERSION + 1}, this receiver speaks {VERSION}" in caplog.text
        await until(lambda: observers(receiver) == 0)
