"""Situations in which operations wait: during a copy, at a gate, and for a full connection."""

import asyncio
import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import torch

from aiotensor import TensorQueue, TensorSender, WouldBlockError
from aiotensor.memory.copying import QUICK_BYTES
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.endpoints import Endpoint
from verification.internals import worker_of
from verification.patterns import pattern

T = TypeVar("T")

SLOW = (
    QUICK_BYTES // 8 + 1000
)  # elements of int64: enough for a copy by the worker thread, in warm and in cold memory


class HeldUp:
    """Stop copies in the middle of a step, until they may continue.

    Args:
        monkeypatch: restores the function that copies.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copying = threading.Event()
        self._go_on = threading.Event()
        self._memmove = ctypes.memmove
        self._go_on.set()
        monkeypatch.setattr(ctypes, "memmove", self._step)

    def stop(self) -> None:
        """Stop the next copy after it has started."""
        self._copying.clear()
        self._go_on.clear()

    def go_on(self) -> None:
        """Continue the stopped copy."""
        self._go_on.set()

    def is_copying(self) -> bool:
        """Return whether a copy has started since."""
        return self._copying.is_set()

    def _step(self, target: int, source: int, length: int) -> None:
        self._copying.set()
        self._go_on.wait()
        self._memmove(target, source, length)


@contextlib.asynccontextmanager
async def held_back(sender: TensorSender) -> AsyncIterator[threading.Event]:
    """Keep the worker of a sender from beginning copies until the block ends, or until the event is set."""
    go_on = threading.Event()
    worker = worker_of(sender)
    holding = [worker.submit(go_on.wait, takes_long=takes_long) for takes_long in (False, True)]
    try:
        yield go_on
    finally:
        go_on.set()
        await asyncio.wait(holding)


def strided(seed: int, count: int) -> torch.Tensor:
    """Return `pattern` in memory with gaps: over every link the worker of the sender copies it."""
    return torch.stack([pattern(seed, count), pattern(seed + 1, count)], dim=1)[:, 0]


async def in_line(sender: TensorSender, operation: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start an operation, and return its task once it waits at a gate of the sender."""
    task = asyncio.get_running_loop().create_task(operation)
    await asyncio.sleep(0)  # its first step
    assert sender.statistics().waiting
    return task


class Unread:
    """The far end of a connection, which reads only on request."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._reading: socket.socket | None = None
        self._descriptors: list[int] = []

    def read(self) -> None:
        """Read all pending records."""
        if self._reading is None:
            self._reading, _ = self._listening.accept()
            self._reading.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._reading, 1 << 16, 8)
                self._descriptors += descriptors
                if not data:
                    return

    def close(self) -> None:
        """Close the connection."""
        close_all(self._descriptors)
        for sock in (self._listening, self._reading):
            if sock is not None:
                sock.close()


@contextlib.contextmanager
def unread(place: Endpoint) -> Iterator[Unread]:
    """Listen at an endpoint instead of a receiver, and read only on request."""
    path = place.socket_name if isinstance(place, TensorQueue) else str(place).removeprefix("unix://")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen()
    with contextlib.closing(Unread(listening)) as far:
        yield far
    if isinstance(place, str):
        os.unlink(path)


def clog(sender: TensorSender, seed: int = 0) -> int:
    """Send small tensors until the connection is full, and return their number."""
    sent = 0
    with pytest.raises(WouldBlockError, match="slow to read"):
        while True:
            sender.send_nowait(pattern(seed + sent, 1000))
            sent += 1
    return sent
