"""Inspecting a receiver does not affect it, its senders or others; unauthorized inspectors are rejected."""

import asyncio
import contextlib
import os
from collections.abc import Sequence

import pytest

from aiotensor import PeerLostError, TensorReceiver, TensorSender
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import (
    MAX_RECORD_BYTES,
    VERSION,
    Hello,
    Inspect,
    ReceiverReport,
    StatisticsReply,
    StatisticsRequest,
    ToInspector,
    Welcome,
    encode,
)
from aiotensor.receiving.intake import MAX_UNIDENTIFIED
from aiotensor.transports import unix
from tests.bare_peers import PATIENCE_S, bare_inspector, inspect_patiently, inspector_count
from tests.frames import REPLY
from tests.transports.unwritable import Unwritable
from verification.descriptors import accepted_at
from verification.inspecting import inspect_receiver
from verification.internals import awaited_replies, inspectors_of, intake_of, senders_of, session_of
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


_REPLACED = Close(
    f"a newer connection replaced it: at most {MAX_UNIDENTIFIED} connections may be unidentified or belong "
    "to inspectors",
    retry=True,
)


# Inquiries to senders


async def test_a_stopped_sender_is_reported_without_statistics_and_stays_connected(address: str) -> None:
    async with (
        TensorReceiver(address) as receiver,
        TensorSender(address) as other,
        peers.peers(address, 1) as [child],
    ):
        name = await child.call(peers.open_sender, 4, 1 << 22)
        await until(lambda: receiver.statistics().senders == 2)
        await child.stop()
        try:
            found = await inspect_receiver(address, patience_s=1.0)
            told = {sender.sender: sender.statistics for sender in found.senders}
            assert told[name] is None
            assert told[other.id] is not None
            late = asyncio.create_task(inspect_patiently(address))
            await until(lambda: inspector_count(receiver) == 1)
        finally:
            child.go_on()
        for found in (await late, await inspect_patiently(address)):
            assert all(sender.statistics is not None for sender in found.senders)
        assert receiver.statistics().senders == 2
        assert receiver.statistics().senders_lost == 0
        await child.call(peers.send_pattern, 0, BIG)
        await anext(receiver)


async def test_a_stopped_sender_gets_one_request_for_any_number_of_inspectors(address: str) -> None:
    async with TensorReceiver(address) as receiver, peers.peers(address, 1) as [child]:
        name = await child.call(peers.open_sender)
        await until(lambda: receiver.statistics().senders == 1)
        await child.stop()
        try:
            written = _written_to(receiver, name)
            async with bare_inspector(address) as first, bare_inspector(address) as second:
                for observer in (first, second):
                    await observer.reports()
                for _ in range(50):
                    async with bare_inspector(address) as passing:
                        await passing.reports()
                await until(lambda: inspector_count(receiver) == 2)
                assert written == [encode(StatisticsRequest())]
                child.go_on()
                for observer in (first, second):
                    [account] = await observer.read() or []
                    assert isinstance(account, StatisticsReply)
                    assert account.sender == name
        finally:
            child.go_on()
        # The sender also answers the request of the inspectors that have disconnected, once.
        assert (await inspect_patiently(address)).senders[0].statistics is not None
        assert written == [encode(StatisticsRequest())] * 2
        assert receiver.statistics().senders == 1


def _written_to(receiver: TensorReceiver, sender: str) -> list[bytes]:
    """Record the records that the receiver writes to a sender from now on."""
    transport = senders_of(receiver).connected[sender].transport
    written: list[bytes] = []
    write = transport.write

    def noted(data: bytes, descriptors: Sequence[int] = ()) -> None:
        written.append(data)
        write(data, descriptors)

    transport.write = noted  # type: ignore[method-assign]
    return written


async def test_a_pending_statistics_request_ends_when_its_sender_dies(address: str) -> None:
    async with TensorReceiver(address) as receiver, peers.peers(address, 1) as [child]:
        await child.call(peers.open_sender)
        await until(lambda: receiver.statistics().senders == 1)
        await child.stop()
        async with bare_inspector(address) as observer:
            await observer.reports()
            child.kill()
            await until(lambda: receiver.statistics().senders == 0)
            assert not awaited_replies(receiver)
            assert inspector_count(receiver) == 1
        await until(lambda: inspector_count(receiver) == 0)


