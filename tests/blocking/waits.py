"""Every call that waits, with the two ends of the connection on which it waits.

All tests of waiting use the same calls: they time out, they end when their object is closed, and at a signal.
For a new call that waits, add a function, and a row in `WAITS`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import aiotensor
from aiotensor import PeerLostError, RemoteError, TensorHandle
from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from aiotensor.blocking.portal import BlockingObject
from tests.blocking.waiting import in_thread, running, until
from tests.channel.parties import Answer, Place, Question
from verification import inside
from verification.internals import held_by_receiver
from verification.patterns import BIG, pattern

__all__ = ["WAITS", "Row", "Wait"]

_NOBODYS = TensorHandle("nobody", 0, 0, "int64", (3,), "cpu")


class Wait(NamedTuple):
    """A call that will wait.

    Attributes:
        call: makes the call; takes a `timeout`.
        is_waiting: returns whether a thread waits in the call.
        held: returns the resources in use, which a timeout restores.
        owner: the object whose method is called.
    """

    call: Callable[..., object]
    is_waiting: Callable[[], object]
    held: Callable[[], object]
    owner: BlockingObject[Any, Any]


class Row(NamedTuple):
    """A call that waits.

    Attributes:
        near: opens the end that waits.
        far: opens the other end, and yields a function that waits until it noticed the end of the near one.
        takes_timeout: the call has a `timeout`.
        ends: the call returns when its object is closed, and does not raise.
    """

    near: Callable[[Place], AbstractContextManager[Wait]]
    far: Callable[[Place], AbstractContextManager[Callable[[], object]]]
    takes_timeout: bool = True
    ends: bool = False


# The other end


@contextmanager
def _nobody(place: Place) -> Iterator[Callable[[], object]]:
    yield lambda: None


@contextmanager
def _receiver(place: Place) -> Iterator[Callable[[], object]]:
    """Receive nothing."""
    with TensorReceiver(place.tensors) as receiver:
        yield lambda: until(lambda: receiver.statistics().senders == 0)


@contextmanager
def _sender(place: Place) -> Iterator[Callable[[], object]]:
    """Send nothing."""
    with TensorSender(place.tensors) as sender:
        yield lambda: until(lambda: sender.statistics().receivers_lost == 1)


@contextmanager
def _server(place: Place) -> Iterator[Callable[[], object]]:
    """Take the requests, and do not answer them."""
    with MessageServer(place.messages, Question) as server:
        in_thread(lambda: list(server))

        # A client that ends at once may discard its request before ZeroMQ has sent it.
        def has_noticed() -> bool:
            seen = server.statistics()
            return seen.clients_lost == 1 and not seen.waiting and not seen.in_hand

        yield lambda: until(has_noticed)


@contextmanager
def _client(place: Place) -> Iterator[Callable[[], object]]:
    """Ask nothing."""
    with MessageClient(place.messages, reply_type=Answer) as client:
        yield lambda: until(lambda: client.statistics().servers_lost == 1)


@contextmanager
def _asking(place: Place) -> Iterator[Callable[[], object]]:
    """Send a request, whose call fails when the server closes; answers with tensors need a receiver."""
    with (
        TensorReceiver(place.answers) as receiver,
        MessageClient(place.messages, receiver=receiver, reply_type=Answer) as client,
    ):
        asking = in_thread(lambda: client.request(Question(1)))

        def hear() -> None:
            error = asking.exception()
            assert isinstance(error, PeerLostError | RemoteError), error

        yield hear


# What waits


def _send(sender: TensorSender, **limit: float) -> None:
    sender.send(pattern(1, BIG), **limit)


def _begin_message(sender: TensorSender, **limit: float) -> None:
    with sender.message(**limit):
        raise AssertionError("there was no permit")


def _of_sender(
    call: Callable[..., object], *limits: int, sent: int = 3, is_drain: bool = False
) -> Callable[[Place], AbstractContextManager[Wait]]:
    """Open a sender, whose only permit or memory is in use.

    Args:
        call: the call that waits, a function of the sender.
        limits: the limits of the sender.
        sent: the number of elements that it has sent; 0 if it waits for a receiver.
        is_drain: the call is `drain`, which the statistics do not count.
    """

    @contextmanager
    def near(place: Place) -> Iterator[Wait]:
        with TensorSender(place.tensors, *limits) as sender, ExitStack() as stack:
            is_waiting = lambda: sender.statistics().waiting if sent else sender.statistics().in_flight  # noqa: E731
            if sent:
                sender.send(pattern(0, sent))
            if is_drain:
                calls = stack.enter_context(running(aiotensor.TensorSender, "drain"))
                is_waiting = lambda: calls.count  # noqa: E731
            yield _sending(sender, partial(call, sender), is_waiting)

    return near


def _sending(sender: TensorSender, call: Callable[..., object], is_waiting: Callable[[], object]) -> Wait:
    def held() -> tuple[int, int, int]:
        seen = sender.statistics()
        return seen.in_flight, seen.bytes_in_use, seen.waiting

    return Wait(call, is_waiting, held, sender)


def _of_receiver(call: Callable[..., object]) -> Callable[[Place], AbstractContextManager[Wait]]:
    @contextmanager
    def near(place: Place) -> Iterator[Wait]:
        with TensorReceiver(place.tensors) as receiver:

            def held() -> tuple[int, int, dict[str, int]]:
                seen = receiver.statistics()
                return seen.waiting, seen.leases, held_by_receiver(receiver.inner)

            def is_waiting() -> object:
                return receiver.statistics().waiting and receiver.statistics().senders

            yield Wait(partial(call, receiver), is_waiting, held, receiver)

    return near


def _of_client(
    call: Callable[..., object], is_waiting: Callable[[MessageClient[Answer]], object]
) -> Callable[[Place], AbstractContextManager[Wait]]:
    @contextmanager
    def near(place: Place) -> Iterator[Wait]:
        with MessageClient(place.messages, reply_type=Answer) as client:
            held = lambda: client.statistics().in_flight  # noqa: E731
            yield Wait(partial(call, client), lambda: is_waiting(client), held, client)

    return near


def _request(client: MessageClient[Answer], timeout: float | None = None) -> Answer:
    return client.request(Question(1), timeout=timeout)


def _for_a_server(client: MessageClient[Answer]) -> int:
    return inside.waiters_for_server(client.inner)


def _answering(server: MessageServer[Question], call: Callable[..., object]) -> Wait:
    def held() -> tuple[int, int, int]:
        seen = server.statistics()
        return seen.waiting, seen.in_hand, inside.waiters_for_requests(server.inner)

    def is_waiting() -> object:
        return inside.waiters_for_requests(server.inner) and server.statistics().clients

    return Wait(call, is_waiting, held, server)


def _of_server(call: Callable[..., object]) -> Callable[[Place], AbstractContextManager[Wait]]:
    @contextmanager
    def near(place: Place) -> Iterator[Wait]:
        with MessageServer(place.messages, Question) as server:
            yield _answering(server, partial(call, server))

    return near


@contextmanager
def _reply(place: Place) -> Iterator[Wait]:
    with (
        TensorSender(place.answers, 1) as sender,
        MessageServer(place.messages, Question, sender=sender) as server,
    ):
        request = server.next()
        sender.send(pattern(0, 3))  # it has the permit
        wait = _answering(server, lambda **limit: request.reply(Answer(1, 0, pattern(1, BIG)), **limit))
        yield wait._replace(is_waiting=lambda: sender.statistics().waiting)


# Other calls forward their `timeout` in the same way; a test of misuse compares their parameters.
WAITS = {
    "send, for a permit": Row(_of_sender(_send, 1), _receiver),
    "send, for memory": Row(_of_sender(_send, 8, BIG * 8, sent=BIG), _receiver),
    "send, for a receiver": Row(_of_sender(_send, sent=0), _nobody),
    "message": Row(_of_sender(_begin_message, 1), _receiver),
    "drain": Row(_of_sender(TensorSender.drain, is_drain=True), _receiver),
    "receive": Row(_of_receiver(partial(TensorReceiver.receive, handle=_NOBODYS)), _sender),
    "next tensor": Row(_of_receiver(TensorReceiver.next), _sender),
    "iterate over tensors": Row(_of_receiver(list), _sender, takes_timeout=False, ends=True),
    "request": Row(_of_client(_request, lambda client: client.statistics().messages_sent), _server),
    "request, for a server": Row(_of_client(_request, _for_a_server), _nobody),
    "next request": Row(_of_server(MessageServer.next), _client),
    "serve": Row(
        _of_server(partial(MessageServer.serve, handler=lambda _: None)),
        _client,
        takes_timeout=False,
        ends=True,
    ),
    "reply": Row(_reply, _asking),
}
