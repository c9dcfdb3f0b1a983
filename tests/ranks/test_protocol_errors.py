"""A rank that breaks the protocol: its pipe ends with the reason, and no other pipe is disturbed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.msgpack import encode

from aiotensor import PeerLostError, RefusedError
from aiotensor.protocol.frames import MAX_FRAMES, VERSION
from aiotensor.protocol.ranks import LEAST_MESSAGE_BYTES
from aiotensor.ranks import RankPipe
from tests.ranks.pipes import Route
from tests.selection import COMPLETE
from verification.fuzz.joining import address_of, entry_of, joining, store_with
from verification.fuzz.piping import honest_ranks, new_pipe
from verification.fuzz.ranks import MAX_BYTES, TO_RANK
from verification.fuzz.steps import Conversation, Step
from verification.fuzz.things import Things
from verification.places import endpoint

pytestmark = pytest.mark.usefixtures("route")

ranks_of_rogues = pytest.mark.parametrize("rank", [0, 1])
one_rank = pytest.mark.parametrize("rank", [0, 1] if COMPLETE else [1])  # the rules are the same
between_machines = pytest.mark.parametrize("route", ["tcp"], indirect=True)
on_any_machine = pytest.mark.parametrize("route", ["unix", "tcp"] if COMPLETE else ["unix"], indirect=True)

JOIN = ["join", VERSION, 1, MAX_BYTES]
NONE = ["put none", 0]


def put(placement: str, payload: bytes, shape: tuple[int, ...] = (3,), message: int = 0) -> list[object]:
    return ["put", message, 0, "uint8", shape, "cpu", placement, payload, None, True]


def record(*frames: list[object], carried: bytes | None = None) -> Step:
    """Return a step; bytes of a tensor share a message with the record unless they are empty."""
    carried_hex = None if carried is None else carried.hex()
    return Step(encode(frames).hex(), carried=carried_hex, is_apart=not carried)


@asynccontextmanager
async def pipe_to_rogue(route: Route, rank: int, *steps: Step) -> AsyncIterator[RankPipe]:
    """Open a pipe to a rogue of a rank, which sends records and disconnects."""
    with endpoint("unix" if route.is_local else "tcp") as place, Things() as things:
        store = store_with(entry_of(str(place), rank), rank)
        pipe = new_pipe(store, 1 - rank, max_bytes=MAX_BYTES)
        async with joining(str(place), rank, things) as talk:
            opening = asyncio.ensure_future(pipe.__aenter__())
            entry = await address_of(store, 1 - rank) if rank else None
            await talk(entry, Conversation(TO_RANK, steps))
        await opening
        try:
            yield pipe
        finally:
            await pipe.aclose()


VIOLATIONS: dict[str, tuple[list[list[object]], str]] = {
    "a frame of a sender": ([["discard", 0]], "a frame that cannot be decoded"),
    "a second join": ([JOIN], "a second hello"),
    "a repeated number": ([NONE, NONE], "message 0 after 0"),
    "a tensor of another size": ([put("inline", b"ab")], "sent 2 bytes for a tensor of torch.uint8"),
    "a tensor in no segment": ([put("arena", bytes(16))], "segment 0, which it never attached"),
    "a tensor elsewhere": ([put("disk", b"")], "unknown placement 'disk' for a tensor"),
    "bytes that never came": ([put("out of band", b"")], "unknown placement 'out of band' for a tensor"),
    "a message that it did not have": (
        [["taken", [0]]],
        "took message 0, which was not sent or was already taken",
    ),
    "a block that it did not use": ([["release", [0]]], "released block 0, which it did not use"),
    "too many bytes": (
        [["put none", number] for number in range(MAX_BYTES // LEAST_MESSAGE_BYTES + 1)],
        f"more than its limit of {MAX_BYTES} bytes",
    ),
    "too many frames": ([["taken", []]] * (MAX_FRAMES + 1), "a frame that cannot be decoded"),
    "a segment that is too large": ([["attach", 0, "arena", 1 << 40]], "more than the "),
}

# Bytes that travel with a record, between machines only.
CARRIED: dict[str, tuple[list[list[object]], bytes, str]] = {
    "bytes of no tensor": ([NONE], b"abc", "the bytes of a tensor with 0 out-of-band messages"),
    "bytes of a tensor in the frame": ([put("inline", b"abc")], b"abc", "with 0 out-of-band messages"),
    "bytes of two tensors": (
        [put("out of band", b"", message=number) for number in range(2)],
        b"abc",
        "with 2 out-of-band messages",
    ),
    "other bytes": ([put("out of band", b"")], b"ab", "sent 2 bytes for a tensor of torch.uint8"),
    "no bytes": ([put("out of band", b"")], b"", "sent 0 bytes for a tensor of torch.uint8"),
    "too many bytes": (
        [put("out of band", b"", (MAX_BYTES + 1,))],
        bytes(MAX_BYTES + 1),
        f"more than its limit of {MAX_BYTES} bytes",
    ),
}


@on_any_machine
@one_rank
@pytest.mark.promise(24, 25)
@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_violation_ends_its_pipe_and_affects_no_other(route: Route, rank: int, name: str) -> None:
    frames, reason = VIOLATIONS[name]
    async with honest_ranks() as honest, pipe_to_rogue(route, rank, record(JOIN), record(*frames)) as pipe:
        with pytest.raises(PeerLostError, match="it broke the protocol: .*" + reason) as caught:
            while True:
                await pipe.receive()
        assert caught.value.pid == 1
        with pytest.raises(PeerLostError, match=reason):
            await pipe.send(None)
        await honest.exchange()


@between_machines
@one_rank
@pytest.mark.parametrize("name", CARRIED)
async def test_wrong_bytes_with_a_record_end_their_pipe_and_affect_no_other(
    route: Route, rank: int, name: str
) -> None:
    frames, data, reason = CARRIED[name]
    steps = record(JOIN), record(*frames, carried=data)
    async with honest_ranks() as honest, pipe_to_rogue(route, rank, *steps) as pipe:
        with pytest.raises(PeerLostError, match="it broke the protocol: .*" + reason):
            while True:
                await pipe.receive()
        await honest.exchange()


@on_any_machine
@one_rank
async def test_messages_before_a_violation_can_be_received(route: Route, rank: int) -> None:
    steps = record(JOIN), record(NONE, put("inline", b"abc", message=1)), record(NONE)
    async with pipe_to_rogue(route, rank, *steps) as pipe:
        assert await pipe.receive() is None
        received = await pipe.receive()
        assert received is not None
        assert received.tolist() == [97, 98, 99]
        with pytest.raises(PeerLostError, match="message 0 after 1"):
            await pipe.receive()


@pytest.mark.parametrize("route", ["unix"], indirect=True)
@one_rank
async def test_a_segment_without_its_descriptor_ends_the_pipe(route: Route, rank: int) -> None:
    steps = record(JOIN), record(["attach", 0, "arena", 4096])
    async with pipe_to_rogue(route, rank, *steps) as pipe:
        with pytest.raises(PeerLostError, match="its descriptor did not arrive"):
            await pipe.receive()


@on_any_machine
@ranks_of_rogues
async def test_a_rank_with_another_limit_or_version_is_refused(route: Route, rank: int) -> None:
    for join, reason in (
        (["join", VERSION, 1, MAX_BYTES + 1], "pass the same value at both ranks"),
        (["join", VERSION + 1, 1, MAX_BYTES], "install the same version of aiotensor"),
    ):
        with pytest.raises(RefusedError, match=reason):
            async with pipe_to_rogue(route, rank, record(join)):
                pass
