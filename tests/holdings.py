"""Check that held resources return to their initial numbers: permits, memory, leases, tasks, threads etc."""

import asyncio
import gc
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch

from aiotensor import TensorHandle, TensorReceiver, TensorSender
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.ranks import RankPipe
from verification.descriptors import our_descriptors
from verification.inside import (
    clients_of,
    held_by_client,
    held_by_server,
    sessions_of,
    waiters_for_requests,
)
from verification.internals import (
    held_by_pipe,
    held_by_publisher,
    held_by_receiver,
    held_by_sender,
    session_of,
)
from verification.patterns import BIG, pattern
from verification.processes.watch import memfds
from verification.waiting import until

Party: TypeAlias = (
    TensorSender
    | TensorReceiver
    | MessageClient[Any]
    | MessageServer[Any]
    | Publisher
    | Subscriber[Any]
    | RankPipe
)

# The numbers in the statistics of each kind of object that return to their baseline.
_HELD: dict[type, tuple[str, ...]] = {
    TensorSender: ("in_flight", "bytes_in_use", "waiting"),
    TensorReceiver: ("senders", "mapped_bytes", "leases", "leased_bytes", "unclaimed_tensors", "waiting"),
    MessageClient: ("servers", "bytes_in_use", "waiting"),
    MessageServer: ("clients", "mapped_bytes", "bytes_in_use"),
    Publisher: ("subscribers", "behind", "bytes_in_use", "waiting", "history"),
    Subscriber: ("publishers", "unclaimed", "leases", "leased_bytes", "mapped_bytes", "waiting"),
    RankPipe: (
        *("connected", "in_flight", "bytes_in_use", "unclaimed", "leases", "leased_bytes"),
        *("waiting", "waiting_receives"),
    ),
}

# A leak never ends. Resources on their way back get this much time, and this many turns of the loop, before a
# test reports them as leaked.
_PATIENCE_S = 10.0
_LEAST_TURNS = 300

_TURNS_AT_REST = 20
_CHECKS_UNTIL_REST = 2  # within which closed objects release the rest, in their threads
_TURNS_BEFORE_COLLECTING = 10


class Watch(logging.Handler):
    """Record the held resources, find leaked ones, and collect errors that are only logged.

    Args:
        parties: the objects to check. For a sender and a receiver, `check` also verifies that a tensor still
            passes from one to the other.
    """

    def __init__(self, parties: Sequence[Party]) -> None:
        super().__init__(logging.ERROR)
        self._parties = parties
        self._before: dict[str, object] | None = None
        self._checks = 0
        self._errors: list[object] = []

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._handler = self._loop.get_exception_handler()
        self._loop.set_exception_handler(lambda _, context: self._errors.append(context))
        logging.getLogger("aiotensor").addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("aiotensor").removeHandler(self)
        self._loop.set_exception_handler(self._handler)

    def emit(self, record: logging.LogRecord) -> None:
        """Collect the errors that the library logs."""
        self._errors.append(record.getMessage())

    async def check(self) -> None:
        """Wait until all numbers are the same as at the first call, and fail if they stay different."""
        self._checks += 1
        if self._before is None:
            gc.collect()  # the memory of the first run returns before the answers to these tensors
            await self._pass_tensors()  # objects made for the first tensor remain
            self._before = await self._at_rest()
        await self._come_back(self._before)
        await self._pass_tensors()
        await self._come_back(self._before)
        gc.collect(1)  # objects dropped in this run now report their errors
        assert not self._errors, f"errors that no call has raised: {self._errors}"

    async def _pass_tensors(self) -> None:
        match self._parties:
            case [TensorSender() as sender, TensorReceiver() as receiver, *_]:
                # The small one last: its answer follows the frame that returns the memory of the large one.
                for count in (BIG, 3):
                    handle = await sender.send(pattern(count, count))
                    assert torch.equal(await receiver.receive(handle), pattern(count, count))
                    await until(partial(_has_ended, sender, handle))
            case [RankPipe() as low, RankPipe() as high]:
                for one, other in ((low, high), (high, low)):
                    for count in (BIG, 3):
                        await one.send(pattern(count, count))
                        received = await other.receive()
                        assert received is not None and torch.equal(received, pattern(count, count))  # noqa: PT018
                        del received
                    await one.drain()

    async def _come_back(self, before: dict[str, object]) -> None:
        end, turn = self._loop.time() + _PATIENCE_S, 0
        while changed := self._changed(before):
            assert self._loop.time() < end or turn < _LEAST_TURNS, f"left behind, as (before, now): {changed}"
            turn += 1
            if turn % _TURNS_BEFORE_COLLECTING == 0:
                gc.collect()  # a caught error may hold a frame, which may hold a tensor
            await asyncio.sleep(0)

    def _changed(self, before: dict[str, object]) -> dict[str, tuple[object, object]]:
        # The kernel's numbers take much longer to read: read them only when those of the objects match.
        for read in (self._books, _of_process):
            now = read()
            _forget_ended(before, now)
            if self._checks <= _CHECKS_UNTIL_REST:
                _forget_released(before, now)
            changed = {name: (before[name], held) for name, held in now.items() if held != before[name]}
            if changed:
                return changed
        return {}

    async def _at_rest(self) -> dict[str, object]:
        """Return the held resources once they are stable: frames have arrived, garbage is freed."""
        rest, same = self._books(), 0
        while same < _TURNS_AT_REST:
            if not same:
                gc.collect()  # the garbage of earlier tests, and of this one's first run
            await asyncio.sleep(0)
            now = self._books()
            same = same + 1 if now == rest else 0
            rest = now
        gc.collect()
        return rest | _of_process()

    def _books(self) -> dict[str, object]:
        held: dict[str, object] = {"tasks": asyncio.all_tasks() - {asyncio.current_task()}}
        for number, party in enumerate(self._parties):
            of = _of(party)
            held |= {f"{what} of {type(party).__name__} {number}": amount for what, amount in of.items()}
        return held


