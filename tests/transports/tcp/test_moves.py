"""Moves of bytes: peers that break the rules, receivers that are stopped, and memory that runs out."""

import asyncio
import errno
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pytest
import torch
import zmq.asyncio

from aiotensor import DiscardedError, PeerLostError, TensorReceiver, TensorSender, UsageError
from aiotensor.protocol.frames import Attach, Frame, encode
from aiotensor.protocol.network import (
    ACK,
    BYE,
    MAX_BATCH,
    OPENING,
    RECORD,
    STEP_BYTES,
    WINDOW_BYTES,
    Ack,
    Area,
    Step,
    encode_ack,
    encode_area,
    encode_batch,
    encode_step,
)
from aiotensor.transports.tcp import transport
from tests.frames import hello
from verification.internals import jobs_of, worker_of
from verification.patterns import BIG, pattern
from verification.places import endpoint, free_port
from verification.processes import peers, watch
from verification.processes.peers import State
from verification.promptly import promptly
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

ARENA = 8 * STEP_BYTES
SEGMENT = 4 * ARENA


@asynccontextmanager
async def parties() -> AsyncIterator[tuple[str, TensorSender, TensorReceiver]]:
    """Open a receiver with a sender, and return its address, too."""
    with endpoint("tcp") as place:
        async with TensorReceiver(place) as receiver, TensorSender(place) as sender:
            await sender.ready()
            yield str(place), sender, receiver


# Peers that break the rules


def record(*frames: Frame) -> bytes:
    return bytes([RECORD]) + encode(*frames)


def step(start: int, length: int, nbytes: int, *, block: int = 0, segment: int = 0) -> bytes:
    return encode_step(Step(Area(segment, block), nbytes, start, length, False))


ATTACH = record(Attach(0, "arena", SEGMENT))

