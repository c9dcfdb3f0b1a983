"""Inspections of receivers: their reports, invalid answers, and addresses without a receiver."""

# ruff: noqa: ASYNC240 - the paths of tests are quick

import asyncio
import contextlib
import multiprocessing
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from aiotensor import (
    AccessDeniedError,
    AioTensorError,
    PeerLostError,
    ProtocolError,
    TensorQueue,
    TensorReceiver,
    TensorSender,
    UsageError,
)
from aiotensor.inspection import inspect
from aiotensor.protocol.frames import (
    MAX_ROWS,
    VERSION,
    Close,
    ReceiverReport,
    SenderSummary,
    Taken,
)
from tests.bare_peers import bare_inspector, inspect_patiently, inspecting_bare_receiver
from tests.frames import receiver_hello
from tests.pairs import endpoint
from tests.transports.unix_ends import in_child, leave_stale
from verification.fuzz.listening import waiting_at
from verification.fuzz.speaking import say
from verification.internals import unidentified_at
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


async def _report() -> ReceiverReport:
    """Return the report of a receiver with one sender."""
    with endpoint("unix") as place:
        async with TensorReceiver(place) as receiver:
            return ReceiverReport(receiver.statistics(), (SenderSummary("s", 1, 1, 1, 0, 0, 0, 0, 0, 0),))


@pytest.mark.parametrize("name", ["nonsense", "a frame for senders", "unnamed"])
async def test_an_invalid_answer_of_a_receiver_raises_protocol_error(name: str, address: str) -> None:
    report, admission = await _report(), receiver_hello()
    said: dict[str, Sequence[Any]] = {
        "a frame for senders": [admission, Taken(())],
        "unnamed": [report],
    }
    async with inspecting_bare_receiver(address) as (looking, rogue):
        if name == "nonsense":
            assert await say(rogue.sock, b"\xff\x00")
        else:
            await rogue.say(*said[name])
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


@contextlib.contextmanager
def _crowd(listener: socket.socket) -> Iterator[int]:
    """Fill the backlog of a listener, and yield the number of connections in it."""
    listener.listen(1)
    count = 0
    with contextlib.ExitStack() as stack:
        while True:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.setblocking(False)
            try:
                sock.connect(listener.getsockname())
            except BlockingIOError:
                break
            count += 1
        yield count


async def test_inspect_times_out_if_the_receiver_does_not_answer(address: str) -> None:
    with waiting_at(address) as listener:
        with pytest.raises(PeerLostError, match=r"has not answered for 0\.05 s"):
            await inspect(address, patience_s=HURRY_S)
        with (
            _crowd(listener),
            pytest.raises(PeerLostError, match=r"has not answered for 0\.05 s: it is stopped"),
        ):
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


async def test_inspecting_a_socket_of_another_type_raises_usage_error(address: str) -> None:
    path = address.removeprefix("unix://")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(UsageError, match="is not one of aiotensor"):
            await inspect_patiently(address)
    os.unlink(path)


def _look_as_nobody(address: str) -> str:
    os.setuid(65534)
    try:
        asyncio.run(inspect_patiently(address))
    except AccessDeniedError as error:
        return str(error)
    return "it was let in"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_another_user_cannot_inspect_a_receiver(address: str) -> None:
    path = Path(address.removeprefix("unix://"))
    path.parent.chmod(0o755)
    async with TensorReceiver(address) as receiver:
        assert "may not connect" in await in_child(_look_as_nobody, address)
        path.chmod(0o666)
        assert "runs as user 0, but this process runs as user" in await in_child(_look_as_nobody, address)
        assert unidentified_at(receiver) == 0
