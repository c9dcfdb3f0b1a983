"""A signal ends waiting calls immediately; the blocks end, the other side is notified, and nothing hangs."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch

from aiotensor import ClosedError, TensorHandle
from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from tests.blocking.fork_server import ForkServer
from tests.blocking.waiting import (
    NOBODYS,
    Place,
    held_back,
    in_thread,
    nobody_listens_in,
    until,
    waits_for_loop,
)
from tests.blocking.waits import WAITS
from tests.cancellation.situations import strided
from tests.channel.parties import Answer, Question
from verification import inside
from verification.patterns import BIG, pattern

_MAIN = threading.main_thread().ident or 0


def _signal_when(condition: Callable[[], object], number: signal.Signals = signal.SIGINT) -> None:
    """Send a signal to the main thread once a condition is true."""

    def look() -> None:
        until(condition)
        signal.pthread_kill(_MAIN, number)

    in_thread(look)


@contextmanager
def _handling(number: signal.Signals, handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def _interrupted_with_a_busy_loop(owner: TensorReceiver) -> Iterator[None]:
    """Interrupt the call in the block, which the loop begins only after the handler has run."""
    gate, is_busy = threading.Event(), threading.Event()

    def be_busy() -> None:
        is_busy.set()
        gate.wait()

    def handle(*_: object) -> NoReturn:
        gate.set()
        raise KeyboardInterrupt

    with _handling(signal.SIGINT, handle), pytest.raises(KeyboardInterrupt):
        in_thread(lambda: owner.call(be_busy))
        is_busy.wait()
        _signal_when(lambda: waits_for_loop(_MAIN))
        yield


@pytest.mark.parametrize("name", WAITS)
def test_an_interrupt_ends_a_waiting_call(name: str, place: Place) -> None:
    with WAITS[name].far(place) as hear:
        with pytest.raises(KeyboardInterrupt), WAITS[name].near(place) as wait:
            _signal_when(wait.is_waiting)
            wait.call()
        hear()


def test_an_interrupted_program_ends_as_python_ends_it(fork_server: ForkServer, place: Place) -> None:
    with WAITS["serve"].far(place) as hear, fork_server.program("wait", "serve", *place) as program:
        assert program.line() == "waits"
        program.signal()
        ended = program.ended()
        assert (ended.status, ended.lines) == (-signal.SIGINT, ["closed"])
        assert ended.errors.count("Traceback") == 1, ended.errors
        assert ended.errors.endswith("\nKeyboardInterrupt\n"), ended.errors
        hear()


def test_an_interrupt_delivered_to_another_thread_ends_a_waiting_call(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver:

        def interrupt() -> None:
            until(lambda: receiver.statistics().waiting)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        in_thread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            receiver.receive(NOBODYS)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, ClosedError)]
)
def test_a_signal_handler_may_interrupt_or_close_an_object_that_is_opening(
    number: signal.Signals, error: type[BaseException], place: Place
) -> None:
    receiver = TensorReceiver(place.tensors)
    with nobody_listens_in(place.folder), _handling(signal.SIGTERM, lambda *_: receiver.close()):
        _signal_when(lambda: inside.is_opening(receiver), number)
        with pytest.raises(error), receiver:
            raise AssertionError("it was opened")
    assert not os.listdir(place.folder)


def test_an_interrupt_before_the_loop_begins_to_close_still_closes(place: Place) -> None:
    receiver = TensorReceiver(place.tensors).__enter__()
    with _interrupted_with_a_busy_loop(receiver):
        receiver.close()
    assert receiver.statistics().senders == 0
    assert not os.listdir(place.folder)


def test_an_interrupt_before_the_loop_begins_a_receive_leaves_no_claim(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors) as sender:
        handle = TensorHandle(sender.id, 0, 0, "int64", (BIG,), "cpu")
        with _interrupted_with_a_busy_loop(receiver):
            receiver.receive(handle)
        assert receiver.statistics().waiting == 0
        # With a claim of the interrupted call, the iteration would not return the tensor.
        assert sender.send(pattern(1, BIG)) == handle
        assert torch.equal(receiver.next().tensor, pattern(1, BIG))


def test_an_interrupted_send_releases_its_permit_before_it_raises(place: Place) -> None:
    with TensorReceiver(place.tensors), TensorSender(place.tensors, 2, 8 * BIG) as sender:
        sender.send(pattern(0, BIG))
        _signal_when(lambda: sender.statistics().waiting)
        with pytest.raises(KeyboardInterrupt):
            sender.send(pattern(1, BIG))  # it has a permit, but no memory yet
        seen = sender.statistics()
        assert (seen.in_flight, seen.peak_in_flight) == (1, 2)


def test_a_signal_handler_may_close_a_server_that_serves(place: Place) -> None:
    with MessageServer(place.messages, Question) as server, MessageClient(place.messages, Answer) as client:
        asked = in_thread(lambda: client.request(Question(5)))

        def has_answered() -> object:
            return server.statistics().answers and inside.waiters_for_requests(server.inner)

        with _handling(signal.SIGTERM, lambda *_: server.close()):
            _signal_when(has_answered, signal.SIGTERM)
            server.serve(lambda question: Answer(question.seed))
        assert asked.result() == Answer(5)
        until(lambda: client.statistics().servers_lost == 1)


def test_a_second_interrupt_ends_the_closing(place: Place) -> None:
    with TensorReceiver(place.tensors), TensorSender(place.tensors) as sender:
        sender.ready()
        with held_back(sender):
            handle = sender.post(strided(1, BIG))
            _signal_when(lambda: waits_for_loop(_MAIN))
            with pytest.raises(KeyboardInterrupt) as caught:
                try:
                    sender.copied(handle)
                finally:
                    _signal_when(lambda: sender.is_closed and waits_for_loop(_MAIN))
                    sender.close()  # and would not end without the copy
            first: Any = caught.value.__context__
            assert isinstance(first, KeyboardInterrupt)