async def test_concurrent_inspectors_all_receive_replies(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        await until(lambda: receiver.statistics().senders == 1)
        written = _written_to(receiver, sender.id)

        found = await asyncio.gather(*(inspect_patiently(address) for _ in range(20)))

        assert all(one.senders[0].statistics is not None for one in found)
        assert set(written) == {encode(StatisticsRequest())}
        assert len(written) < 20
        assert not awaited_replies(receiver)
        await until(lambda: inspector_count(receiver) == 0)


# Costs that other peers do not pay


async def test_inspectors_do_not_count_against_the_limits_on_senders(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address, max_senders=1, max_unclaimed_messages=2) as receiver:
        async with bare_inspector(address) as early:
            assert [report.senders for report in await early.reports()] == [()]
            async with TensorSender(address, 2) as sender:
                await sender.send(pattern(0, 3))
                async with bare_inspector(address) as late:
                    assert [len(report.senders) for report in await late.reports()] == [1]
                    assert (await inspect_patiently(address)).statistics == receiver.statistics()
                    assert receiver.statistics().senders == 1
                    assert receiver.statistics().promised_messages == 2
                await until(lambda: inspector_count(receiver) == 1)
                await anext(receiver)
                await sender.drain()
        await until(lambda: receiver.statistics().senders == 0)
        await until(lambda: inspector_count(receiver) == 0)
        assert receiver.statistics().senders_lost == receiver.statistics().senders_refused == 0
    assert not caplog.records


async def test_the_oldest_inspector_is_disconnected_first_at_the_connection_limit(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address) as receiver, contextlib.AsyncExitStack() as stack:
        crowd = [await stack.enter_async_context(bare_inspector(address)) for _ in range(MAX_UNIDENTIFIED)]
        for observer in crowd:
            await observer.reports()
        async with TensorSender(address) as sender:
            await receiver.receive(await sender.send(pattern(0, 3)))
        assert (await inspect_patiently(address)).statistics.senders_refused == 0
        await until(lambda: inspector_count(receiver) == MAX_UNIDENTIFIED - 1)
        [bye] = await crowd[0].read_all()
        assert bye == _REPLACED
        assert not caplog.records
        await until(lambda: receiver.statistics().senders == 0)
        await stack.enter_async_context(bare_inspector(address))
        async with TensorSender(address) as sender:
            await receiver.receive(await sender.send(pattern(0, 3)))
        assert [type(frame) for frame in await crowd[1].read_all()] == [Close]


async def test_without_inspectors_the_oldest_unidentified_connection_is_replaced(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address) as receiver, contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(bare_inspector(address))
        await first.reports()
        silent = [
            await stack.enter_async_context(bare_inspector(address, inspects=False))
            for _ in range(MAX_UNIDENTIFIED)
        ]
        assert await first.read_all() == [_REPLACED]
        assert not caplog.records
        async with TensorSender(address) as sender:
            await receiver.receive(await sender.send(pattern(0, 3)))
        assert await silent[0].read_all() == [_REPLACED]
        await silent[1].say(encode(Inspect(VERSION, 1)))
        assert await silent[1].reports()
        assert receiver.statistics().senders_refused == 1
        [record] = caplog.records
        assert vars(record)["event"] == "connection_cut_off"
        assert vars(record)["peer_pid"] == os.getpid()
        await stack.aclose()
        await until(lambda: not accepted_at(address))
        # Nor does it count them: the full number of unidentified peers can still connect.
        for _ in range(MAX_UNIDENTIFIED):
            await stack.enter_async_context(bare_inspector(address, inspects=False))
        await until(lambda: len(accepted_at(address)) == MAX_UNIDENTIFIED)
        assert receiver.statistics().senders_refused == 1
        await stack.aclose()
        await until(lambda: not accepted_at(address))
        assert (await inspect_patiently(address)).senders == ()


async def test_an_inspector_that_disconnects_before_the_replies_is_removed(address: str) -> None:
    async with TensorReceiver(address) as receiver, peers.peers(address, 1) as [child]:
        await child.call(peers.open_sender)
        await until(lambda: receiver.statistics().senders == 1)
        await child.stop()
        try:
            for _ in range(3):
                async with bare_inspector(address) as observer:
                    await observer.reports()
                await until(lambda: inspector_count(receiver) == 0)
                assert awaited_replies(receiver) == [set()]
            looking = asyncio.create_task(inspect_patiently(address))
            await until(lambda: inspector_count(receiver) == 1)
            looking.cancel()
            await asyncio.wait([looking])
            await until(lambda: inspector_count(receiver) == 0)
        finally:
            child.go_on()
        await until(lambda: not awaited_replies(receiver))  # it has replied correctly
        assert receiver.statistics().senders == 1


async def test_an_inspector_that_does_not_read_affects_no_other_peer(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TensorReceiver(address, max_senders=None) as receiver, contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(TensorSender(address, 1, arena_bytes=1))
        await until(lambda: receiver.statistics().senders == 1)
        for _ in range(MAX_UNIDENTIFIED - 2):
            await stack.enter_async_context(bare_inspector(address))
        await until(lambda: inspector_count(receiver) == MAX_UNIDENTIFIED - 2)
        assert (await inspect_patiently(address)).senders[0].statistics is not None
        await sender.send(pattern(0, 3))
        await anext(receiver)
        await sender.drain()
        # Neither is an inspector whose socket is full: records that the kernel does not accept are queued, up
        # to a limit.
        monkeypatch.setattr(unix, "MAX_UNREAD_BYTES", 1 << 20)
        before = set(inspectors_of(receiver))
        await stack.enter_async_context(bare_inspector(address))
        await until(lambda: inspector_count(receiver) == MAX_UNIDENTIFIED - 1)
        [deaf] = set(inspectors_of(receiver)) - before
        report = StatisticsReply(sender.statistics(), "x" * 64)
        while deaf in inspectors_of(receiver):
            deaf.connection.forward(report)
            deaf.flush()
        await sender.send(pattern(1, 3))
        await anext(receiver)
        assert receiver.statistics().senders_lost == 0


async def test_an_unwritable_inspector_is_removed_without_a_statistics_request(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address):
        await until(lambda: receiver.statistics().senders == 1)
        transport = Unwritable()
        intake_of(receiver).connection_accepted(transport)
        transport.receive(encode(Inspect(VERSION, 1)))
        assert inspector_count(receiver) == 0
        assert not awaited_replies(receiver)


async def test_an_unwritable_sender_is_lost_and_the_others_are_still_inspected(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address) as honest:
        await until(lambda: receiver.statistics().senders == 1)
        transport = Unwritable()
        intake_of(receiver).connection_accepted(transport)
        transport.is_broken = False
        transport.receive(encode(Hello(VERSION, 7, "s", 4, 1)))
        transport.is_broken = True
        async with bare_inspector(address) as observer:
            [report] = await observer.reports()
            assert [row.sender for row in report.senders] == [honest.id, "s"]
            [account] = await observer.read() or []
            assert isinstance(account, StatisticsReply)
            assert account.sender == honest.id
        assert not awaited_replies(receiver)
        assert receiver.statistics().senders_lost == 1


async def test_closing_a_receiver_does_not_wait_for_inspectors(address: str) -> None:
    async with TensorReceiver(address) as receiver, bare_inspector(address) as observer:
        [report] = await observer.reports()
        [inspector] = inspectors_of(receiver)
        for _ in range(20):
            inspector.transport.write(encode(report) + bytes(60_000))  # unread until the receiver has closed
        async with asyncio.timeout(PATIENCE_S):
            await receiver.aclose()


async def test_inspecting_a_receiver_that_closes_raises_peer_lost_error(address: str) -> None:
    async with peers.peers(address, 1) as [child]:
        async with TensorReceiver(address) as receiver:
            await child.call(peers.open_sender)
            await until(lambda: receiver.statistics().senders == 1)
            await child.stop()
            looking = asyncio.create_task(inspect_patiently(address))
            await until(lambda: inspector_count(receiver) == 1)
        with pytest.raises(PeerLostError, match="was lost") as caught:
            await looking
        assert caught.value.pid == os.getpid()
        child.go_on()


async def test_no_task_remains_after_an_inspection(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address):
        await until(lambda: receiver.statistics().senders == 1)
        await inspect_patiently(address)
        await until(lambda: inspector_count(receiver) == 0)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("aiotensor")]


# Violations of the protocol


async def _is_cut_off(address: str, *records: bytes) -> list[ToInspector]:
    """Send records, and return all replies until the end of the connection."""
    async with bare_inspector(address, inspects=False) as observer:
        for record in records:
            await observer.say(record)
        return await observer.read_all()


@pytest.mark.parametrize(
    "second",
    [
        encode(Inspect(VERSION, 1)),
        encode(Hello(VERSION, 1, "s", 1, 1)),
        encode(REPLY),
        encode(Close()),
        b"nonsense",
    ],
    ids=["a look", "an introduction", "an account", "a goodbye", "nonsense"],
)
async def test_any_further_record_of_an_inspector_is_a_violation(
    second: bytes, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        await until(lambda: receiver.statistics().senders == 1)
        frames = await _is_cut_off(address, encode(Inspect(VERSION, 1)), second)
        assert [type(frame) for frame in frames[:2]] == [Welcome, ReceiverReport]
        assert "broke the protocol" in caplog.text
        await until(lambda: inspector_count(receiver) == 0)
        assert receiver.statistics().senders == 1
        assert receiver.statistics().senders_lost == 0
        await receiver.receive(await sender.send(pattern(0, 3)))


async def test_an_unrequested_statistics_reply_is_a_violation(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        await until(lambda: receiver.statistics().senders == 1)
        await inspect_patiently(address)
        session_of(sender).connection.reply(sender.statistics())  # a second reply to one request
        session_of(sender).flush()
        await until(lambda: receiver.statistics().senders_lost == 1)
        assert "statistics without a request" in caplog.text


async def test_an_inspector_of_another_version_is_refused_and_logged(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address) as receiver:
        welcome, close = await _is_cut_off(address, encode(Inspect(VERSION + 1, 1)))
        assert isinstance(close, Close)
        assert close.is_refusal
        assert welcome == Welcome(VERSION, os.getpid(), MAX_RECORD_BYTES, receiver.id)
        assert (
            f"the inspector has protocol version {VERSION + 1}, and the receiver has version {VERSION}"
            in caplog.text
        )
        await until(lambda: inspector_count(receiver) == 0)
