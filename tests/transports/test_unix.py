"""The socket link: how the two sides find each other."""

# ruff: noqa: ASYNC240 - the paths of tests are quick
import asyncio
import errno
import itertools
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from aiotensor.errors import PeerLostError, UsageError
from aiotensor.transports.records import RecordSocket
from aiotensor.transports.unix import UnixSenderLink
from tests.transports.ends import open_sockets, turns
from tests.transports.unix_ends import Receiver, Sender, connecting, leave_stale, listening

# Between attempts to reach a receiver that keeps no connection.
_DELAYS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.25)


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = open_sockets()  # the loop comes and goes in between
    yield
    assert open_sockets() == before


def look_now(sender: Sender) -> None:
    """Do what its timer would do a little later."""
    assert sender.link._retry is not None
    sender.link._retry.cancel()
    sender.link._look()


# Connecting


async def test_records_go_both_ways_after_the_introduction(path: Path) -> None:
    async with listening(path) as receiver, connecting(path) as sender:
        assert sender.is_ready()
        sender.link.write(b"there")
        assert await receiver.arrived.get() == b"introduction 1"
        assert await receiver.arrived.get() == b"there"
        receiver.links[0].write(b"back")
        assert await sender.arrived.get() == b"back"
        sender.link.close()
        assert await receiver.lost.get() == "the other side closed the connection"
        assert sender.lost.empty()


async def test_a_sender_that_is_first_connects_when_the_receiver_appears(path: Path) -> None:
    async with connecting(path) as sender:
        assert not sender.is_ready()
        with pytest.raises(UsageError, match="no receiver"):
            sender.link.write(b"to nobody")
        waiting = [asyncio.create_task(sender.link.ready()) for _ in range(2)]
        await turns()
        assert not any(wait.done() for wait in waiting)
        async with listening(path) as receiver:
            await asyncio.gather(*waiting)
            assert sender.is_ready()
            assert await receiver.arrived.get() == b"introduction 1"


async def test_a_sender_finds_the_next_receiver_and_introduces_itself_again(path: Path) -> None:
    async with listening(path) as first, connecting(path) as sender:
        assert await first.arrived.get() == b"introduction 1"
        await first.listener.close()
        assert isinstance(await sender.lost.get(), PeerLostError)
        assert not sender.is_ready()
        async with listening(path) as second:
            await sender.link.ready()
            assert await second.arrived.get() == b"introduction 2"


async def test_a_sender_that_could_not_introduce_itself_says_so_once_and_tries_again_from_the_start(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: RecordSocket, data: bytes, descriptors: Sequence[int]) -> bool:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    monkeypatch.setattr(RecordSocket, "_send", refuse)
    async with listening(path) as receiver:
        sender = Sender(path)
        with pytest.raises(OSError, match="buffer"):
            await sender.link.open(sender)
        assert await receiver.lost.get()
    async with connecting(path) as sender, listening(path) as receiver:
        for _ in range(3):
            assert await receiver.lost.get()  # a connection that was of no use
        assert not sender.is_ready()
        assert caplog.text.count("cannot be looked for") == 1
        monkeypatch.undo()
        while not sender.is_ready():
            await sender.link.ready()
        sender.link.write(b"there")
        assert await receiver.arrived.get() == f"introduction {sender.introductions}".encode()
        assert await receiver.arrived.get() == b"there"


async def test_a_sender_that_lacks_memory_to_connect_tries_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(sock: socket.socket, address: str) -> None:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    async with connecting(path) as sender, listening(path):
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "connect", refuse)
            look_now(sender)
        assert not sender.is_ready()
        assert sender.lost.empty()
        look_now(sender)
        assert sender.is_ready()


async def test_a_sender_looks_for_a_receiver_only_while_there_is_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connecting(path) as sender:
        delays = []
        for _ in range(10):
            delays.append(sender.link._delay)
            look_now(sender)
        assert delays == sorted(delays)
        assert delays[0] < delays[-1] == delays[-2] == 0.25
        async with listening(path) as receiver:
            look_now(sender)
            assert sender.looks_at() is None
            await receiver.arrived.get()
            receiver.links[0].write(b"welcome")
            await sender.arrived.get()
            assert sender.looks_at() is None
            await asyncio.sleep(0.3)  # a receiver that stays for longer than the longest delay
            sender.link.drop(retry=True)
            assert sender.looks_at()
            assert sender.link._delay == 0.01  # it begins anew
            await sender.link.ready()
            assert sender.looks_at() is None
        sender.link.close()
        assert sender.looks_at() is None


async def test_a_receiver_that_closes_every_connection_at_once_is_tried_less_and_less_often(
    path: Path,
) -> None:
    loop = asyncio.get_running_loop()
    times = []
    async with listening(path) as receiver, connecting(path) as sender:
        for _ in range(8):
            assert await receiver.arrived.get()
            times.append(loop.time())
            receiver.links[0].write(b"welcome")
            await sender.arrived.get()
            receiver.links.pop().close()
            await sender.lost.get()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    # No timer ends early, however slow the machine is.
    assert all(gap > 0.9 * least for gap, least in zip(gaps, _DELAYS_S, strict=True)), gaps


