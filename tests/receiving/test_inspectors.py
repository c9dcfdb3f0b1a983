"""Inspecting a receiver does not affect it, its senders or others; unauthorized inspectors are rejected."""

import asyncio
import contextlib
import os

import pytest

from aiotensor import TensorReceiver, TensorSender
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import (
    MAX_RECORD_BYTES,
    VERSION,
    Hello,
    Inspect,
    ReceiverReport,
    ToInspector,
    Welcome,
    encode,
)
from aiotensor.receiving.intake import MAX_UNIDENTIFIED
from aiotensor.transports import unix
from tests.bare_peers import PATIENCE_S, bare_inspector, inspect_patiently, inspector_count
from tests.transports.unwritable import Unwritable
from verification.descriptors import accepted_at
from verification.internals import inspectors_of, intake_of
from verification.patterns import pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


_REPLACED = Close(
    f"a newer connection replaced it: at most {MAX_UNIDENTIFIED} connections may be unidentified or belong "
    "to inspectors",
    retry=True,
)


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


async def test_an_inspector_that_does_not_read_affects_no_other_peer(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TensorReceiver(address, max_senders=None) as receiver, contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(TensorSender(address, 1, arena_bytes=1))
        await until(lambda: receiver.statistics().senders == 1)
        for _ in range(MAX_UNIDENTIFIED - 2):
            await stack.enter_async_context(bare_inspector(address))
        await until(lambda: inspector_count(receiver) == MAX_UNIDENTIFIED - 2)
        assert (await inspect_patiently(address)).senders[0].in_flight == 0
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
        while deaf in inspectors_of(receiver):
            deaf.connection.report(receiver.statistics(), [])
            deaf.flush()
        await sender.send(pattern(1, 3))
        await anext(receiver)
        assert receiver.statistics().senders_lost == 0


async def test_an_unwritable_inspector_is_removed(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address):
        await until(lambda: receiver.statistics().senders == 1)
        transport = Unwritable()
        intake_of(receiver).connection_accepted(transport)
        transport.receive(encode(Inspect(VERSION, 1)))
        assert inspector_count(receiver) == 0


async def test_closing_a_receiver_does_not_wait_for_inspectors(address: str) -> None:
    async with TensorReceiver(address) as receiver, bare_inspector(address) as observer:
        [report] = await observer.reports()
        [inspector] = inspectors_of(receiver)
        for _ in range(20):
            inspector.transport.write(encode(report) + bytes(60_000))  # unread until the receiver has closed
        async with asyncio.timeout(PATIENCE_S):
            await receiver.aclose()


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
        encode(Close()),
        b"nonsense",
    ],
    ids=["a look", "an introduction", "a goodbye", "nonsense"],
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