def _has_ended(sender: TensorSender, handle: TensorHandle) -> bool:
    return handle.message not in session_of(sender).announced


def _of(party: Party) -> dict[str, object]:
    """Return what an object holds: by its statistics, and what no statistics contain."""
    seen = party.statistics()
    names = next(_HELD[kind] for kind in type(party).__mro__ if kind in _HELD)  # a role may have subclasses
    held: dict[str, object] = {name: getattr(seen, name) for name in names}
    match party:
        case TensorSender():
            held |= held_by_sender(party)
        case TensorReceiver():
            held |= held_by_receiver(party)
        case MessageClient():
            sessions = sessions_of(party)
            held |= held_by_client(party)
            held["calls that wait for changes"] = len(party._changes)
            held["messages in flight"] = sum(session.connection.in_flight for session in sessions)
        case MessageServer():
            held |= held_by_server(party)
            held["waiters for a message"] = waiters_for_requests(party)
            held["messages in flight"] = sum(one.connection.in_flight for one in clients_of(party))
        case Publisher():
            held |= held_by_publisher(party)
            held["bytes of subscribers"] = [lag.held_bytes for lag in party.statistics().lags]
        case RankPipe():
            held |= held_by_pipe(party)
    return held


def _forget_ended(before: dict[str, object], now: dict[str, object]) -> None:
    """Remove the threads of closed objects from the baseline; those of open objects do not end."""
    known, running = before["threads"], now.get("threads")
    if isinstance(known, Counter) and isinstance(running, Counter) and running <= known:
        before["threads"] = running


def _forget_released(before: dict[str, object], now: dict[str, object]) -> None:
    """Remove from the baseline what objects that were closed before it have released in their threads."""
    numbers, used = before["descriptors"], now.get("descriptors")
    if isinstance(numbers, dict) and isinstance(used, dict) and used.items() <= numbers.items():
        before["descriptors"] = used
    count, mapped = before["mappings"], now.get("mappings")
    if isinstance(count, int) and isinstance(mapped, int) and mapped <= count:
        before["mappings"] = mapped


def _of_process() -> dict[str, object]:
    threads = (thread.name for thread in threading.enumerate() if thread.name.startswith("aiotensor"))
    return {
        "threads": Counter(threads),
        "descriptors": our_descriptors(),
        "mappings": memfds(os.getpid()),
    }
