"""The socket link between users, and without descriptors. In children, which may change what they are."""

# ruff: noqa: ASYNC240 - the paths of tests are quick
import asyncio
import logging.handlers
import os
import socket
import time
from pathlib import Path

import pytest
import uvloop

from aiotensor.errors import AccessDeniedError
from tests.steps import counted_calls
from tests.transports.unix_ends import (
    NOBODY,
    Receiver,
    Sender,
    connecting,
    in_child,
    listening,
    needs_root,
    no_descriptors,
    squatting,
)

_PATIENCE_S = 20.0  # for what would otherwise be waited for without end


def _connect_as_nobody(path: Path) -> str:
    os.setuid(NOBODY)
    return asyncio.run(_connect(path))


async def _connect(path: Path) -> str:
    sender = Sender(path)
    try:
        await sender.link.open(sender)
    except AccessDeniedError as error:
        return str(error)
    sender.link.close()
    return "connected"


def _connect_raw_as_nobody(path: Path) -> bytes:
    os.setuid(NOBODY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))
        try:
            sock.send(b"let me in")
        except BrokenPipeError:
            return b""  # so quick was the refusal
        try:
            return sock.recv(100)
        except ConnectionResetError:
            return b""


@needs_root
async def test_another_user_may_not_connect(path: Path) -> None:
    path.parent.chmod(0o755)
    async with listening(path) as receiver:
        assert "may not connect" in await in_child(_connect_as_nobody, path)
        assert not receiver.links


@needs_root
async def test_another_user_may_not_enter_the_folder(path: Path) -> None:
    async with listening(path) as receiver:
        assert "may not connect" in await in_child(_connect_as_nobody, path)
        assert not receiver.links


@needs_root
async def test_a_sender_refuses_a_receiver_that_is_another_user(path: Path) -> None:
    path.parent.chmod(0o755)
    async with listening(path) as receiver:
        path.chmod(0o666)
        answer = await in_child(_connect_as_nobody, path)
        assert f"runs as user 0, this process as user {NOBODY}" in answer
        assert receiver.arrived.empty()


@needs_root
async def test_a_receiver_refuses_a_sender_that_is_another_user(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.chmod(0o755)
    async with listening(path) as receiver, connecting(path):
        assert await receiver.arrived.get() == b"introduction 1"
        path.chmod(0o666)
        assert await in_child(_connect_raw_as_nobody, path) == b""
        assert f"runs as user {NOBODY}, this process as user 0" in caplog.text
        assert len(receiver.links) == 1
        assert receiver.arrived.empty()


@needs_root
async def test_root_does_not_send_to_another_users_receiver(path: Path) -> None:
    path.parent.chmod(0o777)
    done = path.with_name("done")
    listening_there = asyncio.create_task(in_child(_listen_as_nobody, path, done))
    while not path.exists():
        await asyncio.sleep(0.01)
    assert f"user {NOBODY}" in await _connect(path)  # its file is there before it listens
    done.touch()
    assert await listening_there == 0


def _listen_as_nobody(path: Path, done: Path) -> int:
    os.setuid(NOBODY)

    async def listen() -> int:
        async with listening(path) as receiver:
            while not done.exists():
                await asyncio.sleep(0.01)
            return receiver.arrived.qsize()

    return asyncio.run(listen())


@needs_root
@pytest.mark.parametrize("listens", [True, False], ids=["full", "silent"])
async def test_a_sender_refuses_a_path_of_another_user_where_nothing_accepts(
    listens: bool, path: Path
) -> None:
    async with squatting(path, socket.SOCK_SEQPACKET, listens=listens):
        assert f"the file belongs to user {NOBODY}" in await _connect(path)


@needs_root
@pytest.mark.parametrize("listens", [True, False], ids=["full", "silent"])
async def test_a_sender_that_waits_refuses_another_user_who_takes_the_path_and_accepts_nothing(
    listens: bool, path: Path
) -> None:
    async with connecting(path) as sender, squatting(path, socket.SOCK_SEQPACKET, listens=listens):
        async with asyncio.timeout(_PATIENCE_S):
            error = await sender.lost.get()
        assert isinstance(error, AccessDeniedError)
        assert f"the file belongs to user {NOBODY}" in str(error)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_receiver_without_descriptors_accepts_later_and_does_not_spin(loop: str, path: Path) -> None:
    accepted, tries, calls = asyncio.run(in_child(_accept_without_descriptors, path, loop))
    assert accepted
    assert tries == 1
    assert calls < 1000  # a loop that spins makes a hundred times as many


def _accept_without_descriptors(path: Path, loop: str) -> tuple[bool, int, int]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        return runner.run(_accept_later(path))


async def _accept_later(path: Path) -> tuple[bool, int, int]:
    async with listening(path) as receiver:
        clients = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        with no_descriptors():
            for client in clients:
                client.connect(str(path))
                client.send(b"hello")
            tries = _count_pauses(receiver)
            while not tries:
                await asyncio.sleep(0)
            receiver.listener.look()  # in vain, and it changes nothing
            with counted_calls() as calls:
                await asyncio.sleep(0.5)  # nothing is waited for: what is shown is that nothing happens
            counted = len(tries)
        receiver.listener.look()  # who asks need not wait until the pause is over
        assert len(receiver.links) == len(clients)
        accepted = [await receiver.arrived.get() for _ in clients] == [b"hello"] * 2
        for client in clients:
            client.close()
        return accepted, counted, calls.number


def _count_pauses(receiver: Receiver) -> list[float]:
    """Note when it gives up accepting for a while."""
    loop = asyncio.get_running_loop()
    pauses: list[float] = []
    accept = receiver.listener._accept

    def counted() -> None:
        accept()
        pauses.append(time.monotonic())

    sock = receiver.listener._sock
    assert sock is not None
    loop.add_reader(sock.fileno(), counted)
    return pauses


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_sender_without_descriptors_finds_its_next_receiver_later(loop: str, path: Path) -> None:
    assert asyncio.run(in_child(_look_without_descriptors, path, loop)) == ("introduction 2", 1)


def _look_without_descriptors(path: Path, loop: str) -> tuple[str, int]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        return runner.run(_look_later(path))


async def _look_later(path: Path) -> tuple[str, int]:
    complaints = logging.handlers.BufferingHandler(100)
    logging.getLogger("aiotensor.transports").addHandler(complaints)
    async with listening(path) as first, connecting(path) as sender:
        await first.arrived.get()
        await first.listener.close()
        with no_descriptors():
            await sender.lost.get()
            waiting = asyncio.create_task(sender.link.ready())
            while sender.link._delay < 0.1:  # it has looked a few times, in vain
                await asyncio.sleep(0.01)
            assert not waiting.done()
        async with listening(path) as second:
            introduction = await second.arrived.get()
            await waiting
    return introduction.decode(), len(complaints.buffer)
