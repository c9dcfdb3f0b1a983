"""The engine of a soak: it takes tensors in every way, checks every byte, and keeps some of them."""

import asyncio
from pathlib import Path
from random import Random

import msgspec
import torch

from aiotensor import Delivery, DiscardedError, TensorHandle, TensorReceiver
from aiotensor.protocol import arrived, mailbox
from aiotensor.protocol.mailbox import Key
from verification.processes.peers import State
from verification.soak.numbers import of_python
from verification.soak.pieces import MIB, Note, Piece, Store, prepare

__all__ = ["ready", "report", "run", "settle"]

_notes = msgspec.json.Decoder(Note)
_LATE_S = 0.2
_IMPATIENT_S = 0.005
_THREADS = 4
_QUICK_BYTES = MIB  # tensors up to this size are checked on the event loop

# Limits of the number and not of the time, since more tensors on a faster machine are not a leak.
_MOST_KEPT = 48
_MOST_KEPT_BYTES = 64 * MIB

# The receiver remembers this many former senders, and this many discarded messages of each sender: with the
# default numbers its memory grows for hours. With these the growth ends within minutes.
_REMEMBERED = 64


class Engine:
    """Take tensors as their notes request.

    Args:
        receiver: the receiver of the tensors.
        store: contains the expected bytes.
        random: the source of every choice that no note determines.
        group: runs all tasks, so that one error ends the engine.
    """

    def __init__(
        self, receiver: TensorReceiver, store: Store, random: Random, group: asyncio.TaskGroup
    ) -> None:
        self.receiver = receiver
        self.tensors_checked = self.messages_done = 0
        self.settling = asyncio.Event()
        self.listening = 0  # connected processes, which may send notes
        self.following = 0  # notes in progress
        self.early: dict[Key, torch.Tensor] = {}  # taken by the iteration before their notes arrived
        self._kept: list[tuple[Piece, torch.Tensor]] = []
        self._awaited: dict[Key, asyncio.Future[torch.Tensor]] = {}  # by arrival
        self._some_awaited = asyncio.Event()
        self._store = store
        self._random = random
        self._group = group

    def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Start reading the notes of one process."""
        self.listening += 1
        self._group.create_task(self._read(reader, writer))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            self.following += 1
            self._group.create_task(self._follow(_notes.decode(line)))
        writer.close()
        self.listening -= 1

    async def iterate(self) -> None:
        """Take tensors in the order of their arrival while a note waits for one."""
        while True:
            await self._some_awaited.wait()
            self._file(await anext(self.receiver))
            if not self._awaited:
                self._some_awaited.clear()

    def _file(self, delivery: Delivery) -> None:
        # In a separate function: a local variable of the iteration would keep the tensor until the next one.
        key = Key(delivery.handle.sender, delivery.handle.message, delivery.handle.tensor)
        future = self._awaited.pop(key, None)
        if future is None:
            self.early[key] = delivery.tensor
        else:
            future.set_result(delivery.tensor)

    async def _follow(self, note: Note) -> None:
        order = list(range(len(note.handles)))
        self._random.shuffle(order)
        keys = [Key(handle.sender, handle.message, handle.tensor) for handle in note.handles]
        if note.road == "unwanted":
            self.receiver.discard(note.handles[0])
            for key in keys:
                self.early.pop(key, None)  # also drop the tensors that were already taken
        else:
            if note.road == "late":
                await asyncio.sleep(self._random.random() * _LATE_S)
            try:
                for index in order:
                    await self._take(note, index, keys[index])
            except DiscardedError:
                if note.road != "taken back":
                    raise
                for key in keys:
                    self.early.pop(key, None)
        self.following -= 1
        self.messages_done += 1

    async def _take(self, note: Note, index: int, key: Key) -> None:
        handle, piece = note.handles[index], note.pieces[index]
        tensor = None
        if note.road == "impatient":
            tensor = await self._receive_or_give_up(handle, key)
        if tensor is None:
            tensor = await self._receive(note, index, key)
        await self._check(piece, tensor)
        self.tensors_checked += 1
        if note.keep:
            # A view of a part, which keeps the whole tensor.
            half = Piece(piece.start, piece.nbytes // 2, piece.step)
            await self._keep(half, tensor.reshape(-1).view(torch.uint8)[: half.nbytes])

    async def _keep(self, piece: Piece, part: torch.Tensor) -> None:
        """Keep a part of a tensor until later ones replace it."""
        self._kept.append((piece, part))
        while len(self._kept) > _MOST_KEPT or sum(kept.nbytes for kept, _ in self._kept) > _MOST_KEPT_BYTES:
            await self._drop(self._random.randrange(len(self._kept)))

    async def _drop(self, place: int) -> None:
        await self._check(*self._kept.pop(place))

    async def clear(self) -> None:
        """Drop all kept tensors."""
        while self._kept:
            await self._drop(-1)

    async def _receive_or_give_up(self, handle: TensorHandle, key: Key) -> torch.Tensor | None:
        receiving = asyncio.create_task(self._receive_now(handle, key, copy=self._random.random() < 0.5))
        await asyncio.wait([receiving], timeout=self._random.random() * _IMPATIENT_S)
        receiving.cancel()
        await asyncio.wait([receiving])
        return None if receiving.cancelled() else receiving.result()

    async def _receive_now(self, handle: TensorHandle, key: Key, *, copy: bool) -> torch.Tensor:
        # The iteration may take it during any await, but not between these two lines.
        if key in self.early:
            return self.early.pop(key)
        return await self.receiver.receive(handle, copy=copy)

    async def _receive(self, note: Note, index: int, key: Key) -> torch.Tensor:
        if note.road != "by arrival" or key in self.early:
            return await self._receive_now(note.handles[index], key, copy=note.road == "copied")
        future: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self._awaited[key] = future
        self._some_awaited.set()
        return await future

    async def _check(self, piece: Piece, tensor: torch.Tensor) -> None:
        quick = piece.nbytes <= _QUICK_BYTES
        has = self._store.has
        if not (has(piece, tensor) if quick else await asyncio.to_thread(has, piece, tensor)):
            raise AssertionError(f"a tensor of {tuple(tensor.shape)} is not {piece} of the file")


_engines: list[Engine] = []  # the engine of this process


async def run(state: State, folder: Path, seed: int) -> None:
    """Open a receiver, and follow notes until `settle`."""
    prepare(_THREADS)
    mailbox.REMEMBERED_SENDERS = arrived.REMEMBERED_DISCARDS = _REMEMBERED
    receiver = TensorReceiver(state.endpoint)
    state.receivers.append(await receiver.__aenter__())
    async with asyncio.TaskGroup() as group:
        engine = Engine(receiver, Store(folder / "store"), Random(seed), group)
        async with await asyncio.start_unix_server(engine.listen, folder / "notes"):
            iterating = group.create_task(engine.iterate())
            _engines.append(engine)
            await engine.settling.wait()
        iterating.cancel()


async def ready(state: State) -> None:
    """Wait until the engine accepts notes."""
    while not _engines:
        await asyncio.sleep(0.01)


async def settle(state: State) -> dict[str, float]:
    """Wait until all notes are done, and report the remaining resources."""
    [engine] = _engines
    while engine.listening or engine.following:
        await asyncio.sleep(0.01)
    await engine.clear()
    engine.settling.set()
    # Without a garbage collection: dropping a tensor must release its memory.
    while engine.receiver.statistics().leases:  # of tensors that were freed a moment ago
        await asyncio.sleep(0.01)
    return await report(state) | {"left over by the iteration": len(engine.early)}


async def report(state: State) -> dict[str, float]:
    """Report the resources of the receiver, and its work."""
    if not _engines:
        return {}
    [engine] = _engines
    it = engine.receiver.statistics()
    return of_python() | {
        "senders": it.senders,
        "leases": it.leases,
        "leased bytes": it.leased_bytes,
        "unclaimed tensors": it.unclaimed_tensors,
        "mapped bytes": it.mapped_bytes,
        "tensors": it.tensors_taken,
        "bytes": it.bytes_taken,
        "tensors checked": engine.tensors_checked,
        "messages done": engine.messages_done,
        "messages discarded": it.messages_discarded,
        "senders lost": it.senders_lost,
        "senders refused": it.senders_refused,
    }
