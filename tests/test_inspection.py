"""Inspections of receivers: their reports, invalid answers, and addresses without a receiver."""

# ruff: noqa: ASYNC240 - the paths of tests are quick

import contextlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from aiotensor import (
    AioTensorError,
    PeerLostError,
    ProtocolError,
    TensorQueue,
    TensorReceiver,
    TensorSender,
)
from aiotensor.inspection import inspect
from aiotensor.protocol.frames import (
    MAX_ROWS,
    VERSION,
    Close,
    ReceiverReport,
    Taken,
)
from tests.bare_peers import bare_inspector, inspect_patiently, inspecting_bare_receiver
from tests.frames import receiver_hello, receiver_statistics
from tests.transports.unix_ends import leave_stale
from verification.fuzz.listening import waiting_at
from verification.fuzz.speaking import say
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

HURRY_S = 0.05  # for peers that never answer


async def test_an_inspection_shows_what_the_receiver_knows_of_itself_and_its_senders(address: str) -> None:
    async with (
        TensorReceiver(address) as receiver,
        TensorSender(address, 3, 8 << 20) as first,
        TensorSender(address, 2, 4 << 20) as second,
    ):
        taken = await receiver.receive(await first.send(pattern(0, BIG)))
        await second.send(pattern(1, 3))
        await second.send(pattern(2, BIG))
        await until(lambda: receiver.statistics().unclaimed_tensors == 2)

        found = await inspect_patiently(address)

        assert found.id == receiver.id
        assert found.pid == os.getpid()
        assert found.statistics == receiver.statistics()
        assert {sender.sender: sender.pid for sender in found.senders} == dict.fromkeys(
            (first.id, second.id), os.getpid()
        )
        one, two = found.senders
        assert (one.max_concurrent_videos, one.arena_bytes) == (3, 8 << 20)
        assert (one.messages, one.in_flight) == (1, 0)
        assert (two.messages, two.in_flight) == (2, 2)
        assert (one.unclaimed_tensors, one.leases, one.leased_bytes) == (0, 1, BIG * 8)
        assert (two.unclaimed_tensors, two.unclaimed_bytes) == (2, 3 * 8 + BIG * 8)
        assert (two.leases, two.leased_bytes) == (1, BIG * 8)

        del taken
        await until(lambda: first.statistics().bytes_in_use == 0)
        assert (await inspect_patiently(address)).senders[0].leased_bytes == 0


async def test_reports_of_many_senders_are_split_over_several_records(address: str) -> None:
    count = MAX_ROWS + 72
    async with TensorReceiver(address, max_senders=count) as receiver, contextlib.AsyncExitStack() as stack:
        senders = [
            await stack.enter_async_context(TensorSender(address, 1, arena_bytes=1)) for _ in range(count)
        ]
        await until(lambda: receiver.statistics().senders == count)
        async with bare_inspector(address) as observer:
            reports = await observer.reports()
            assert [len(report.senders) for report in reports] == [MAX_ROWS, 72]
            assert [report.last for report in reports] == [False, True]

        found = await inspect_patiently(address)

        assert {sender.sender for sender in found.senders} == {sender.id for sender in senders}


@pytest.mark.parametrize(
    "says",
    [[], [receiver_hello(), Taken(())], [ReceiverReport(receiver_statistics(), ())]],
    ids=["nonsense", "a frame for senders", "unnamed"],
)
async def test_an_invalid_answer_of_a_receiver_raises_protocol_error(says: list[Any], address: str) -> None:
    async with inspecting_bare_receiver(address) as (looking, rogue):
        if says:
            await rogue.say(*says)
        else:
            assert await say(rogue.sock, b"\xff\x00")
        with pytest.raises(ProtocolError):
            await looking


@pytest.mark.parametrize(
    ("says", "error", "text"),
    [
        (
            [receiver_hello(version=VERSION + 1)],
            ProtocolError,
            rf"pid 7.* has protocol version {VERSION + 1}.*install the same",
        ),
        ([receiver_hello(), Close("")], PeerLostError, "it closed"),
        ([receiver_hello(), Close("no room")], PeerLostError, "no room"),
    ],
    ids=["another version", "closed", "refused"],
)
async def test_a_receiver_that_refuses_an_inspection_ends_it_with_the_reason(
    says: list[Any], error: type[AioTensorError], text: str, address: str
) -> None:
    async with inspecting_bare_receiver(address) as (looking, rogue):
        await rogue.say(*says)
        with pytest.raises(error, match=text):
            await looking


async def test_inspecting_an_unused_address_raises_peer_lost_error(address: str) -> None:
    with pytest.raises(PeerLostError, match=f"no process listens at {address}: start"):
        await inspect_patiently(address)
    path = Path(address.removeprefix("unix://"))
    leave_stale(path)
    with pytest.raises(PeerLostError, match=f"no process listens at {address}: start"):
        await inspect_patiently(address)
    path.unlink()


async def test_inspect_times_out_if_the_receiver_does_not_answer(address: str) -> None:
    with waiting_at(address) as listener:
        with pytest.raises(PeerLostError, match=r"has not answered for 0\.05 s"):
            await inspect(address, patience_s=HURRY_S)
        listener.listen(0)  # the first inspection, which was not accepted, leaves no room
        with pytest.raises(PeerLostError, match=r"has not answered for 0\.05 s: it is stopped"):
            await inspect(address, patience_s=HURRY_S)


async def test_wrong_arguments_are_rejected(address: str) -> None:
    with contextlib.closing(multiprocessing.get_context("spawn").Queue()) as plain:
        queues: list[Any] = [TensorQueue(), plain]
        for queue in queues:
            with pytest.raises(TypeError, match=r"no address.*statistics\(\)"):
                await inspect(queue, patience_s=1.0)
    for wrong in ("engine.sock", "udp://host:1", "unix://relative"):
        with pytest.raises(ValueError, match="must be unix:// followed by an absolute path"):
            await inspect(wrong, patience_s=1.0)
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="patience_s must be positive"):
            await inspect(address, patience_s=seconds)
