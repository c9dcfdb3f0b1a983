"""Connections at a path: how the two sides find each other."""

# ruff: noqa: ASYNC240 - the paths of tests are quick
import asyncio
import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from aiotensor.errors import UsageError
from aiotensor.runtime import outage
from tests.selection import COMPLETE
from tests.transports.ends import turns
from tests.transports.unix_ends import Receiver, connecting, leave_stale, listening, recorded_delays
from verification.waiting import until

# Between attempts to reach a receiver that keeps no connection.
_DELAYS_S = [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]

_FULL_DELAY_S = 0.01  # while the backlog is full


# Connecting


async def test_a_sender_connects_to_the_next_receiver_and_repeats_its_hello(path: Path) -> None:
    async with listening(path) as first:
        with connecting(path) as sender:
            assert await (await first.accepted.get()).read() == b"introduction 1"
            await first.end()
            await sender.connections[0].was_lost.wait()
            assert not sender.is_connected()
            async with listening(path) as second:
                assert await (await second.accepted.get()).read() == b"introduction 2"


async def test_a_failed_hello_is_retried_and_logged(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "_FIRST_LINE_S", 0.001)
    monkeypatch.setattr(outage, "_NEXT_LINE_S", 0.001)
    with connecting(path) as sender:
        sender.error = OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        async with listening(path) as receiver:
            for _ in range(3):
                await (await receiver.accepted.get()).was_lost.wait()
            await until(lambda: os.strerror(errno.ENOBUFS) in caplog.text)
            sender.error = None
            await sender.next_connection.get()
            while not receiver.ends[-1].arrived.qsize():
                await receiver.accepted.get()
                await turns()
            assert await receiver.ends[-1].read() == f"introduction {sender.attempts}".encode()


async def test_a_sender_that_lacks_memory_to_connect_tries_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()

    def refuse(sock: socket.socket, address: str) -> None:
        refused.set()
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    with connecting(path) as sender:
        async with listening(path):
            with monkeypatch.context() as patch:
                patch.setattr(socket.socket, "connect", refuse)
                await refused.wait()
            assert not sender.is_connected()
            await sender.next_connection.get()
            assert sender.failures.empty()


async def test_a_sender_polls_with_growing_delays_only_while_there_is_no_receiver(path: Path) -> None:
    with recorded_delays() as delays, connecting(path) as sender:
        await delays.reach(len(_DELAYS_S))
        assert delays == _DELAYS_S
        async with listening(path) as receiver:
            await sender.next_connection.get()
            far = await receiver.accepted.get()
            far.transport.write(b"welcome")
            await sender.connections[0].read()
            count = len(delays)
            await turns(20)
            assert len(delays) == count


async def test_delays_grow_while_the_receiver_closes_every_connection(
    path: Path,
) -> None:
    async with listening(path) as receiver:
        with recorded_delays(stops_clock=True) as delays, connecting(path):
            for _ in _DELAYS_S:
                far = await receiver.accepted.get()
                assert await far.read()
                far.transport.close()
            await delays.reach(len(_DELAYS_S))
            assert delays == _DELAYS_S


async def test_a_sender_tries_a_full_backlog_at_a_steady_rate(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(str(path))
            with recorded_delays() as delays, connecting(path) as sender:
                assert sender.connector.is_backlogged
                await delays.reach(10)
                assert delays == [_FULL_DELAY_S] * 10
                listener.accept()[0].close()
                await sender.next_connection.get()
                assert not sender.connector.is_backlogged


async def test_a_sender_without_automatic_reconnection_connects_on_demand(path: Path) -> None:
    async with listening(path) as receiver:
        with recorded_delays() as delays, connecting(path) as sender:
            sender.connector.connect_now()
            assert len(sender.connections) == 1, "there is a connection already"
            sender.connections[0].transport.close()
            await (await receiver.accepted.get()).was_lost.wait()
            assert delays == []
            sender.connector.connect_now()
            assert sender.is_connected()
            assert await (await receiver.accepted.get()).read() == b"introduction 2"


async def test_a_path_at_which_no_socket_can_be_is_refused_by_a_sender(path: Path) -> None:
    path.mkdir()
    with pytest.raises(UsageError, match="is a folder: use the path of a socket in it"), connecting(path):
        pass
    (path / "file").touch()
    with pytest.raises(UsageError, match="Not a directory"), connecting(path / "file" / "socket"):
        pass


async def test_a_socket_of_another_kind_is_refused_by_a_sender(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(str(path))
        stream.listen()
        with pytest.raises(UsageError, match="is not one of aiotensor"), connecting(path):
            pass


# The path


@pytest.mark.promise(2, 25)
async def test_only_this_user_may_connect_and_nothing_is_left_after_closing(path: Path) -> None:
    async with listening(path):
        status = path.stat()
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
    assert not list(path.parent.iterdir())


@pytest.mark.promise(2)
async def test_the_socket_of_a_dead_receiver_is_taken_over(path: Path) -> None:
    leave_stale(path)
    with connecting(path) as sender:
        async with listening(path):
            await sender.next_connection.get()


@pytest.mark.promise(2)
async def test_listening_at_the_address_of_a_running_receiver_raises_usage_error(path: Path) -> None:
    async with listening(path) as receiver:
        with connecting(path) as sender:
            with pytest.raises(UsageError, match="already listens at"):
                await Receiver(path).listen()
            assert await (await receiver.accepted.get()).read() == b"introduction 1"
            assert receiver.accepted.empty()
            assert sender.is_connected()
            assert path.exists()


async def test_a_receiver_too_busy_to_accept_is_not_mistaken_for_a_dead_one(
    path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy:
        busy.bind(str(path))
        busy.listen(0)
        with connecting(path), connecting(path) as second:
            assert not second.is_connected()  # the backlog is full
            with pytest.raises(UsageError, match="already listens at"):
                await Receiver(path).listen()
    assert path.exists()


async def test_a_file_that_is_not_the_socket_of_a_receiver_is_never_removed(path: Path) -> None:
    file, link, folder, other = (path.with_name(name) for name in ("file", "link", "folder", "stream"))
    file.write_text("precious")
    link.symlink_to(file)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(str(other))
        stream.listen()
        for one in (file, link, folder, other):
            before = one.lstat()
            with pytest.raises(UsageError):
                await Receiver(one).listen()
            assert one.lstat().st_ino == before.st_ino
    assert file.read_text() == "precious"


async def test_of_two_receivers_at_one_stale_place_exactly_one_wins(path: Path) -> None:
    for _ in range(20 if COMPLETE else 4):
        leave_stale(path)
        receivers = [Receiver(path) for _ in range(4)]
        opened = await asyncio.gather(*(receiver.listen() for receiver in receivers), return_exceptions=True)
        assert [type(one) for one in opened if one is not None] == [UsageError] * 3
        winner = receivers[opened.index(None)]
        with connecting(path):
            assert await (await winner.accepted.get()).read() == b"introduction 1"
        await winner.end()
        assert not path.exists()
