"""The hooks in several processes: many API servers and one engine, any of which may be killed."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch

from aiotensor import PeerLostError, TensorQueue, blocking
from aiotensor.integrations.vllm import TensorConsumer, TensorProvider
from tests.blocking.waiting import in_thread, until
from tests.integrations.vllm.codecs import CODECS, Request
from verification.patterns import BIG, pattern

_spawn = multiprocessing.get_context("spawn")

SERVERS, MESSAGES = 3, 6


def message_of(server: int, number: int) -> Request:
    seed, count = 100 * server + number, BIG if number % 2 else 100
    return Request(f"{server}/{number}", None, [pattern(seed, count), pattern(seed, BIG)], seed)


def same(one: Request, other: Request) -> bool:
    are_equal = all(map(torch.equal, one.more, other.more))
    return are_equal and (one.name, one.number) == (other.name, other.number)


def serve(queue: TensorQueue, codec: str, server: int, commands: Connection) -> None:
    """Encode a message for each command, as an API server does."""
    torch.set_num_threads(1)
    with blocking.TensorSender(queue, 16) as sender:
        queue.close()
        sender.ready()
        consumer = TensorConsumer(sender)
        encoder = CODECS[codec].encoder(consumer)
        commands.send("ready")
        while (number := commands.recv()) is not None:
            with consumer.message():
                buffers = encoder.encode(message_of(server, number))
            commands.send([bytes(buffer) for buffer in buffers])
        sender.drain()


@contextmanager
def servers(queue: TensorQueue, codec: str, count: int) -> Iterator[list[tuple[int, Connection]]]:
    """Start API servers, and return the process id and the connection of each."""
    started = []
    try:
        for server in range(count):
            ours, theirs = _spawn.Pipe()
            process = _spawn.Process(target=serve, args=(queue, codec, server, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        for _, connection in started:
            assert connection.recv() == "ready"
        yield [(process.pid or 0, connection) for process, connection in started]
        for _, connection in started:
            if not connection.closed:
                connection.send(None)
        for process, connection in started:
            process.join()
            assert process.exitcode == (-signal.SIGKILL if connection.closed else 0)
    finally:
        for process, connection in started:
            process.kill()
            process.join()
            connection.close()


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_killed_server_ends_the_wait_for_its_tensors_and_leaves_nothing(codec: str) -> None:
    queue = TensorQueue()
    with blocking.TensorReceiver(queue) as receiver:
        provider = TensorProvider(receiver)
        decoder = CODECS[codec].decoder(provider)
        with servers(queue, codec, 2) as ((victim, to_victim), (_, to_other)):
            to_victim.send(1)
            lost = to_victim.recv()
            to_other.send(1)
            kept = to_other.recv()
            name = next(iter(_names(lost[0])))
            never_sent = {"sender": name, "message": 77, "tensor": 0}
            waiting = in_thread(lambda: provider("int64", (BIG,), never_sent))
            until(lambda: receiver.statistics().waiting == 1)
            os.kill(victim, signal.SIGKILL)
            to_victim.close()
            with pytest.raises(PeerLostError):
                waiting.result(10)
            with pytest.raises(PeerLostError):
                decoder.decode(lost)
            assert same(decoder.decode(kept), message_of(1, 1))
        until(lambda: receiver.statistics().leases == 0)
        assert receiver.statistics().unclaimed_tensors == 0
    queue.close()


def _names(encoded: bytes) -> Iterator[str]:
    """Return the ids of senders in an encoded message: 32 characters."""
    text = encoded.decode("latin-1")
    for part in text.split("sender")[1:]:
        yield part[2:34]


def receive(queue: TensorQueue, commands: Connection) -> None:
    """Open a receiver, as an engine does, and wait to be killed."""
    with blocking.TensorReceiver(queue):
        queue.close()
        commands.send("ready")
        commands.recv()


def test_a_killed_engine_leaves_no_memory_in_use_and_later_tensors_are_declined() -> None:
    queue = TensorQueue()
    ours, theirs = _spawn.Pipe()
    engine = _spawn.Process(target=receive, args=(queue, theirs), daemon=True)
    engine.start()
    try:
        assert ours.recv() == "ready"
        with blocking.TensorSender(queue) as sender:
            queue.close()
            sender.ready()
            consumer = TensorConsumer(sender)
            for seed in range(3):
                with consumer.message():
                    assert consumer(pattern(seed, 10 * BIG)) is not None
            engine.kill()
            until(lambda: sender.statistics().receivers_lost == 1)
            until(lambda: sender.statistics().bytes_in_use == 0)  # once a thread has ended its copy
            seen = sender.statistics()
            assert (seen.in_flight, seen.waiting) == (0, 0)
            assert consumer(pattern(9, BIG)) is None
            assert consumer.declined == {"PeerLostError": 1}
    finally:
        engine.kill()
        engine.join()
        ours.close()
        theirs.close()
