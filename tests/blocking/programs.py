"""Main functions of programs that are interrupted, or that end with everything open.

Each runs in a separate process, started by a test, which reads its output.
"""

import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn, TypeAlias

import torch

from aiotensor import ClosedError
from aiotensor.blocking import MessageClient, MessageQueue, MessageServer, TensorReceiver, TensorSender
from tests.blocking import fork_server
from tests.blocking.waiting import NOBODYS, Place, until, waits_for_loop
from tests.blocking.waits import WAITS
from tests.channel.parties import Answer, Question
from verification import inside
from verification.patterns import BIG, pattern

# Objects that are still in a module when the interpreter ends.
left_open: list[Any] = []


def _say(*words: object) -> None:
    print(*words, flush=True)


def _say_when(condition: Callable[[], object], word: str) -> None:
    """Print a word from another thread when a condition becomes true."""

    def look() -> None:
        until(condition)
        _say(word)

    _begin(look)


# Signals


def wait(name: str, *place: str) -> None:
    """Wait in one of the waiting calls until a signal arrives."""
    try:
        with WAITS[name].near(Place(*place)) as wait:
            _say_when(wait.is_waiting, "waits")
            wait.call()
    finally:
        _say("closed")


# The end of the interpreter


_All: TypeAlias = tuple[TensorReceiver, TensorSender, MessageServer[Question], MessageClient[Answer]]


def _open_all(place: Place) -> _All:
    ends = (
        TensorReceiver(place.tensors).__enter__(),
        TensorSender(place.tensors).__enter__(),
        MessageServer(place.messages, Question).__enter__(),
        MessageClient(place.messages, Answer).__enter__(),
    )
    left_open.extend(ends)
    return ends


def _begin(*works: Callable[[], object]) -> None:
    for work in works:
        threading.Thread(target=work, daemon=True).start()


def leave_all_open(*place: str) -> None:
    """Exit by `sys.exit` with everything open, in the middle of a message and of a request."""
    receiver, sender, server, client = _open_all(Place(*place))
    left_open.append(receiver.receive(sender.send(pattern(1, BIG))))
    left_open.append(sender.allocate((BIG,), torch.int64))
    client.send(Question(1, pattern(1, BIG)))
    left_open.append(server.next())
    with sender.message() as message:
        message.send(pattern(2, BIG))
        sys.exit(3)


def leave_threads_waiting(*place: str) -> None:
    """End while daemon threads wait for a tensor, an answer, requests and a message of a queue."""
    receiver, _, server, client = _open_all(Place(*place))
    queue: MessageQueue[int] = MessageQueue(int, folder=f"{Place(*place).folder}/queue")
    left_open.append(queue)
    left_open.append(consumer := queue.consumer().__enter__())
    reader = threading.Thread(target=consumer.get, daemon=True)
    reader.start()
    until(lambda: waits_for_loop(reader.ident or 0))
    _begin(lambda: receiver.receive(NOBODYS), lambda: client.request(Question(2), timeout=600))
    left_open.append(server.next())
    _begin(lambda: list(server), lambda: server.serve(lambda _: None))
    until(lambda: receiver.statistics().waiting == 1 and inside.waiters_for_requests(server.inner) == 2)
    _say("all wait")


def be_busy(*place: str) -> None:
    """End while daemon threads send, receive, copy, ask and answer as fast as they can.

    The threads keep the tensors: torch 2.6 aborts the process if a daemon thread frees a tensor of a numpy
    array while the interpreter is finalized.
    """
    receiver, sender, server, client = _open_all(Place(*place))
    small = pattern(1, 10)  # for others, a thread might be needed, and none starts when the interpreter ends
    answer = Answer(1, tensor=small)
    received: list[object] = []
    asked: list[Question] = []

    def pass_on() -> None:
        while True:
            received.append(receiver.receive(sender.send(small)))

    def ask() -> None:
        while True:
            received.append(client.request(Question(1, small)))

    def respond(question: Question) -> Answer:
        asked.append(question)
        return answer

    _begin(pass_on, ask, ask, lambda: server.serve(respond))
    until(lambda: len(received) > 50)
    large = torch.zeros(16 << 20, dtype=torch.uint8)
    handles = iter([sender.send(large) for _ in range(6)])
    copies: list[object] = []

    def copy() -> None:  # in a thread of the loop
        for handle in handles:
            copies.append(receiver.receive(handle, copy=True))

    _begin(copy, copy)
    until(lambda: copies)


def leave_in_a_child(status: int, *place: str) -> None:
    """Leave every kind of block by `sys.exit` in a forked child, and print the exit status of the child."""
    receiver, sender, server, client = _open_all(Place(*place))
    client.send(Question(1))
    message, request = sender.message().__enter__(), server.next().__enter__()
    with ExitStack() as stack:
        for block in (receiver, sender, server, client, message, request):
            stack.push(block)
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside a thread
        if not (child := os.fork()):
            sys.exit(status)
        _say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def fail_beside_a_thread(*place: str) -> NoReturn:
    """Raise in the main thread while another thread serves; Python waits for that thread."""
    _, _, server, _ = _open_all(Place(*place))

    def handle(question: Question) -> Answer:
        if question.wish == "end":
            server.close()
        return Answer(question.seed, int(threading.main_thread().is_alive()))

    threading.Thread(target=lambda: server.serve(handle)).start()
    raise LookupError("in the main thread")


def come_too_late(*place: str) -> None:
    """Use open objects when the interpreter is about to finalize."""
    receiver, sender, server, client = _open_all(Place(*place))

    def end() -> None:
        for use in (server.next, receiver.statistics, lambda: receiver.receive(NOBODYS)):
            try:
                use()
            except ClosedError:
                _say("refused")
        for one in (receiver, server, client, sender):
            one.close()
        _say("closed")

    fork_server.last_words.append(end)
