"""Connections between users, and without descriptors: in child processes, which may change their user."""

# ruff: noqa: ASYNC240 - the paths of tests are quick
import asyncio
import logging.handlers
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop

from aiotensor.errors import AccessDeniedError
from tests.steps import counted_calls
from tests.transports.unix_ends import (
    NOBODY,
    connecting,
    in_child,
    listening,
    needs_root,
    no_descriptors,
)


def _connect_as_nobody(path: Path) -> str:
    os.setuid(NOBODY)
    return asyncio.run(_connect(path))


async def _connect(path: Path) -> str:
    try:
        with connecting(path):
            return "connected"
    except AccessDeniedError as error:
        return str(error)


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
@pytest.mark.promise(25)
@pytest.mark.parametrize("mode", [0o700, 0o755], ids=oct)
async def test_another_user_may_not_connect(mode: int, path: Path) -> None:
    path.parent.chmod(mode)
    async with listening(path) as receiver:
        assert "may not connect" in await in_child(_connect_as_nobody, path)
        assert not receiver.ends


@needs_root
async def test_a_sender_refuses_a_receiver_that_is_another_user(path: Path) -> None:
    path.parent.chmod(0o755)
    async with listening(path) as receiver:
        path.chmod(0o666)
        answer = await in_child(_connect_as_nobody, path)
        assert f"runs as user 0, but this process runs as user {NOBODY}" in answer
        assert not receiver.ends


@needs_root
async def test_a_receiver_refuses_a_sender_that_is_another_user(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.chmod(0o755)
    async with listening(path) as receiver:
        with connecting(path):
            await receiver.accepted.get()
            path.chmod(0o666)
            assert await in_child(_connect_raw_as_nobody, path) == b""
            assert f"runs as user {NOBODY}, but this process runs as user 0" in caplog.text
            assert len(receiver.ends) == 1


@pytest.mark.promise(26)
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
        with no_descriptors(), _complaints() as complaints:
            for client in clients:
                client.connect(str(path))
                client.send(b"hello")
            while not complaints:
                await asyncio.sleep(0)
            receiver.listener.accept_now()  # fails too, and changes nothing
            with counted_calls() as calls:
                await asyncio.sleep(0.5)  # nothing to wait for: shown is that nothing happens
            counted = len(complaints)
        receiver.listener.accept_now()  # does not wait until the pause is over
        assert len(receiver.ends) == len(clients)
        accepted = [await end.read() for end in receiver.ends] == [b"hello"] * 2
        for client in clients:
            client.close()
        return accepted, counted, calls.number


@contextmanager
def _complaints() -> Iterator[list[logging.LogRecord]]:
    """Collect the records of the transports' logger."""
    handler = logging.handlers.BufferingHandler(100)
    logger = logging.getLogger("aiotensor.transports")
    logger.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logger.removeHandler(handler)
