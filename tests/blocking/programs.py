"""Main functions of programs that are interrupted, or that end with everything open.

Each runs in a separate process, started by a test, which reads its output.
"""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

import aiotensor
from aiotensor import ClosedError, TensorHandle, WouldBlockError
from aiotensor.blocking import MessageClient, MessageQueue, MessageServer, TensorReceiver, TensorSender
from tests.blocking import fork_server
from tests.blocking.waiting import answer, running, until
from tests.blocking.waits import WAITS
from tests.channel.parties import Answer, Place, Question
from verification import inside
from verification.patterns import BIG, pattern
from verification.processes import watch

_NOBODYS = TensorHandle("nobody", 0, 0, "int64", (3,), "cpu")

# Objects that are still in a module when the interpreter ends.
left_open: list[Any] = []


def _say(*words: object) -> None:
    print(*words, flush=True)


def _say_when(condition: Callable[[], object], word: str) -> None:
    """Print a word from another thread when a condition becomes true."""

    def look() -> None:
        until(condition)
        _say(word)

    threading.Thread(target=look, daemon=True).start()


def _waits(thread: int) -> bool:
    """Return whether a thread waits for the loop."""
    return sys._current_frames()[thread].f_code.co_filename.endswith("aiotensor/blocking/thread.py")


def _raise_after(step: Callable[[], object]) -> None:
    """Make Ctrl-C call a function before it raises `KeyboardInterrupt`."""

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        step()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)


# The other side of a test, which the test kills or stops


def receive(*place: str) -> None:
    """Print the number of each received message, and whether it is the pattern with this number."""
    with TensorReceiver(Place(*place).tensors) as receiver:
        _say("ready")
        for delivery in receiver:
            number, tensor = delivery.handle.message, delivery.tensor
            _say(number, torch.equal(tensor, pattern(number, tensor.numel())))


def send(*place: str) -> None:
    """Send one tensor, and print the id of the sender."""
    with TensorSender(Place(*place).tensors) as sender:
        sender.send(pattern(0, BIG))
        _say(sender.id)
        signal.pause()


def serve(*place: str) -> None:
    """Answer requests."""
    with (
        TensorReceiver(Place(*place).tensors) as receiver,
        MessageServer(Place(*place).messages, Question, receiver=receiver) as server,
    ):
        _say("ready")
        server.serve(answer)


def put_and_end(folder: str) -> None:
    """Put messages into a queue, and end at once."""
    queue: MessageQueue[torch.Tensor] = MessageQueue(folder=folder)
    left_open.append(queue)
    for number in range(3):
        queue.put(torch.full((100_000,), number))
    # Called first at the end of the main thread.
    threading._register_atexit(_say, "ended")  # type: ignore[attr-defined]


def put_without_a_consumer(folder: str) -> None:
    """Put a message into a queue, and end at once."""
    queue: MessageQueue[int] = MessageQueue(folder=folder, grace_s=0)
    left_open.append(queue)
    queue.put(1)


