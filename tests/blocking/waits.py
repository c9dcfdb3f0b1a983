"""Calls that wait, with the two ends of the connection on which they wait.

One call of each kind is enough: all others forward their `timeout` to the loop in the same way, and a test of
misuse compares their parameters. All tests of waiting use these calls.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from aiotensor import PeerLostError, RemoteError
from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from aiotensor.blocking.portal import BlockingObject
from tests.blocking.waiting import NOBODYS, Place, in_thread, until
from tests.channel.parties import Answer, Question
from verification import inside
from verification.internals import held_by_receiver
from verification.patterns import BIG, pattern


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
        takes_timeout: the call has a `timeout`; the others return when their object is closed.
    """

    near: Callable[[Place], AbstractContextManager[Wait]]
    far: Callable[[Place], AbstractContextManager[Callable[[], object]]]
    takes_timeout: bool = True


# The other end


@contextmanager
def _receiver(place: Place) -> Iterator[Callable[[], object]]:
    with TensorReceiver(place.tensors) as receiver:
        yield lambda: until(lambda: receiver.statistics().senders == 0)


@contextmanager
def _sender(place: Place) -> Iterator[Callable[[], object]]:
    with TensorSender(place.tensors) as sender:
        yield lambda: until(lambda: sender.statistics().receivers_lost == 1)


@contextmanager
def _server(place: Place) -> Iterator[Callable[[], object]]:
    """Take the requests, and do not answer them."""
    with MessageServer(place.messages, Question) as server:
        in_thread(lambda: list(server))

        def has_noticed() -> bool:
            seen = server.statistics()
            return seen.clients_lost == 1 and not seen.waiting and not seen.in_hand

        yield lambda: until(has_noticed)


@contextmanager
def _client(place: Place) -> Iterator[Callable[[], object]]:
    with MessageClient(place.messages, Answer) as client:
        yield lambda: until(lambda: client.statistics().servers_lost == 1)


@contextmanager
def _asking(place: Place) -> Iterator[Callable[[], object]]:
    """Keep an answer with a tensor, and send another request, whose call fails when the server closes."""
    with MessageClient(place.messages, Answer) as client:
        kept = in_thread(lambda: client.request(Question(0)))
        asking = in_thread(lambda: client.request(Question(1)))

        def hear() -> None:
            assert kept.result().tensor is not None
            error = asking.exception()
            assert isinstance(error, PeerLostError | RemoteError), error

        yield hear


# What waits


@contextmanager
def _send(place: Place) -> Iterator[Wait]:
    """Wait for memory, all of which another message uses."""
    with TensorSender(place.tensors, 8, BIG * 8) as sender:
        sender.send(pattern(0, BIG))

        def held() -> tuple[int, int, int]:
            seen = sender.statistics()
            return seen.in_flight, seen.bytes_in_use, seen.waiting

        call = partial(sender.send, pattern(1, BIG))
        yield Wait(call, lambda: sender.statistics().waiting, held, sender)


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


@contextmanager
def _request(place: Place) -> Iterator[Wait]:
    with MessageClient(place.messages, Answer) as client:
        held = lambda: inside.held_by_client(client.inner)  # noqa: E731
        call = partial(client.request, Question(1))
        yield Wait(call, lambda: client.statistics().messages_sent, held, client)


def _answering(server: MessageServer[Question], call: Callable[..., object]) -> Wait:
    def held() -> tuple[int, dict[str, int]]:
        return inside.waiters_for_requests(server.inner), inside.held_by_server(server.inner)

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
def _answer(place: Place) -> Iterator[Wait]:
    answer = Answer(1, 0, pattern(1, BIG))
    with MessageServer(place.messages, Question, arena_bytes=8 * BIG) as server:
        server.next().answer(answer)  # it occupies the memory
        request = server.next()
        wait = _answering(server, lambda **limit: request.answer(answer, **limit))
        yield wait._replace(is_waiting=lambda: server.inner._memory.gate.waiting)


WAITS = {
    "send": Row(_send, _receiver),
    "receive": Row(_of_receiver(partial(TensorReceiver.receive, handle=NOBODYS)), _sender),
    "iterate": Row(_of_receiver(list), _sender, takes_timeout=False),
    "request": Row(_request, _server),
    "next request": Row(_of_server(MessageServer.next), _client),
    "serve": Row(_of_server(partial(MessageServer.serve, handler=lambda _: None)), _client, False),
    "answer": Row(_answer, _asking),
}
