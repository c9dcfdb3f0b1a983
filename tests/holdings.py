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

__all__ = ["Party", "Watch"]

Party: TypeAlias = (
    TensorSender
    | TensorReceiver
    | MessageClient[Any]
    | MessageServer[Any]
    | Publisher
    | Subscriber[Any]
    | RankPipe
)

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
    match party:
        case TensorSender():
            return _of_sender(party)
        case TensorReceiver():
            return _of_receiver(party)
        case MessageClient():
            return _of_client(party)
        case MessageServer():
            return _of_server(party)
        case Publisher():
            return _of_publisher(party)
        case Subscriber():
            return _of_subscriber(party)
        case RankPipe():
            return _of_pipe(party)


def _forget_released(before: dict[str, object], now: dict[str, object]) -> None:
    """Remove from the baseline what objects that were closed before it have released in their threads."""
    known, running = before["threads"], now.get("threads")
    if isinstance(known, Counter) and isinstance(running, Counter) and running <= known:
        before["threads"] = running
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


def _of_sender(sender: TensorSender) -> dict[str, object]:
    seen = sender.statistics()
    return {
        "permits": seen.in_flight,
        "bytes": seen.bytes_in_use,
        "waiting": seen.waiting,
        "holders": len(seen.holders),
        **held_by_sender(sender),
    }


def _of_receiver(receiver: TensorReceiver) -> dict[str, object]:
    seen = receiver.statistics()
    return {
        "senders": seen.senders,
        "mapped bytes": seen.mapped_bytes,
        "leases": seen.leases,
        "leased bytes": seen.leased_bytes,
        "unclaimed tensors": seen.unclaimed_tensors,
        "waiting": seen.waiting,
        **held_by_receiver(receiver),
    }


def _of_pipe(pipe: RankPipe) -> dict[str, object]:
    seen = pipe.statistics()
    return {
        "connected": seen.connected,
        "in flight": seen.in_flight,
        "bytes": seen.bytes_in_flight,
        "waiting": (seen.waiting_sends, seen.waiting_receives),
        "unclaimed": seen.unclaimed,
        "leases": (seen.leases, seen.leased_bytes),
        **held_by_pipe(pipe),
    }


def _of_publisher(publisher: Publisher) -> dict[str, object]:
    seen = publisher.statistics()
    return {
        "subscribers": seen.subscribers,
        "publications untaken": seen.behind,
        "bytes": seen.bytes_in_use,
        "bytes of subscribers": [lag.held_bytes for lag in seen.lags],
        "waiting": seen.waiting,
        "history": seen.history,
        **held_by_publisher(publisher),
    }


def _of_subscriber(subscriber: Subscriber[Any]) -> dict[str, object]:
    seen = subscriber.statistics()
    return {
        "publishers": seen.publishers,
        "unclaimed publications": seen.unclaimed,
        "leases": seen.leases,
        "leased bytes": seen.leased_bytes,
        "mapped bytes": seen.mapped_bytes,
        "waiting": seen.waiting,
    }


def _of_client(client: MessageClient[Any]) -> dict[str, object]:
    seen, sessions = client.statistics(), [engine.session for engine in client._engines]
    return {
        "servers": seen.servers,
        "permits": seen.in_flight,
        "bytes": seen.bytes_in_use,
        "waiting": seen.waiting,
        "holders": len(seen.holders),
        "requests": [engine.in_flight for engine in seen.engines],
        # Not part of any statistics.
        "leases": client._mappings.leases,
        "pinned blocks": len(client._memory.blocks),
        "calls that wait for changes": len(client._changes),
        "messages in flight": sum(one.connection.in_flight for one in sessions if one is not None),
    }


def _of_server(server: MessageServer[Any]) -> dict[str, object]:
    seen, requests, clients = server.statistics(), server._requests, server._clients.values()
    return {
        "clients": seen.clients,
        "messages that wait": seen.waiting,
        "requests in hand": seen.in_hand,
        "mapped bytes": seen.mapped_bytes,
        "leases": seen.leases,
        "bytes": seen.bytes_in_use,
        # Not part of any statistics.
        "waiters for a message": len(requests.takers) + len(requests.waiters),
        "messages of clients": [len(client.requests) for client in clients],
        "pinned blocks": len(server._memory.blocks),
        "messages in flight": sum(client.connection.in_flight for client in clients),
    }
