"""Blocking queues."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from aiotensor import ClosedError, PeerLostError, UsageError, WouldBlockError
from aiotensor.blocking import MessageQueue
from aiotensor.queues import ConsumerStatistics
from verification.patterns import BIG, pattern

fork: Any = multiprocessing.get_context("fork")
forkserver: Any = multiprocessing.get_context("forkserver")


@pytest.fixture
def queue() -> Iterator[MessageQueue[Any]]:
    with MessageQueue(producers=2, consumers=2, max_messages=2) as queue:
        yield queue
    assert not os.path.exists(queue._settings.folder.path)


def test_threads_put_and_get_messages_with_metadata(queue: MessageQueue[Any]) -> None:
    def produce(start: int) -> None:
        with queue.producer() as producer:
            for number in range(start, start + 10):
                producer.put({"number": number, "frames": pattern(number, BIG)}, timeout=60)

    threads = [threading.Thread(target=produce, args=(start,)) for start in (0, 10)]
    for thread in threads:
        thread.start()
    with queue.consumer() as consumer:
        numbers = []
        for message in consumer:
            assert torch.equal(message["frames"], pattern(message["number"], BIG))
            numbers.append(message["number"])
        with pytest.raises(ClosedError, match=r"all producers of this queue have closed \(producers=2\)"):
            consumer.get()
    assert sorted(numbers) == list(range(20))
    for thread in threads:
        thread.join()


def test_timeouts_raise_would_block_error(queue: MessageQueue[Any]) -> None:
    with queue.consumer() as consumer, queue.producer() as producer:
        for get in (consumer.get_nowait, lambda: consumer.get(timeout=0), lambda: consumer.get(timeout=0.01)):
            with pytest.raises(WouldBlockError):
                get()
        producer.put(None)
        producer.put_nowait(1)
        with pytest.raises(WouldBlockError):
            producer.put_nowait(2)
        with pytest.raises(WouldBlockError):
            producer.put(2, timeout=0.01)
        with pytest.raises(TimeoutError):
            producer.join(timeout=0.01)
        assert [consumer.get(timeout=60), consumer.get(timeout=60)] == [None, 1]
        producer.join()
        assert producer.statistics().taken == 2
        assert consumer.statistics() == ConsumerStatistics(0, 2)


def test_iteration_returns_none_as_a_message(queue: MessageQueue[Any]) -> None:
    with queue.producer() as producer, queue.producer():
        producer.put(None)
        with queue.consumer() as consumer:
            assert next(iter(consumer)) is None


def test_a_block_that_raises_drops_the_messages_of_its_producer(queue: MessageQueue[Any]) -> None:
    with queue.producer(), pytest.raises(KeyError), queue.producer() as producer:
        producer.put(1)
        raise KeyError
    with queue.consumer() as consumer, pytest.raises(PeerLostError, match="1 of the 2 producers"):
        consumer.get(timeout=60)


def test_a_signal_interrupts_a_put_that_waits(queue: MessageQueue[Any]) -> None:
    class InterruptedTestError(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise InterruptedTestError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with queue.producer() as producer:
            for number in range(2):
                producer.put(number)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(InterruptedTestError):
                producer.put(2)
            assert producer.statistics().messages == 2
            producer.abort()
    finally:
        signal.signal(signal.SIGALRM, before)


# The producer and the consumer of a process


def test_the_queue_itself_puts_and_gets(queue: MessageQueue[Any]) -> None:
    with pytest.raises(WouldBlockError):
        queue.get_nowait()
    queue.put({"frames": pattern(1, BIG)})
    assert torch.equal(queue.get(timeout=60)["frames"], pattern(1, BIG))
    queue.join(timeout=60)
    queue.put_nowait(5)
    assert next(iter(queue)) == 5


@contextmanager
def process(program: str, *arguments: Path) -> Iterator[subprocess.Popen[bytes]]:
    excluded = ("COVERAGE_", "PYTHONUNBUFFERED")
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith(excluded)},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _put(queue: MessageQueue[Any], start: int) -> None:
    for number in range(start, start + 5):
        queue.put(pattern(number, BIG))


def _put_and_raise(queue: MessageQueue[Any]) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    queue.put(pattern(0, BIG))
    raise KeyError


def _put_and_wait_forever(queue: MessageQueue[Any]) -> None:
    queue.put(pattern(0, BIG))
    queue.join()
    signal.pause()  # until the test kills this process


@pytest.mark.parametrize("context", [fork, forkserver])
def test_the_end_of_a_child_process_closes_its_producer(context: Any, queue: MessageQueue[Any]) -> None:
    children = [context.Process(target=_put, args=(queue, start)) for start in (0, 5)]
    for child in children:
        child.start()
    assert sorted(int(tensor[0]) for tensor in queue) == list(range(10))
    for child in children:
        child.join()
        assert child.exitcode == 0


PRODUCER = """
import sys, threading, torch
from aiotensor.blocking import MessageQueue

queue = MessageQueue(folder=sys.argv[1])
for number in range(3):
    queue.put(torch.full((100_000,), number))
threading._register_atexit(print, "ended", flush=True)  # called first at the end of the main thread
"""


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="no thread can be started at the end of a program"
)
def test_the_end_of_a_program_waits_until_its_messages_were_copied_and_taken(folder: Path) -> None:
    with MessageQueue(folder=folder / "queue") as queue, process(PRODUCER, folder / "queue") as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ended\n"  # no consumer is open until now
        assert [int(frames[-1]) for frames in queue] == [0, 1, 2]
        assert program.communicate(timeout=60) == (b"", b"")
        assert program.returncode == 0


def test_a_child_process_that_raises_is_reported(queue: MessageQueue[Any]) -> None:
    failing = forkserver.Process(target=_put_and_raise, args=(queue,))
    failing.start()
    failing.join()
    assert failing.exitcode == 1
    with queue.producer():
        pass
    with pytest.raises(PeerLostError, match="1 of the 2 producers"):
        while True:
            queue.get(timeout=60)


def test_a_killed_child_process_is_reported(queue: MessageQueue[Any]) -> None:
    killed = forkserver.Process(target=_put_and_wait_forever, args=(queue,))
    killed.start()
    assert int(queue.get(timeout=60)[0]) == 0
    with queue.producer():
        pass
    killed.kill()
    with pytest.raises(PeerLostError, match="1 of the 2 producers"):
        list(queue)
    killed.join()


def test_too_many_producers_raise_with_a_suggestion(queue: MessageQueue[Any]) -> None:
    with queue.producer(), queue.producer(), pytest.raises(UsageError, match="pass a larger number"):
        queue.put(1)


def test_closing_the_queue_closes_its_producer_and_consumer(queue: MessageQueue[Any]) -> None:
    queue.put(1)
    assert queue.get(timeout=60) == 1
    queue.close()
    for call in (queue.get_nowait, lambda: queue.put(1)):
        with pytest.raises(ClosedError):
            call()
