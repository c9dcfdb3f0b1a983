"""One end of a pair of record sockets, as its tests see it."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.transports.records import RecordSocket


class End:
    """A `RecordSocket`, what it read, and how it ended."""

    def __init__(self, sock: socket.socket, *, reads: bool = True) -> None:
        self.arrived: asyncio.Queue[tuple[bytes, list[int]]] = asyncio.Queue()
        self.closed: list[str] = []
        self.was_closed = asyncio.Event()
        on_record: Callable[[memoryview, list[int]], None] | None = self._on_record if reads else None
        self.socket = RecordSocket(sock, on_record=on_record, on_closed=self._on_closed)

    def _on_record(self, data: memoryview, descriptors: list[int]) -> None:
        self.arrived.put_nowait((bytes(data), descriptors))  # the record is valid during this call

    def _on_closed(self, reason: str) -> None:
        self.closed.append(reason)
        self.was_closed.set()

    async def read(self) -> bytes:
        """Wait for a record without descriptors."""
        data, descriptors = await self.arrived.get()
        assert descriptors == []
        return data


def fill(end: End) -> int:
    """Write numbered records until the kernel takes no more; return how many."""
    count = 0
    while end.socket.is_flushed:
        end.socket.write(count.to_bytes(4) + bytes(1000))
        count += 1
    return count


def read_all(sock: socket.socket) -> list[int]:
    """Read the numbers of the records that are there."""
    numbers: list[int] = []
    while True:
        try:
            data = sock.recv(MAX_RECORD_BYTES)
        except BlockingIOError:
            return numbers
        if not data:
            return numbers
        numbers.append(int.from_bytes(data[:4]))


async def turns(count: int = 3) -> None:
    """Let everything run that is ready to."""
    for _ in range(count):
        await asyncio.sleep(0)


def is_open(descriptor: int) -> bool:
    """Say whether a number stands for an open file."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def open_sockets() -> set[str]:
    """Name the sockets that are open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            what = os.readlink(f"/proc/self/fd/{name}")
            if what.startswith("socket:"):
                found.add(f"{name} {what}")
    return found
