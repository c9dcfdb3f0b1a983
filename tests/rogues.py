"""Peers that write arbitrary records, over the transports of the library."""

import asyncio
import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiotensor import AioTensorError, ProtocolError, TensorSender
from aiotensor.protocol.frames import (
    Attach,
    Frame,
    Hello,
    decode,
    encode,
)
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.base import Events, Transport
from aiotensor.transports.endpoints import Endpoint, route_to
from tests.frames import hello, receiver_hello

ARENA_BYTES = 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL  # the seals that a receiver requires


class RogueSender:
    """A sender that writes arbitrary records.

    Args:
        endpoint: the endpoint of the receiver.
        reads: whether to read the answers; otherwise they fill the buffers of the kernel.
    """

    def __init__(self, endpoint: Endpoint, *, reads: bool = True) -> None:
        self.id = secrets.token_hex(16)
        self.received: list[Frame] = []
        self.is_lost = asyncio.Event()
        self._is_connected = asyncio.Event()
        self._reads = reads
        self._connector = route_to(endpoint).connector(Events(self.connected, self.connecting_failed))
        self._transport: Transport | None = None
        self._first = b""

    @property
    def is_writable(self) -> bool:
        """Whether all records were passed to the kernel."""
        return self._transport is not None and self._transport.is_writable

    def hello(self, **changes: object) -> Hello:
        """Return a valid hello, with some fields changed."""
        fields: dict[str, object] = {"id": self.id, "pid": os.getpid(), "arena_bytes": ARENA_BYTES}
        return hello(**{**fields, **changes})

    async def connect(self, first: bytes) -> None:
        """Connect to a receiver that listens, and write the first record."""
        self._first = first
        self._connector.connect()
        await self._is_connected.wait()

    def write(self, *frames: Frame | bytes, descriptors: Sequence[int] = ()) -> None:
        """Write each frame as a record, or a record as it is; the caller keeps the descriptors."""
        assert self._transport is not None
        for frame in frames:
            self._transport.write(frame if isinstance(frame, bytes) else encode(frame), descriptors)

    def attach(self, attach: Attach, nbytes: int | None = None, seals: int = SEALS) -> None:
        """Share a new memfd.

        Args:
            attach: the frame.
            nbytes: the actual size; None for the size in the frame.
            seals: the seals of the memfd.
        """
        memfd = os.memfd_create("rogue", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(memfd, attach.nbytes if nbytes is None else nbytes)
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, seals)
        self.write(attach, descriptors=[memfd])
        os.close(memfd)

    def close(self) -> None:
        """Close the connection without a last frame."""
        self._connector.close()
        if self._transport is not None:
            self._transport.close()

    # Events of the connector and the transport

    def connected(self, transport: Transport) -> None:
        self._transport = transport
        if self._reads:
            transport.start(self)
        transport.write(self._first)
        self._is_connected.set()

    def connecting_failed(self, error: AioTensorError) -> None:
        raise error

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        close_all(descriptors)
        self.received += decode(data)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        self.is_lost.set()

    def resume_writing(self) -> None: ...


@asynccontextmanager
async def rogue_sender(
    endpoint: Endpoint, *, reads: bool = True, **changes: object
) -> AsyncIterator[RogueSender]:
    """Connect a rogue with a valid hello, and close it at the end."""
    rogue = RogueSender(endpoint, reads=reads)
    await rogue.connect(encode(rogue.hello(**changes)))
    try:
        yield rogue
    finally:
        rogue.close()


class _Nowhere:
    """A landing that stores nothing."""

    def store(
        self, block: int, nbytes: int, start: int, data: memoryview, resume: Callable[[str], None]
    ) -> bool:
        return True

    def free(self, block: int) -> None: ...


class RogueReceiver:
    """A receiver that admits one sender, and then writes arbitrary records."""

    def __init__(self) -> None:
        self.received: list[Frame] = []
        self.is_lost = asyncio.Event()
        self._transport: Transport | None = None
        self._has_hello = False

    def write(self, frame: Frame | bytes) -> None:
        """Write a frame as a record, or a record as it is."""
        assert self._transport is not None
        self._transport.write(frame if isinstance(frame, bytes) else encode(frame))

    # Events of the listener and the transport

    def connection_accepted(self, transport: Transport) -> None:
        self._transport = transport
        transport.start(self)
        self.write(receiver_hello(pid=os.getpid()))

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        close_all(descriptors)
        if self._has_hello:
            frames = decode(data)
            self.received += frames
            assert self._transport is not None
            for frame in frames:
                if isinstance(frame, Attach) and self._transport.mover is not None:
                    self._transport.mover.land(frame.segment, _Nowhere())
        self._has_hello = True

    def connection_lost(self, reason: str | ProtocolError) -> None:
        self.is_lost.set()

    def resume_writing(self) -> None: ...


@asynccontextmanager
async def rogue_receiver(
    endpoint: Endpoint, max_concurrent_videos: int = 8
) -> AsyncIterator[tuple[TensorSender, RogueReceiver]]:
    """Connect a sender to a rogue."""
    rogue = RogueReceiver()
    listener = await route_to(endpoint).listen(rogue.connection_accepted)
    try:
        async with TensorSender(endpoint, max_concurrent_videos) as sender:
            await sender.ready()
            yield sender, rogue
    finally:
        listener.close()
