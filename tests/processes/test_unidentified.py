"""Connections that never identify themselves cost no sender its place or its tensors."""

import asyncio
import contextlib
import itertools
import os
import secrets
import socket

import pytest
import torch

from aiotensor import TensorReceiver
from aiotensor.link.admission import MAX_UNIDENTIFIED
from aiotensor.protocol.frames import MAX_RECORD_BYTES, VERSION, Close, Hello, encode
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_KINDS = ["silence", "closing", "nonsense", "many frames", "a hello"]
_OPEN = 3 * MAX_UNIDENTIFIED  # connections that a flood keeps


def _connected(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(20)
    sock.connect(address.removeprefix("unix://"))
    return sock


def _record(kind: str) -> bytes | None:
    match kind:
        case "nonsense":
            return os.urandom(MAX_RECORD_BYTES)
        case "many frames":
            return encode(*[Close()] * 8000)
        case "a hello":
            return encode(Hello(VERSION, os.getpid(), "sender", secrets.token_hex(16), 1 << 40))
    return None


async def flood(state: peers.State) -> None:
    """Connect without end, and say one thing or nothing on each connection."""
    state.others["connected"] = 0
    kept: list[socket.socket] = []
    path = str(state.endpoint).removeprefix("unix://")
    for number in itertools.count():
        if number % 32 == 0:
            await asyncio.sleep(0)
        said = _KINDS[number % len(_KINDS)]
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        kept.append(sock)
        with contextlib.suppress(OSError):
            sock.connect(path)
            state.others["connected"] += 1
            if (record := _record(said)) is not None:
                sock.send(record)
        if said != "silence" or len(kept) > _OPEN:
            kept.pop(0).close()


async def flooded(state: peers.State, count: int) -> None:
    await until(lambda: state.others.get("connected", 0) >= count)


async def is_ready(state: peers.State) -> None:
    await state.sender.ready()


async def receivers_lost(state: peers.State) -> int:
    return state.sender.statistics().receivers_lost


@pytest.mark.promise(26)
async def test_a_flood_of_connections_does_not_affect_senders(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        TensorReceiver(address) as receiver,
        peers.peers(address, 3) as [early, late, flooder],
        contextlib.AsyncExitStack() as stack,
    ):
        await early.call(peers.open_sender)
        sent = await early.call(peers.send_pattern, 1, BIG)
        for _ in range(MAX_UNIDENTIFIED):
            stack.enter_context(await asyncio.to_thread(_connected, address))
        flooder.start(flood)
        await flooder.call(flooded, 500)

        await late.call(peers.open_sender)
        await late.call(is_ready)
        for seed, sender in ((2, late), (3, early)):
            handle = await sender.call(peers.send_pattern, seed, BIG)
            assert torch.equal(await receiver.receive(handle), pattern(seed, BIG))
        assert torch.equal(await receiver.receive(sent), pattern(1, BIG))
        assert await early.call(receivers_lost) == 0
        assert receiver.statistics().senders == 2
        assert receiver.statistics().senders_lost == 0
        events = {(record.name, vars(record)["event"]) for record in caplog.records}
        for event in events:
            times = [one.created for one in caplog.records if (one.name, vars(one)["event"]) == event]
            # At most one line in each second, within the accuracy of clocks.
            assert all(later - earlier > 0.9 for earlier, later in itertools.pairwise(times)), times
