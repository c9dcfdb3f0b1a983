"""Measure the cost of a flood of connections for a server, beside the same number of honest clients.

    python -m bench.floods

Two attackers of each kind without a key, and six honest clients, take turns against one server with keys. A
ticker of 1 ms on the server's event loop measures how late the loop is. One client was connected before and
asks all the time, and another one connects, asks once, closes, and begins again.
"""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import click
import msgspec
import zmq

from aiotensor.channel import MessageClient, MessageServer
from verification.attackers import WITHOUT_KEYS, attacked

_TICK_S = 0.001


class Question(msgspec.Struct):
    """A message without tensors; its answer is the same."""

    number: int


class Keys(NamedTuple):
    """The keys of a server, and of all its clients."""

    public: bytes
    secret: bytes
    client_public: bytes
    client_secret: bytes


class Lateness(NamedTuple):
    """How late the event loop was, in milliseconds."""

    p50: float
    p99: float
    most: float


def _serve(keys: Keys, parent: Connection) -> None:
    """Answer, and report the lateness of the loop since the last report whenever the parent asks."""
    asyncio.run(_answer(keys, parent))


async def _answer(keys: Keys, parent: Connection) -> None:
    late: list[float] = []
    loop = asyncio.get_running_loop()

    async def same(question: Question) -> Question:
        return question

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            late.append(1000 * (time.perf_counter() - before - _TICK_S))

    def report() -> None:
        parent.recv()
        late.sort()
        last = len(late) - 1
        parent.send(Lateness(late[last // 2], late[last * 99 // 100], late[last]))
        late.clear()

    server = MessageServer(
        "tcp://127.0.0.1:0", Question, secret_key=keys.secret, client_keys=[keys.client_public]
    )
    async with server:
        parent.send(server.address)
        loop.add_reader(parent.fileno(), report)
        ticking = asyncio.create_task(tick())
        await asyncio.gather(ticking, server.serve(same))


def _ask(address: str, keys: Keys) -> None:
    """Ask endlessly, as an honest client."""

    async def ask() -> None:
        async with _client(address, keys) as client:
            while True:
                await client.request(Question(3))

    asyncio.run(ask())


def _client(address: str, keys: Keys) -> MessageClient[Question]:
    return MessageClient(address, reply_type=Question, secret_key=keys.client_secret, server_key=keys.public)


class Phase(NamedTuple):
    """The measurements of one phase."""

    late: Lateness
    replies: int  # of the client that asks all the time, per second
    slowest_ms: float  # of these
    connected_ms: list[float]  # from making a client until its first answer


async def _observe(
    address: str,
    keys: Keys,
    seconds: float,
    report: Callable[[], Lateness],
    load: AbstractContextManager[object],
) -> Phase:
    took: list[float] = []
    connected: list[float] = []
    async with _client(address, keys) as existing:
        await existing.request(Question(0))
        await asyncio.to_thread(load.__enter__)
        report()
        end = time.perf_counter() + seconds

        async def ask() -> None:
            while time.perf_counter() < end:
                before = time.perf_counter()
                await existing.request(Question(1))
                took.append(1000 * (time.perf_counter() - before))

        async def connect() -> None:
            while time.perf_counter() < end:
                before = time.perf_counter()
                async with _client(address, keys) as client:
                    await client.request(Question(2))
                connected.append(1000 * (time.perf_counter() - before))

        try:
            await asyncio.gather(ask(), connect())
            return Phase(report(), int(len(took) / seconds), max(took), connected)
        finally:
            await asyncio.to_thread(load.__exit__, None, None, None)


@contextmanager
def _attackers(address: str, keys: Keys) -> Iterator[None]:
    with ExitStack() as stack:
        for attack in WITHOUT_KEYS:
            stack.enter_context(attacked(address, attack))
        yield


@contextmanager
def _honest_clients(address: str, keys: Keys) -> Iterator[None]:
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=_ask, args=(address, keys), daemon=True) for _ in range(2 * len(WITHOUT_KEYS))
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


@click.command()
@click.option("--seconds", default=4.0, help="Length of one phase.")
@click.option("--rounds", default=5, help="How often each phase is repeated.")
def main(seconds: float, rounds: int) -> None:
    """Print the medians of all rounds, and the worst values."""
    spawn = multiprocessing.get_context("spawn")
    keys = Keys(*zmq.curve_keypair(), *zmq.curve_keypair())
    mine, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(keys, theirs), daemon=True)
    server.start()
    address: str = mine.recv()

    def report() -> Lateness:
        mine.send(None)
        late: Lateness = mine.recv()
        return late

    loads = {"honest clients": _honest_clients, "attackers": _attackers}
    seen: dict[str, list[Phase]] = {name: [] for name in loads}
    for _ in range(rounds):
        for name, make in loads.items():
            seen[name].append(asyncio.run(_observe(address, keys, seconds, report, make(address, keys))))
    server.kill()
    for name, phases in seen.items():
        connected = [took for phase in phases for took in phase.connected_ms]
        click.echo(
            f"{name}: loop late by p50 {_median(phase.late.p50 for phase in phases):.1f} ms, "
            f"p99 {_median(phase.late.p99 for phase in phases):.1f} ms, "
            f"most {_median(phase.late.most for phase in phases):.1f} "
            f"({max(phase.late.most for phase in phases):.1f}) ms; "
            f"{_median(phase.replies for phase in phases):.0f} replies per second, "
            f"the slowest after {max(phase.slowest_ms for phase in phases):.0f} ms; "
            f"new clients answered after {_median(connected):.0f} ms, at most {max(connected):.0f} ms"
        )


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