VIOLATIONS: dict[str, tuple[list[bytes], str]] = {
    "an empty message": ([b""], "kind -1"),
    "a message of an unknown kind": ([b"\x63"], "kind 99"),
    "a second opening": ([OPENING], "kind 5"),
    "a record that is too long": ([bytes([RECORD]) + bytes(1 << 17)], "a record of more than"),
    "a step without a segment": ([step(0, 3, 3) + b"abc"], "segment 0, which it never attached"),
    "a step that is too short": ([ATTACH, step(0, 3, 3)[:7]], "an incomplete header of 7 bytes"),
    "a step with other bytes": ([ATTACH, step(0, 3, 3) + b"ab"], "2 bytes in a step of 3"),
    "a step before its block": ([ATTACH, step(0, 3, 3, block=64) + b"abc"], "bytes 0 to 3 of a block at 64"),
    "a step beyond its block": ([ATTACH, step(2, 3, 3) + b"abc"], "bytes 2 to 5 of a block"),
    "a step that is too long": ([ATTACH, step(0, STEP_BYTES + 1, 2 * STEP_BYTES)], "it moved bytes 0 to"),
    "a block outside of its segment": (
        [ATTACH, step(SEGMENT, 3, 3, block=SEGMENT) + b"abc"],
        "placed a block at an invalid position",
    ),
    "a block that overlaps another": (
        [ATTACH, step(0, 3, 128) + b"abc", step(64, 3, 128, block=64) + b"abc"],
        "placed a block at an invalid position",
    ),
    "a block of another size": ([ATTACH, step(0, 3, 128) + b"abc", step(0, 3, 64) + b"abc"], "not 128"),
    "blocks beyond its arena": ([ATTACH, step(0, 3, ARENA + 4096) + b"abc"], "more than its stated limit of"),
    "more than its credit": (
        [ATTACH] + [step(0, STEP_BYTES, STEP_BYTES), bytes(STEP_BYTES)] * (WINDOW_BYTES // STEP_BYTES + 1),
        "without credit",
    ),
    "a free block": ([ATTACH, encode_area(Area(0, 0))], "freed a block at 0, where no block is allocated"),
    "an acknowledgement of nothing": ([encode_ack(Ack(1, 0))], "acknowledged 1 bytes, but 0"),
    "an acknowledgement of no record": ([encode_ack(Ack(0, 1 << 30))], "acknowledged 1073741824 bytes of"),
    "a batch of too many messages": (
        [encode_batch([encode_ack(Ack(0, 0))] * (MAX_BATCH + 1))],
        "more than 64",
    ),
    "a batch in a batch": ([encode_batch([encode_batch([])])], "an invalid message of 1 bytes"),
    "a batch with a message cut off": ([encode_batch([bytes(5)])[:-1]], "an invalid message of 5 bytes"),
    "a batch with a violation": ([encode_batch([ATTACH, step(0, 0, 3)])], "bytes 0 to 0"),
    "a short acknowledgement": ([bytes([ACK])], "an acknowledgement of 1 bytes"),
}


@asynccontextmanager
async def raw_sender(place: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """Connect a socket that sends arbitrary messages, after a valid hello."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.connect(place)
        await raw.send(OPENING)
        assert await raw.recv() == OPENING
        await raw.send(record(hello(arena_bytes=ARENA)))
        yield raw


@pytest.mark.promise(24, 25)
async def test_a_violation_closes_its_connection_and_affects_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with parties() as (place, honest, receiver):
        before = await honest.send(pattern(1, BIG))
        for count, (messages, reason) in enumerate(VIOLATIONS.values()):
            async with raw_sender(place) as raw:
                await until(lambda: receiver.statistics().senders == 2)
                for message in messages:
                    await raw.send(message)
                while (answer := await raw.recv())[0] != BYE:
                    pass
                assert "this side broke the protocol" in answer[1:].decode()
                assert reason in answer[1:].decode()
            await until(lambda count=count: receiver.statistics().senders_lost == count + 1)  # type: ignore[misc]
            if not count:  # later ones are logged together
                [logged] = [one for one in caplog.records if getattr(one, "event", "") == "protocol_broken"]
                assert reason in logged.getMessage()
            after = await honest.send(pattern(2, BIG))
            assert torch.equal(await receiver.receive(after), pattern(2, BIG))
        assert torch.equal(await receiver.receive(before), pattern(1, BIG))


@pytest.mark.promise(26)
async def test_a_sender_gets_memory_on_another_machine_for_one_arena_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with parties() as (place, _, receiver), raw_sender(place) as raw:
        await raw.send(ATTACH)
        await raw.send(record(Attach(1, "arena", SEGMENT)))
        await until(lambda: receiver.statistics().senders_lost == 1)
    assert "it attached a second segment" in caplog.text


async def test_another_protocol_at_the_port_of_a_receiver_gets_no_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with parties() as (place, sender, receiver):
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.linger = 0
            raw.connect(place)
            await raw.send(b"GET / HTTP/1.1")
            await until(lambda: "uses another protocol" in caplog.text)
            assert not await raw.poll(0)
        assert caplog.records[-1].levelno == logging.WARNING
        assert torch.equal(await receiver.receive(await sender.send(pattern(1, BIG))), pattern(1, BIG))


async def test_a_process_that_answers_with_another_protocol_raises_usage_error() -> None:
    place = f"tcp://127.0.0.1:{free_port()}"
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as raw:
        raw.linger = 0
        raw.bind(place)
        async with TensorSender(place) as sender:
            peer, _ = await raw.recv_multipart()
            await raw.send_multipart([peer, b"HTTP/1.1 400 Bad Request"])
            with pytest.raises(UsageError, match="is not one of this version of aiotensor"):
                await sender.ready()


# Receivers that do not read


async def test_a_stopped_receiver_is_sent_a_bounded_number_of_steps() -> None:
    nbytes = 64 << 20
    with endpoint("tcp") as place:
        async with peers.peers(place, 1) as [engine], TensorSender(place, 4) as sender:
            await engine.call(peers.open_receiver)
            await sender.ready()
            tensors = [torch.full((nbytes,), seed, dtype=torch.uint8) for seed in range(4)]
            assert await engine.call(peers.receive_pattern, await sender.send(pattern(0, BIG)), 0)
            await settled(sender)
            before = [watch.status(pid, "VmRSS") for pid in (os.getpid(), engine.pid)]
            await engine.stop()
            sending = [asyncio.create_task(sender.send(tensor)) for tensor in tensors]
            await until(lambda: sender.statistics().bytes_in_use == 4 * nbytes)
            for _ in range(1000):
                await asyncio.sleep(0)
            after = [watch.status(pid, "VmRSS") for pid in (os.getpid(), engine.pid)]
            for kib, more in zip(before, after, strict=True):
                assert more - kib < 4 * WINDOW_BYTES >> 10
            assert not any(task.done() for task in sending)
            engine.go_on()
            for seed, task in enumerate(sending):
                assert await engine.call(receive_full, await task, seed)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("length", [1000, 2 * STEP_BYTES // 8])
async def test_a_tensor_that_was_moved_is_freed_without_a_garbage_collection(length: int) -> None:
    async with parties() as (_, sender, receiver):
        array = pattern(1, length).numpy()
        is_freed = weakref.ref(array)
        handle = await sender.send(torch.from_numpy(array))
        del array
        await receiver.receive(handle)
        await sender.drain()
        allocated = await sender.allocate((length,), torch.int64)
        handle = await sender.send(allocated)
        del allocated
        await receiver.receive(handle)
        assert is_freed() is None
    assert not watch.memfds(os.getpid())


async def test_a_message_of_more_tensors_than_a_batch_has_messages_arrives() -> None:
    async with parties() as (_, sender, receiver):
        async with sender.message() as message:
            handles = [await message.send(pattern(seed, 1200)) for seed in range(2 * MAX_BATCH)]
        for seed, handle in enumerate(handles):
            assert torch.equal(await receiver.receive(handle), pattern(seed, 1200))
        assert receiver.statistics().senders_lost == 0


async def receive_full(state: State, handle: object, value: int) -> bool:
    tensor = await state.receiver.receive(handle)  # type: ignore[arg-type]
    return bool((tensor == value).all())


@pytest.mark.promise(38)
@pytest.mark.parametrize("how", ["cancelled", "discarded"])
async def test_a_block_is_not_reused_while_some_of_its_bytes_are_under_way(how: str) -> None:
    nbytes = 16 << 20
    with endpoint("tcp") as place:
        async with peers.peers(place, 1) as [engine], TensorSender(place, 4, nbytes) as sender:
            await engine.call(peers.open_receiver)
            await sender.ready()
            await engine.stop()
            message = await sender.message().__aenter__()
            first = await message.send(pattern(0, 1))
            sending = asyncio.create_task(message.send(torch.ones(nbytes, dtype=torch.uint8)))
            await until(lambda: sender.statistics().bytes_in_use == nbytes)
            with promptly():
                if how == "cancelled":
                    sending.cancel()
                    await asyncio.wait([sending])
                    assert sending.cancelled()
                else:
                    sender.discard(first)
                    with pytest.raises(DiscardedError):
                        await sending
            assert sender.statistics().bytes_in_use == nbytes
            following = asyncio.create_task(sender.send(torch.full((nbytes,), 7, dtype=torch.uint8)))
            await until(lambda: sender.statistics().waiting == 1)
            engine.go_on()
            assert await engine.call(receive_full, await following, 7)
            with nullcontext() if how == "cancelled" else pytest.raises(DiscardedError):
                await message.__aexit__(None, None, None)
            if how == "cancelled":
                assert await engine.call(receive_full, first, 0)
            await until(lambda: sender.statistics().bytes_in_use == 0)


# Memory


async def test_a_receiver_without_memory_closes_the_connection_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with parties() as (_, sender, receiver):
        await receiver.receive(await sender.send(pattern(0, 3)))
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(
            PeerLostError, match=r"no memory is left in this process for its tensors: .*No space left"
        ):
            await sender.send(torch.zeros(2 * STEP_BYTES, dtype=torch.uint8))
        monkeypatch.undo()
        await settled(sender)
        assert torch.equal(await receiver.receive(await sender.send(pattern(1, BIG))), pattern(1, BIG))
        assert receiver.statistics().senders_lost == 1


async def test_a_receiver_that_closes_while_bytes_wait_for_memory_reads_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "_FINISH_S", 3600.0)  # for a peer that does not answer; this one does
    may_continue = threading.Event()
    async with parties() as (_, sender, receiver):
        worker_of(receiver).begin("waiting", may_continue.wait)
        sending = asyncio.create_task(sender.send(torch.zeros(2 * STEP_BYTES, dtype=torch.uint8)))
        try:
            await until(lambda: jobs_of(worker_of(receiver)) == 2)  # the second one is for the memory
            closing = asyncio.create_task(receiver.aclose())
            with pytest.raises(PeerLostError):
                await sending
        finally:
            may_continue.set()
        await closing