async def test_a_sender_tries_a_full_backlog_at_a_steady_rate(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(str(path))
            async with connecting(path) as sender:
                for _ in range(10):
                    assert sender.link.is_kept_waiting
                    wait = sender.looks_at()
                    assert wait is not None
                    assert wait - asyncio.get_running_loop().time() < 0.02
                    look_now(sender)
                listener.accept()[0].close()
                await sender.link.ready()
                assert not sender.link.is_kept_waiting


async def test_a_dropped_receiver_that_is_not_retried_is_looked_for_on_demand_only(path: Path) -> None:
    async with listening(path) as receiver, connecting(path) as sender:
        sender.link.drop(retry=False)
        assert sender.looks_at() is None
        assert await receiver.lost.get()
        assert not receiver.links
        assert not sender.is_ready()
        await sender.link.ready()
        assert sender.is_ready()
        assert [await receiver.arrived.get() for _ in range(2)] == [b"introduction 1", b"introduction 2"]


async def test_a_receiver_that_is_gone_after_a_drop_is_looked_for_while_somebody_asked(path: Path) -> None:
    async with listening(path), connecting(path) as sender:
        sender.link.drop(retry=False)
    async with connecting(path) as sender:
        waiting = asyncio.create_task(sender.link.ready())
        await turns()
        assert sender.looks_at()
        sender.link.close()
        await waiting


async def test_dropping_wakes_who_waits_for_room(path: Path) -> None:
    async with listening(path) as receiver, connecting(path) as sender:
        await receiver.arrived.get()
        asyncio.get_running_loop().remove_reader(receiver.links[0]._sock._sock.fileno())  # type: ignore[attr-defined]
        while sender.is_ready():
            sender.link.write(bytes(10_000))
        waiting = [asyncio.create_task(wait()) for wait in (sender.link.ready, sender.link.flush)]
        await turns()
        assert not any(wait.done() for wait in waiting)
        sender.link.drop(retry=False)
        await asyncio.gather(*waiting)


async def test_what_is_no_socket_of_a_receiver_is_refused_by_a_sender(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(str(path))
        stream.listen()
        with pytest.raises(UsageError, match="nothing can be sent to"):
            await UnixSenderLink(str(path)).open(Sender(path))


# The place


async def test_only_this_user_may_connect_and_nothing_is_left_after_closing(path: Path) -> None:
    async with listening(path):
        status = path.stat()
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
    assert not list(path.parent.iterdir())


async def test_the_socket_of_a_dead_receiver_is_taken_over(path: Path) -> None:
    leave_stale(path)
    async with connecting(path) as sender, listening(path):
        await sender.link.ready()
        assert sender.is_ready()


async def test_the_place_of_a_living_receiver_is_refused(path: Path) -> None:
    async with listening(path) as receiver, connecting(path) as sender:
        with pytest.raises(UsageError, match="a receiver listens at"):
            await Receiver(path).listener.open(receiver, 1 << 16)
        assert await receiver.arrived.get() == b"introduction 1"
        assert sender.is_ready()
        assert path.exists()


async def test_a_living_receiver_is_told_from_a_dead_one_also_when_it_is_too_busy_to_accept(
    path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy:
        busy.bind(str(path))
        busy.listen(0)
        async with connecting(path), connecting(path) as second:
            assert not second.is_ready()  # it waits for its turn
            with pytest.raises(UsageError, match="a receiver listens at"):
                await Receiver(path).listener.open(Receiver(path), 1 << 16)
    assert path.exists()


@pytest.mark.parametrize("kind", ["file", "link to a file", "folder", "socket of another kind"])
async def test_what_is_no_receivers_socket_is_never_removed(kind: str, path: Path) -> None:
    other = path.with_name("other")
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if kind == "file":
        path.write_text("precious")
    elif kind == "link to a file":
        other.write_text("precious")
        path.symlink_to(other)
    elif kind == "folder":
        path.mkdir()
    else:
        stream.bind(str(path))
        stream.listen()
    before = path.lstat()
    with stream, pytest.raises(UsageError):
        await Receiver(path).listener.open(Receiver(path), 1 << 16)
    assert path.lstat().st_ino == before.st_ino
    if "file" in kind:
        assert path.read_text() == "precious"


async def test_the_socket_of_another_receiver_is_not_removed_at_close(path: Path) -> None:
    async with listening(path) as first:
        path.unlink()
        async with listening(path) as second, connecting(path):
            await first.listener.close()
            assert path.exists()
            assert await second.arrived.get() == b"introduction 1"
        assert not path.exists()


async def test_of_two_receivers_at_one_stale_place_exactly_one_wins(path: Path) -> None:
    for _ in range(20):
        leave_stale(path)
        receivers = [Receiver(path) for _ in range(4)]
        opened = await asyncio.gather(
            *(receiver.listener.open(receiver, 1 << 16) for receiver in receivers), return_exceptions=True
        )
        assert [type(one) for one in opened if one is not None] == [UsageError] * 3
        async with connecting(path):
            assert await receivers[opened.index(None)].arrived.get() == b"introduction 1"
        for receiver in receivers:
            await receiver.listener.close()
        assert not path.exists()
