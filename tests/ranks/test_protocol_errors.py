"""A rank that breaks the protocol: its pipe ends with the reason, and no other pipe is disturbed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from aiotensor import AioTensorError, PeerLostError, ProtocolError, RefusedError, WouldBlockError
from aiotensor.memory.tensors import MAX_INLINE_BYTES
from aiotensor.protocol.frames import (
    MAX_FRAMES,
    VERSION,
    Attach,
    Close,
    Discard,
    End,
    Frame,
    Hello,
    Put,
    Release,
    encode,
)
from aiotensor.ranks import RankPipe
from aiotensor.ranks.pipe import LEAST_MESSAGE_BYTES
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.base import Events, Transport
from tests.frames import put
from tests.ranks.pipes import Routes, ends, meeting_of
from tests.selection import COMPLETE
from verification.patterns import pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("route")

on_any_machine = pytest.mark.parametrize("route", ["unix", "tcp"] if COMPLETE else ["unix"], indirect=True)
both_ranks = pytest.mark.parametrize("rank", [0, 1])

_MAX_BYTES = 1 << 20


def hello(**changes: Any) -> Hello:
    most = _MAX_BYTES // LEAST_MESSAGE_BYTES
    return Hello(
        **{
            "version": VERSION,
            "pid": 1,
            "role": "rank",
            "max_messages": most,
            "arena_bytes": _MAX_BYTES,
            **changes,
        }
    )


def inline(number: int = 0, payload: bytes = b"abc", **changes: Any) -> Put:
    return put(message=number, shape=(3,), payload=payload, last=True, **changes)


class _Rogue:
    """A rank that writes records as soon as it is connected, and then disconnects."""

    def __init__(self, records: list[bytes]) -> None:
        self.is_connected = asyncio.Event()
        self._records = records
        self._transport: Transport | None = None

    def connected(self, transport: Transport) -> None:
        self._transport = transport
        transport.start(self)
        for record in self._records:
            transport.write(record)
        self.is_connected.set()

    def failed(self, error: AioTensorError) -> None:
        raise error

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        close_all(descriptors)

    def connection_lost(self, reason: str | ProtocolError) -> None: ...

    def resume_writing(self) -> None: ...

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


@asynccontextmanager
async def pipe_to_rogue(
    rank: int, *records: bytes, max_wait_s: float | None = None
) -> AsyncIterator[RankPipe]:
    """Open a pipe to a rogue of a rank."""
    store, options = HashStore(), {**Routes.current.options, "max_wait_s": max_wait_s}
    pipe = RankPipe(store, rank, rank=1 - rank, world_size=2, max_bytes=_MAX_BYTES, **options)
    rogue = _Rogue(list(records))
    meeting = meeting_of(store, rank, _MAX_BYTES)
    opening = asyncio.ensure_future(pipe.__aenter__())
    while meeting.route is None:
        await meeting.exchange()
    if meeting.listens:
        end: Any = await meeting.route.listen(rogue.connected)
        meeting.ours.address = end.address or meeting.ours.address
        await meeting.exchange()
    else:
        end = meeting.route.connector(Events(rogue.connected, rogue.failed))
        end.connect()
    try:
        await rogue.is_connected.wait()
        await opening
        try:
            yield pipe
        finally:
            await pipe.aclose()
    finally:
        rogue.close()
        end.close()


VIOLATIONS: dict[str, tuple[list[Frame], str]] = {
    "a frame of a sender": ([Discard(0)], "a frame of message 0"),
    "a message of two tensors": ([put()], "a frame that no rank sends"),
    "a tensor of another size": ([inline(payload=b"ab")], "sent 2 bytes for a tensor of torch.uint8"),
    "a tensor in no segment": (
        [inline(payload=bytes(16), placement="arena")],
        "segment 0, which it never attached",
    ),
    "a tensor elsewhere": ([inline(placement="disk")], "unknown placement 'disk' for a tensor"),
    "a long inline tensor": ([inline(payload=bytes(MAX_INLINE_BYTES + 1))], "bytes inline, more than 8192"),
    "a block that it did not use": ([Release((0,))], "released block 0 more often"),
    "too many messages": (
        [End(number, 0) for number in range(_MAX_BYTES // LEAST_MESSAGE_BYTES + 1)],
        "more than its limit of 256 messages",
    ),
}  # fmt: skip


@on_any_machine
@both_ranks
@pytest.mark.promise(24, 25)
@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_violation_ends_its_pipe_and_affects_no_other(rank: int, name: str) -> None:
    frames, reason = VIOLATIONS[name]
    starts = range(0, len(frames), MAX_FRAMES)
    records = [encode(*frames[start : start + MAX_FRAMES]) for start in starts]
    async with ends() as honest, pipe_to_rogue(rank, encode(hello()), *records) as pipe:
        await until(lambda: not pipe.statistics().connected)
        with pytest.raises(PeerLostError, match="it broke the protocol: .*" + reason) as caught:
            while True:
                await pipe.receive()
        assert caught.value.pid == 1
        with pytest.raises(PeerLostError, match=reason):
            await pipe.send(None)
        await honest.low.send(pattern(1, 3))
        received = await honest.high.receive()
        assert received is not None
        assert torch.equal(received, pattern(1, 3))


@on_any_machine
@both_ranks
async def test_messages_before_a_violation_can_be_received(rank: int) -> None:
    records = encode(hello()), encode(End(0, 0), inline(1)), encode(End(7, 0))
    async with pipe_to_rogue(rank, *records) as pipe:
        assert await pipe.receive() is None
        received = await pipe.receive()
        assert received is not None
        assert received.tolist() == [97, 98, 99]
        with pytest.raises(PeerLostError, match="it broke the protocol"):
            await pipe.receive()


@pytest.mark.parametrize("route", ["unix"], indirect=True)
async def test_a_segment_without_its_descriptor_ends_the_pipe() -> None:
    async with pipe_to_rogue(1, encode(hello()), encode(Attach(0, "arena", 4096))) as pipe:
        with pytest.raises(PeerLostError, match="its descriptors did not arrive"):
            await pipe.receive()


@on_any_machine
async def test_a_refusal_of_an_open_pipe_is_a_loss() -> None:
    async with pipe_to_rogue(1, encode(hello()), encode(Close("no more", is_refusal=True))) as pipe:
        with pytest.raises(PeerLostError, match="no more"):
            await pipe.receive()


@on_any_machine
async def test_a_rank_that_listens_with_another_version_is_refused() -> None:
    with pytest.raises(RefusedError, match="install the same version of"):
        async with pipe_to_rogue(0, encode(hello(version=VERSION + 1))):
            pass


@on_any_machine
async def test_a_rank_that_exceeds_the_limit_of_its_entry_is_not_admitted() -> None:
    with pytest.raises(WouldBlockError, match="rank 1 has not opened its end"):
        async with pipe_to_rogue(1, encode(hello(arena_bytes=_MAX_BYTES + 1)), max_wait_s=0.5):
            pass
