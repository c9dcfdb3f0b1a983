"""A sender that speaks for itself, over a bare socket: what is forbidden closes its link and no other."""

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
import torch

from aiotensor import PeerLostError, ProtocolError, TensorHandle, TensorReceiver, TensorSender
from aiotensor.protocol.frames import (
    MAX_RECORD_BYTES,
    VERSION,
    Attach,
    Bye,
    Detach,
    End,
    Hello,
    Put,
    ToReceiver,
    encode,
)
from aiotensor.tensors.arena import _WHERE
from tests.frames import put
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_BYTES = 1 << 20


class ByHand:
    """A sender that says what it likes."""

    def __init__(self, sock: socket.socket) -> None:
        self.id = secrets.token_hex(16)
        self._sock = sock

    def hello(self, first_message: int = 0) -> Hello:
        return Hello(VERSION, os.getpid(), self.id, 2, _BYTES, first_message)

    def say(self, record: bytes, descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have been cut off by now
            socket.send_fds(self._sock, [record], descriptors)

    async def cut_off(self) -> None:
        """Wait until the receiver has closed the link."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                if not await loop.sock_recv(self._sock, MAX_RECORD_BYTES):
                    return
            except ConnectionResetError:
                continue


@asynccontextmanager
async def by_hand(address: str) -> AsyncIterator[ByHand]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        sock.connect(address.removeprefix("unix://"))
        yield ByHand(sock)


@contextlib.contextmanager
def _memfd(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> Iterator[int]:
    descriptor = os.memfd_create("by-hand", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    yield descriptor
    os.close(descriptor)


def there(offset: int, segment: int = 0, **changes: object) -> Put:
    return put(**{"placement": "arena", "payload": _WHERE.pack(segment, offset), "block": 0, **changes})


ATTACH = Attach(0, "arena", _BYTES)

IN_MEMORY: dict[str, list[ToReceiver]] = {
    "an offset beyond the end": [there(_BYTES)],
    "an end beyond the end": [there(_BYTES - 2)],
    "an offset beyond all numbers": [there(2**64 - 1)],
    "an offset that is not aligned": [there(1, dtype="int64")],
    "a size beyond the end": [there(0, shape=(_BYTES + 1,))],
    "a size beyond all memory": [there(0, shape=(2**62, 2**62))],
    "a tensor of nothing in memory": [there(0, shape=(0,))],
    "an unknown dtype": [there(0, dtype="float7")],
    "a segment that was never attached": [there(0, segment=1)],
    "a segment that was detached": [Detach(0), there(0)],
    "detaching what was never attached": [Detach(1)],
    "a block without a number": [there(0, block=None)],
    "a place that is no place": [there(0, payload=b"short")],
    "attaching twice": [ATTACH],
    "attaching more than the arena has addresses": [Attach(1, "arena", 4 * _BYTES)],
    "a wrong count": [there(0), End(0, 2)],
}


@asynccontextmanager
async def _others_go_on(address: str, caplog: pytest.LogCaptureFixture) -> AsyncIterator[TensorReceiver]:
    async with TensorReceiver(address) as receiver, TensorSender(address) as honest:
        before = await honest.send(pattern(1, BIG))
        held = await receiver.receive(await honest.send(pattern(3, BIG)))
        yield receiver
        assert "broke the protocol" in caplog.text
        for seed, sent in ((1, before), (2, await honest.send(pattern(2, BIG)))):
            assert torch.equal(await receiver.receive(sent), pattern(seed, BIG))
        assert torch.equal(held, pattern(3, BIG))
        statistics = receiver.statistics()
        assert (statistics.senders, statistics.unclaimed_tensors) == (1, 0)
        assert honest.statistics().receivers_lost == 0
        del held


async def _is_lost(receiver: TensorReceiver, rogue: ByHand) -> None:
    with pytest.raises(PeerLostError) as caught:
        await receiver.receive(TensorHandle(rogue.id, 0, 0, "uint8", (3,), "cpu"))
    assert isinstance(caught.value.__cause__, ProtocolError)


@pytest.mark.parametrize("name", IN_MEMORY)
async def test_a_frame_about_memory_that_cannot_be_cuts_its_sender_off(
    name: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _others_go_on(address, caplog) as receiver, by_hand(address) as rogue:
        rogue.say(encode(rogue.hello()))
        with _memfd(_BYTES) as descriptor:
            rogue.say(encode(ATTACH), [descriptor])
            rogue.say(encode(*IN_MEMORY[name]), [descriptor])
        await rogue.cut_off()
        await _is_lost(receiver, rogue)


@pytest.mark.parametrize("kind", ["unsealed", "of another size", "no memfd"])
async def test_memory_that_is_not_what_was_agreed_cuts_its_sender_off(
    kind: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _others_go_on(address, caplog) as receiver, by_hand(address) as rogue:
        rogue.say(encode(rogue.hello()))
        if kind == "no memfd":
            rogue.say(encode(ATTACH), [0])
        else:
            size = _BYTES // 2 if kind == "of another size" else _BYTES
            with _memfd(size, 0 if kind == "unsealed" else fcntl.F_SEAL_SHRINK) as descriptor:
                rogue.say(encode(ATTACH), [descriptor])
        await rogue.cut_off()
        await _is_lost(receiver, rogue)


RECORDS: dict[str, bytes] = {
    "random bytes": b"\xff\x00nonsense",
    "no array": b"\x01",
    "half a record": encode(put())[:-2],
    "a record that is too long": encode(put(payload=bytes(MAX_RECORD_BYTES), shape=(MAX_RECORD_BYTES,))),
    "a tensor before its message": encode(put(message=5)),
    "more messages than announced": encode(put(), put(message=1), put(message=2)),
}


@pytest.mark.parametrize("name", RECORDS)
async def test_a_record_that_cannot_be_read_cuts_its_sender_off(
    name: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _others_go_on(address, caplog) as receiver, by_hand(address) as rogue:
        rogue.say(encode(rogue.hello()))
        rogue.say(RECORDS[name])
        await rogue.cut_off()
        await _is_lost(receiver, rogue)


@pytest.mark.parametrize("name", ["no introduction", "two introductions"])
async def test_a_wrong_introduction_cuts_its_sender_off(
    name: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _others_go_on(address, caplog), by_hand(address) as rogue:
        if name == "no introduction":
            rogue.say(encode(put()))
        else:
            rogue.say(encode(rogue.hello(), rogue.hello()))
        await rogue.cut_off()


async def test_a_sender_that_connects_again_replaces_its_earlier_connection(address: str) -> None:
    async with TensorReceiver(address) as receiver, by_hand(address) as one, by_hand(address) as other:
        one.say(encode(one.hello(), put(last=True)))
        await until(lambda: receiver.statistics().unclaimed_tensors == 1)
        other.say(encode(one.hello(first_message=1)))
        await one.cut_off()
        with pytest.raises(PeerLostError):
            await receiver.receive(TensorHandle(one.id, 0, 0, "uint8", (3,), "cpu"))
        other.say(encode(put(message=1, last=True)))
        tensor = await receiver.receive(TensorHandle(one.id, 1, 0, "uint8", (3,), "cpu"))
        assert bytes(tensor.numpy()) == b"abc"
        assert receiver.statistics().senders == 1
        other.say(encode(Bye()))
        await other.cut_off()
