"""Every call that waits, with the two ends of the connection on which it waits.

All tests of waiting use the same calls: they time out, they end when their object is closed, and at a signal.
For a new call that waits, add a function, and a row in `WAITS`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import aiotensor
from aiotensor import ClosedError, PeerLostError, RemoteError, TensorHandle
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


def _sending(sender: TensorSender, call: Callable[..., object]) -> Wait:
    def held() -> tuple[int, int, int]:
        seen = sender.statistics()
        return seen.in_flight, seen.bytes_in_use, seen.waiting

    return Wait(call, lambda: sender.statistics().waiting, held, sender)


@contextmanager
def _send_for_a_permit(place: Place) -> Iterator[Wait]:
    with TensorSender(place.tensors, 1) as sender:
        sender.send(pattern(0, 3))
        yield _sending(sender, lambda **limit: sender.send(pattern(1, BIG), **limit))


@contextmanager
def _send_for_memory(place: Place) -> Iterator[Wait]:
    with TensorSender(place.tensors, 8, BIG * 8) as sender:
        sender.send(pattern(0, BIG))
        yield _sending(sender, lambda **limit: sender.send(pattern(1, BIG), **limit))


@contextmanager
def _send_to_nobody(place: Place) -> Iterator[Wait]:
    with TensorSender(place.tensors) as sender:
        wait = _sending(sender, lambda **limit: sender.send(pattern(1, BIG), **limit))
        yield wait._replace(is_waiting=lambda: sender.statistics().in_flight)


@contextmanager
def _begin_message(place: Place) -> Iterator[Wait]:
    with TensorSender(place.tensors, 1) as sender:
        sender.send(pattern(0, 3))

        def call(**limit: float) -> None:
            with sender.message(**limit):
                raise AssertionError("there was no permit")

        yield _sending(sender, call)


@contextmanager
def _send_in_message(place: Place) -> Iterator[Wait]:
    with TensorSender(place.tensors, 8, BIG * 8) as sender:
        sender.send(pattern(0, BIG))
        with suppress(ClosedError), sender.message() as message:
            yield _sending(sender, lambda **limit: message.send(pattern(1, BIG), **limit))


@contextmanager
def _allocate(place: Place) -> Iterator[Wait]:
    with TensorSender(place.tensors, 8, BIG * 8) as sender:
        sender.send(pattern(0, BIG))
        first = pattern(1, BIG)
        yield _sending(sender, lambda **limit: sender.allocate(first.shape, first.dtype, **limit))


@contextmanager
def _ready(place: Place) -> Iterator[Wait]:
    with TensorSender(place.tensors, 1) as sender:
        sender.send(pattern(0, 3))
        with running(aiotensor.TensorSender, "ready") as calls:
            call = partial(sender.ready, nbytes=0)
            yield _sending(sender, call)._replace(is_waiting=lambda: calls.count)


@contextmanager
def _drain(place: Place) -> Iterator[Wait]:
    with TensorSender(place.tensors) as sender:
        sender.send(pattern(0, 3))
        with running(aiotensor.TensorSender, "drain") as drains:
            yield _sending(sender, sender.drain)._replace(is_waiting=lambda: drains.count)


def _receiving(receiver: TensorReceiver, call: Callable[..., object]) -> Wait:
    def held() -> tuple[int, int, dict[str, int]]:
        seen = receiver.statistics()
        return seen.waiting, seen.leases, held_by_receiver(receiver.inner)

    return Wait(
        call,
        lambda: receiver.statistics().waiting and receiver.statistics().senders,
        held,
        receiver,
    )


@contextmanager
def _receive(place: Place) -> Iterator[Wait]:
    with TensorReceiver(place.tensors) as receiver:
        yield _receiving(receiver, lambda **limit: receiver.receive(_NOBODYS, **limit))


@contextmanager
def _receive_copy(place: Place) -> Iterator[Wait]:
    with TensorReceiver(place.tensors) as receiver:
        yield _receiving(receiver, lambda **limit: receiver.receive(_NOBODYS, copy=True, **limit))


@contextmanager
def _arrived(place: Place) -> Iterator[Wait]:
    with TensorReceiver(place.tensors) as receiver:
        yield _receiving(receiver, lambda **limit: receiver.arrived(_NOBODYS, **limit))


@contextmanager
def _next_tensor(place: Place) -> Iterator[Wait]:
    with TensorReceiver(place.tensors) as receiver:
        yield _receiving(receiver, receiver.next)


@contextmanager
def _iterate_over_tensors(place: Place) -> Iterator[Wait]:
    with TensorReceiver(place.tensors) as receiver:
        yield _receiving(receiver, lambda: list(receiver))


def _asking_for(
    client: MessageClient[Answer], call: Callable[..., object], is_waiting: Callable[[], object]
) -> Wait:
    return Wait(call, is_waiting, lambda: client.statistics().in_flight, client)


@contextmanager
def _request(place: Place) -> Iterator[Wait]:
    with MessageClient(place.messages, reply_type=Answer) as client:

        def call(timeout: float | None = None) -> Answer:
            return client.request(Question(1), timeout=timeout)

        yield _asking_for(client, call, lambda: client.statistics().messages_sent)


@contextmanager
def _request_for_a_permit(place: Place) -> Iterator[Wait]:
    with (
        TensorReceiver(place.tensors),
        TensorSender(place.tensors, 1) as sender,
        MessageClient(place.messages, sender=sender, reply_type=Answer) as client,
        MessageServer(place.messages, Question),
    ):
        sender.send(pattern(0, 3))

        def call(timeout: float | None = None) -> Answer:
            return client.request(Question(1, pattern(1, BIG)), timeout=timeout)

        yield _asking_for(client, call, lambda: sender.statistics().waiting)


@contextmanager
def _request_of_nobody(place: Place) -> Iterator[Wait]:
    with MessageClient(place.messages, reply_type=Answer) as client:

        def call(timeout: float | None = None) -> Answer:
            return client.request(Question(1), timeout=timeout)

        yield _asking_for(client, call, lambda: inside.waiters_for_server(client.inner))


@contextmanager
def _send_message_to_nobody(place: Place) -> Iterator[Wait]:
    with MessageClient(place.messages, reply_type=Answer) as client:

        def call(timeout: float | None = None) -> None:
            client.send(Question(1), timeout=timeout)

        yield _asking_for(client, call, lambda: inside.waiters_for_server(client.inner))


@contextmanager
def _ready_client(place: Place) -> Iterator[Wait]:
    with MessageClient(place.messages, reply_type=Answer) as client:
        yield _asking_for(client, client.ready, lambda: inside.waiters_for_server(client.inner))


def _answering(server: MessageServer[Question], call: Callable[..., object]) -> Wait:
    def held() -> tuple[int, int, int]:
        seen = server.statistics()
        return seen.waiting, seen.in_hand, inside.waiters_for_requests(server.inner)

    def is_waiting() -> object:
        return inside.waiters_for_requests(server.inner) and server.statistics().clients

    return Wait(call, is_waiting, held, server)


@contextmanager
def _next_request(place: Place) -> Iterator[Wait]:
    with MessageServer(place.messages, Question) as server:
        yield _answering(server, server.next)


@contextmanager
def _request_arrived(place: Place) -> Iterator[Wait]:
    with MessageServer(place.messages, Question) as server:
        yield _answering(server, server.arrived)


@contextmanager
def _iterate_over_requests(place: Place) -> Iterator[Wait]:
    with MessageServer(place.messages, Question) as server:
        yield _answering(server, lambda: list(server))


@contextmanager
def _serve(place: Place) -> Iterator[Wait]:
    with MessageServer(place.messages, Question) as server:
        yield _answering(server, lambda: server.serve(lambda _: None))


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


WAITS = {
    "send, for a permit": Row(_send_for_a_permit, _receiver),
    "send, for memory": Row(_send_for_memory, _receiver),
    "send, for a receiver": Row(_send_to_nobody, _nobody),
    "message": Row(_begin_message, _receiver),
    "send in a message": Row(_send_in_message, _receiver),
    "allocate": Row(_allocate, _receiver),
    "ready": Row(_ready, _receiver),
    "drain": Row(_drain, _receiver),
    "receive": Row(_receive, _sender),
    "receive a copy": Row(_receive_copy, _sender),
    "arrived": Row(_arrived, _sender),
    "next tensor": Row(_next_tensor, _sender),
    "iterate over tensors": Row(_iterate_over_tensors, _sender, takes_timeout=False, ends=True),
    "ready client": Row(_ready_client, _nobody),
    "request": Row(_request, _server),
    "request, for a permit": Row(_request_for_a_permit, _nobody),
    "request, for a server": Row(_request_of_nobody, _nobody),
    "send a message": Row(_send_message_to_nobody, _nobody),
    "request arrived": Row(_request_arrived, _client),
    "next request": Row(_next_request, _client),
    "iterate over requests": Row(_iterate_over_requests, _client, takes_timeout=False, ends=True),
    "serve": Row(_serve, _client, takes_timeout=False, ends=True),
    "reply": Row(_reply, _asking),
}
