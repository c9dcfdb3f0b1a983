"""The senders of a soak, some long-lived and some short-lived; each sends in every way."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import torch

from aiotensor import DiscardedError, TensorHandle, TensorSender, WouldBlockError
from verification.processes.peers import State
from verification.soak.numbers import of_arena, of_python, of_waits
from verification.soak.pieces import KIB, LARGEST, MIB, Note, Piece, Road, Store, prepare
from verification.waiting import settled

__all__ = ["PERMITS", "report", "run", "settle", "visit"]

PERMITS = 6
_ARENA_BYTES = 192 * MIB
_TASKS = 8  # of a long-lived sender; more than it has permits
_MOST_TENSORS = 5
_CANCELLED_WITHIN_S = 0.003
_KEEP_WARM_S = 3.0  # short, so that memory is returned often
_LONG_WAIT_S = 60.0  # a wait that is logged fails the soak
_KEPT = 0.15  # the share of the messages that the engine keeps
_GUEST_SENDS = 20
_GUEST_EVERY_S = 1.0
_GUEST_ARENA_BYTES = 32 * MIB

_ROADS: dict[Road, int] = {
    "by handle": 30,
    "late": 15,
    "by arrival": 25,
    "copied": 12,
    "impatient": 10,
    "unwanted": 4,
}


class _GivenUpError(Exception):
    """Raised in the block of a message, to discard it."""


class Source:
    """Send through one sender, and write notes for the engine.

    Args:
        sender: an open sender.
        notes: the connection to the engine.
        store: the source of all bytes.
        random: the source of all choices.
        largest: the size of the largest tensor in bytes.
    """

    def __init__(
        self,
        sender: TensorSender,
        notes: asyncio.StreamWriter,
        store: Store,
        random: Random,
        largest: int,
    ) -> None:
        self.sender = sender
        self.waits: list[float] = []  # seconds of each send, since the last report
        self.refused = 0
        self.notes = notes
        self._store = store
        self._random = random
        self._largest = largest
        self._loop = asyncio.get_running_loop()
        self._ways: dict[Callable[[], Awaitable[None]], int] = {
            self._send_one: 40,
            self._send_several: 15,
            self._send_at_once: 10,
            self._post: 10,
            self._send_allocated: 15,
            self._drop_allocated: 3,
            self._give_up_several: 4,
            self._cancel: 8,
            self._take_back: 5,
        }

    async def work(self, until: float) -> None:
        """Send until the loop's clock reaches `until`."""
        while self._loop.time() < until:
            await self.step()

    async def step(self) -> None:
        """Send something in a random way."""
        [way] = self._random.choices(list(self._ways), list(self._ways.values()))
        await way()

    async def _send_one(self) -> None:
        piece, tensor = self._store.draw(self._random, self._largest)
        await self._note([await self._timed(self.sender.send(tensor))], [piece])

    async def _send_several(self) -> None:
        handles, pieces = [], []
        try:
            async with self.sender.message() as message:
                for _ in range(self._random.randint(2, _MOST_TENSORS)):
                    piece, tensor = self._store.draw(self._random, self._largest // 8)
                    handles.append(await message.send(tensor))
                    pieces.append(piece)
        except WouldBlockError:  # only waiting messages hold memory, so none will be released
            self.refused += 1
        else:
            await self._note(handles, pieces)

    async def _give_up_several(self) -> None:
        with contextlib.suppress(_GivenUpError, WouldBlockError):
            async with self.sender.message() as message:
                for _ in range(self._random.randint(0, _MOST_TENSORS)):
                    await message.send(self._store.draw(self._random, self._largest // 8)[1])
                raise _GivenUpError

    async def _send_at_once(self) -> None:
        piece, tensor = self._store.draw(self._random, min(self._largest, 256 * KIB))
        try:
            handle = self.sender.send_nowait(tensor)
        except WouldBlockError:
            handle = await self._timed(self.sender.send(tensor))
        await self._note([handle], [piece])

    async def _post(self) -> None:
        piece, tensor = self._store.draw(self._random, self._largest)
        try:
            handle = self.sender.post(tensor)
        except WouldBlockError:
            handle = await self._timed(self.sender.send(tensor))
        await self._note([handle], [piece])
        with contextlib.suppress(DiscardedError):  # by the engine, before the tensor was copied
            await self.sender.copied(handle)

    async def _send_allocated(self) -> None:
        piece, _ = self._store.draw(self._random, self._largest)
        tensor = await self.sender.allocate((piece.nbytes,), torch.uint8)
        # Not by torch, which would start threads that are counted.
        await asyncio.to_thread(_copy, tensor, self._store.bytes_of(piece))
        cut = self._random.randrange(piece.nbytes) if self._random.random() < 0.5 else 0
        try:
            handle = await self._timed(self.sender.send(tensor[cut:]))
        except WouldBlockError:  # its bytes and all permits would wait for each other
            self.refused += 1
            return
        await self._note([handle], [Piece(piece.start + cut * piece.step, piece.nbytes - cut, piece.step)])

    async def _drop_allocated(self) -> None:
        await self.sender.allocate((self._random.randint(1, self._largest // 4),), torch.uint8)

    async def _cancel(self) -> None:
        piece, tensor = self._store.draw(self._random, self._largest)
        sending = asyncio.create_task(self.sender.send(tensor))
        await asyncio.wait([sending], timeout=self._random.random() * _CANCELLED_WITHIN_S)
        sending.cancel()
        await asyncio.wait([sending])
        if not sending.cancelled():
            await self._note([sending.result()], [piece])

    async def _take_back(self) -> None:
        piece, tensor = self._store.draw(self._random, self._largest)
        handle = await self._timed(self.sender.send(tensor))
        tell = partial(self._note, [handle], [piece], "taken back")
        if self._random.random() < 0.5:
            await tell()
            await asyncio.sleep(0)
            self.sender.discard(handle)
        else:
            self.sender.discard(handle)
            await tell()

    async def _timed(self, sending: Awaitable[TensorHandle]) -> TensorHandle:
        began = self._loop.time()
        handle = await sending
        self.waits.append(self._loop.time() - began)
        return handle

    async def _note(self, handles: list[TensorHandle], pieces: list[Piece], road: Road | None = None) -> None:
        if road is None:
            [road] = self._random.choices(list(_ROADS), list(_ROADS.values()))
        note = Note(tuple(handles), tuple(pieces), road, self._random.random() < _KEPT)
        self.notes.write(msgspec.json.encode(note) + b"\n")
        await self.notes.drain()


def _copy(tensor: torch.Tensor, source: torch.Tensor) -> None:
    tensor.numpy()[:] = source.numpy()


_sources: list[Source] = []  # the long-lived sender of this process


async def run(state: State, folder: Path, seed: int, seconds: float) -> None:
    """Send for some time through one long-lived sender, and through short-lived guests beside it."""
    prepare(1)
    sender = TensorSender(
        state.endpoint, PERMITS, _ARENA_BYTES, keep_warm_s=_KEEP_WARM_S, long_wait_s=_LONG_WAIT_S
    )
    state.senders.append(await sender.__aenter__())
    _, notes = await asyncio.open_unix_connection(folder / "notes")
    store, random = Store(folder / "store"), Random(seed)
    source = Source(sender, notes, store, random, LARGEST)
    _sources.append(source)
    until = asyncio.get_running_loop().time() + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(_TASKS):
            group.create_task(source.work(until))
        group.create_task(_invite(state, notes, store, random, until))


async def _invite(
    state: State, notes: asyncio.StreamWriter, store: Store, random: Random, until: float
) -> None:
    """Open one short-lived sender after the other in this process."""
    loop = asyncio.get_running_loop()
    while loop.time() < until:
        async with TensorSender(state.endpoint, 2, _GUEST_ARENA_BYTES, long_wait_s=_LONG_WAIT_S) as sender:
            guest = Source(sender, notes, store, random, _GUEST_ARENA_BYTES // 4)
            for _ in range(_GUEST_SENDS):
                await guest.step()
            await sender.drain()
        await asyncio.sleep(_GUEST_EVERY_S * random.random())


async def visit(state: State, folder: Path, seed: int, seconds: float) -> None:
    """Send for some time from a short-lived process."""
    sender = TensorSender(state.endpoint, PERMITS, _ARENA_BYTES // 2, long_wait_s=_LONG_WAIT_S)
    await sender.__aenter__()
    _, notes = await asyncio.open_unix_connection(folder / "notes")
    source = Source(sender, notes, Store(folder / "store"), Random(seed), LARGEST // 2)
    until = asyncio.get_running_loop().time() + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(source.work(until))
    await sender.drain()
    await sender.aclose()
    notes.close()


async def settle(state: State) -> dict[str, float]:
    """Wait until the sender has released everything, and report the remaining resources."""
    [source] = _sources
    await source.sender.drain()
    source.notes.close()
    await settled(source.sender)
    while source.sender.statistics().warm_bytes:  # until `keep_warm_s` has passed
        await asyncio.sleep(_KEEP_WARM_S / 100)
    return await report(state)


async def report(state: State) -> dict[str, float]:
    """Report the resources of the sender, its work, and the waits of its sends since the last report."""
    if not _sources:
        return {}
    [source] = _sources
    waits, source.waits = source.waits, []
    it = source.sender.statistics()
    return (
        of_python()
        | of_waits(waits)
        | of_arena(source.sender, LARGEST)
        | {
            "permits": it.in_flight,
            "waiting": it.waiting,
            "longest wait": it.longest_wait_s,
            "bytes in use": it.bytes_in_use,
            "warm bytes": it.warm_bytes,
            "messages": it.messages_sent,
            "messages discarded": it.messages_discarded,
            "tensors": it.tensors_sent,
            "bytes": it.bytes_sent,
            "refused": source.refused,
            "receivers lost": it.receivers_lost,
        }
    )