def exit_in_put(folder: str) -> None:
    """Wait in `put` until a handler of SIGTERM ends the program with a status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    queue: MessageQueue[int] = MessageQueue(folder=folder, max_messages=1)
    left_open.append(queue)
    queue.put(1)
    thread = threading.get_ident()
    _say_when(lambda: _waits(thread), "waits")
    queue.put(2)


# Signals


def wait(name: str, *place: str) -> None:
    """Wait in one of the waiting calls until a signal arrives."""
    try:
        with WAITS[name].near(Place(*place)) as wait:
            _say_when(wait.is_waiting, "waits")
            wait.call()
    finally:
        _say("closed")


def go_on_after_a_signal(*place: str) -> None:
    """Catch the interrupt of a call that the busy loop has not begun, and show that nothing of it is left."""
    gate, is_busy = threading.Event(), threading.Event()

    def be_busy() -> None:
        is_busy.set()
        gate.wait()

    _raise_after(gate.set)
    with TensorReceiver(Place(*place).tensors) as receiver, TensorSender(Place(*place).tensors) as sender:
        threading.Thread(target=lambda: receiver.call(be_busy), daemon=True).start()
        is_busy.wait()
        main = threading.get_ident()
        _say_when(lambda: _waits(main), "waits")
        handle = TensorHandle(sender.id, 0, 0, "int64", (BIG,), "cpu")
        try:
            receiver.receive(handle)
        except KeyboardInterrupt:
            _say("waiting", receiver.statistics().waiting)
        # With a claim of the interrupted call, the iteration would not return the tensor.
        _say(sender.send(pattern(1, BIG)) == handle)
        _say(torch.equal(receiver.next().tensor, pattern(1, BIG)))


def open_where_somebody_else_does(name: str, *place: str) -> None:
    """Wait for another process that is opening an object in the same folder."""
    messages, tensors, _ = place
    listener: TensorReceiver | MessageServer[Question]
    listener = TensorReceiver(tensors) if name == "receiver" else MessageServer(messages, Question)
    signal.signal(signal.SIGTERM, lambda *_: listener.close())
    _say_when(lambda: inside.is_opening(listener), "waits")
    try:
        with listener:
            raise AssertionError("it was opened")
    except ClosedError:
        _say("closed by the handler")
    finally:
        _say("closed")


def close_with_a_busy_loop(*place: str) -> None:
    """Close, and be interrupted before the busy loop has begun to close."""
    gate, is_busy = threading.Event(), threading.Event()

    def be_busy() -> None:
        is_busy.set()
        gate.wait()

    _raise_after(gate.set)
    main = threading.get_ident()
    receiver = TensorReceiver(Place(*place).tensors).__enter__()
    _begin(lambda: receiver.call(be_busy))
    is_busy.wait()
    _say_when(lambda: _waits(main), "waits")
    try:
        receiver.close()
    except KeyboardInterrupt:
        _say(receiver.statistics().senders, os.path.exists(Place(*place).tensors.removeprefix("unix://")))


def look_at_once(*place: str) -> None:
    """Check the resources in use right after the interrupt of a send that had a permit but no memory yet."""
    with TensorReceiver(Place(*place).tensors), TensorSender(Place(*place).tensors, 2, 8 * BIG) as sender:
        sender.send(pattern(0, BIG))
        _say_when(lambda: sender.statistics().waiting, "waits")
        try:
            sender.send(pattern(1, BIG))
        except KeyboardInterrupt:
            seen = sender.statistics()
            _say(seen.in_flight, seen.peak_in_flight)


def be_interrupted_elsewhere(*place: str) -> None:
    """Wait while the kernel delivers a signal to another thread."""
    with TensorReceiver(Place(*place).tensors) as receiver:

        def interrupt() -> None:
            until(lambda: receiver.statistics().waiting)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        _begin(interrupt)
        receiver.receive(_NOBODYS)


def close_at_a_signal(*place: str) -> None:
    """Serve until the handler of a signal closes the server."""
    with MessageServer(Place(*place).messages, Question) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.close())
        _say_when(lambda: server.statistics().answers and inside.waiters_for_requests(server.inner), "waits")
        server.serve(lambda question: Answer(question.seed))
        _say("served", server.statistics().answers)


def send_into_a_full_link(receiver: int, *place: str) -> None:
    """Send to a receiver that does not read, until it has to wait; closing has to wait then, too."""
    main = threading.get_ident()
    with TensorSender(Place(*place).tensors, 1000) as sender:
        sender.send(pattern(0, 3))
        _say("connected")
        until(lambda: watch.is_stopped(receiver))
        with suppress(WouldBlockError):
            while True:
                sender.send_nowait(pattern(0, 1000))
        _say_when(lambda: _waits(main), "waits")
        try:
            sender.send(pattern(1, 1000))
        finally:
            _say_when(lambda: sender.is_closed and _waits(main), "closes")


# The end of the interpreter


class _All(NamedTuple):
    receiver: TensorReceiver
    sender: TensorSender
    server: MessageServer[Question]
    client: MessageClient[Answer]


def _open_all(place: Place) -> _All:
    receiver, sender = TensorReceiver(place.tensors), TensorSender(place.tensors)
    server = MessageServer(place.messages, Question, receiver=receiver)
    client = MessageClient(place.messages, sender=sender, reply_type=Answer)
    ends = _All(receiver.__enter__(), sender.__enter__(), server.__enter__(), client.__enter__())
    left_open.extend(ends)
    return ends


def _begin(*works: Callable[[], object]) -> None:
    for work in works:
        threading.Thread(target=work, daemon=True).start()


def leave_all_open(*place: str) -> None:
    """End with everything open, in the middle of a message and of a request."""
    receiver, sender, server, client = _open_all(Place(*place))
    left_open.append(receiver.receive(sender.send(pattern(1, BIG))))
    left_open.append(sender.allocate((BIG,), torch.int64))
    message = sender.message().__enter__()
    message.send(pattern(2, BIG))
    client.send(Question(1, pattern(1, BIG)))
    left_open.extend([message, server.next()])


def leave_threads_waiting(*place: str) -> None:
    """End while daemon threads wait in every kind of call."""
    receiver, sender, server, client = _open_all(Place(*place))
    client.send(Question(1))
    left_open.append(server.next())
    message = sender.message().__enter__()
    message.send(pattern(1, 3))
    threads = threading.active_count()
    stack = ExitStack()
    drains = stack.enter_context(running(aiotensor.TensorSender, "drain"))
    _begin(
        lambda: receiver.receive(_NOBODYS),
        lambda: list(receiver),
        receiver.next,
        sender.drain,
        lambda: client.request(Question(2)),
        lambda: client.request(Question(3), timeout=600),
    )
    requests = [server.next(), server.next()]
    left_open.extend(requests)
    _begin(lambda: list(server), lambda: server.serve(lambda _: None))
    until(lambda: receiver.statistics().waiting == 3 and inside.waiters_for_requests(server.inner) == 2)
    until(lambda: drains.count)
    left_open.append(stack)
    _say(threading.active_count() - threads)


def leave_a_thread_waiting_at_a_queue(folder: str) -> None:
    """End while a daemon thread waits for a message."""
    queue: MessageQueue[int] = MessageQueue(int, folder=folder)
    left_open.append(queue)
    thread = threading.Thread(target=queue.get, daemon=True)
    thread.start()
    until(lambda: queue._ends()._consumer is not None and _waits(thread.ident or 0))
    _say("waits")


def be_busy(*place: str) -> None:
    """End while daemon threads send, receive, copy, ask and answer as fast as they can.

    The threads keep the tensors: torch 2.6 aborts the process if a daemon thread frees a tensor of a numpy
    array while the interpreter is finalized.
    """
    receiver, sender, server, client = _open_all(Place(*place))
    small, answer = pattern(1, 10), Answer(1, tensor=pattern(1, BIG))
    received: list[object] = []
    asked: list[Question] = []

    def pass_on() -> None:
        while True:
            received.append(receiver.receive(sender.send(small)))

    def ask() -> None:
        while True:
            received.append(client.request(Question(1, small)))

    def reply(question: Question) -> Answer:
        asked.append(question)
        return answer

    _begin(pass_on, ask, ask, lambda: server.serve(reply))
    until(lambda: len(received) > 50)
    large = torch.zeros(16 << 20, dtype=torch.uint8)
    handles = iter([sender.send(large) for _ in range(6)])
    copies: list[object] = []

    def copy() -> None:  # in a thread of the loop
        for handle in handles:
            copies.append(receiver.receive(handle, copy=True))

    _begin(copy, copy)
    until(lambda: copies)


def end_in_the_middle(*place: str) -> None:
    """Exit by `sys.exit`, with some objects in a block and others without one."""
    _, sender, _, _ = _open_all(Place(*place))
    with sender.message() as message:
        message.send(pattern(1, BIG))
        sys.exit(3)


def leave_in_a_child(status: int, *place: str) -> None:
    """Leave every kind of block by `sys.exit` in a forked child, and print the exit status of the child."""
    ends = _open_all(Place(*place))
    ends.client.send(Question(1))
    with ExitStack() as stack:
        for block in (*ends, ends.sender.message().__enter__(), ends.server.next().__enter__()):
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
        for use in (server.next, receiver.statistics, lambda: receiver.receive(_NOBODYS)):
            try:
                use()
            except ClosedError:
                _say("refused")
        for one in (receiver, server, client, sender):
            one.close()
        _say("closed")

    fork_server.last_words.append(end)
