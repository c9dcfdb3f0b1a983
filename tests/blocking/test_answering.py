"""A server in threads, and a client in another process, with either API."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

import aiotensor.channel
from aiotensor import PeerLostError, RemoteError, UsageError
from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from tests.blocking.others import Other, other
from tests.blocking.waiting import in_thread, until
from tests.blocking.works import answer
from tests.channel.parties import Answer, Place, Question, said
from verification import inside
from verification.patterns import BIG, pattern


class Answering(NamedTuple):
    server: MessageServer[Question]
    receiver: TensorReceiver

    def is_settled(self) -> bool:
        """Return whether all resources of the requests have been released."""
        seen, received = self.server.statistics(), self.receiver.statistics()
        return not (seen.waiting or seen.waiting_bytes or seen.in_hand or received.leases)


@contextmanager
def answering(place: Place, **options: Any) -> Iterator[Answering]:
    with (
        TensorReceiver(place.tensors) as receiver,
        MessageServer(place.messages, Question, receiver=receiver, **options) as server,
    ):
        yield Answering(server, receiver)


@contextmanager
def client_on_a_loop(
    place: Place,
) -> Iterator[tuple[BlockingPortal, aiotensor.channel.MessageClient[Answer]]]:
    """Open a client with a receiver on an event loop, where a request can be cancelled at any moment."""
    with (
        start_blocking_portal() as loop,
        loop.wrap_async_context_manager(aiotensor.TensorReceiver(place.answers)) as receiver,
        loop.wrap_async_context_manager(
            aiotensor.channel.MessageClient(place.messages, receiver=receiver, reply_type=Answer)
        ) as client,
    ):
        yield loop, client


def test_requests_are_iterated_over_and_answered(stranger: Other, place: Place) -> None:
    with answering(place) as ends:
        stranger.call("open_client", place)
        asked = stranger.begin("ask_many", 0, 6, 2)
        for number, request in enumerate(ends.server, 1):
            with request:
                assert request.is_wanted
                assert request.client_pid == stranger.pid
                assert request.reply(answer(request.message), timeout=30)
                assert not request.is_wanted
            if number == 6:
                break
        del request
        assert asked.result() == 6
        until(ends.is_settled)
    seen = ends.server.statistics()
    assert (seen.messages_received, seen.answers, seen.failures, seen.in_hand) == (6, 6, 0, 0)


def test_serve_runs_in_several_threads_until_the_server_is_closed(stranger: Other, place: Place) -> None:
    with answering(place) as ends:
        serving = [in_thread(lambda: ends.server.serve(answer)) for _ in range(3)]
        stranger.call("open_client", place)
        assert stranger.call("ask_many", 0, 30, 8) == 30
        until(ends.is_settled)
    for one in serving:
        one.result()
    assert ends.server.statistics().answers == 30


@pytest.mark.parametrize("timeout", [0, 0.01, None])
def test_next_returns_a_request_that_has_arrived(
    timeout: float | None, stranger: Other, place: Place
) -> None:
    with answering(place) as ends:
        with pytest.raises(TimeoutError):
            ends.server.next(timeout=timeout or 0)
        stranger.call("open_client", place)
        asked = stranger.begin("ask", 1)
        until(lambda: inside.ready(ends.server.inner))
        assert ends.server.statistics().waiting == 1
        request = ends.server.next(timeout=timeout)
        assert ends.server.statistics().in_hand == 1
        request.reply(answer(request.message))
        assert asked.result()
        del request
        until(ends.is_settled)


@pytest.mark.parametrize("timeout", [0, 0.001])
def test_next_returns_a_large_request_whose_decoding_exceeds_the_timeout(
    timeout: float, place: Place
) -> None:
    with (
        MessageServer(place.messages, Question) as server,
        MessageClient(place.messages, reply_type=Answer) as client,
    ):
        asked = in_thread(lambda: client.request(Question(1, pattern(1, 50 * BIG))))
        until(lambda: inside.ready(server.inner))
        request = server.next(timeout=timeout)
        request.reply(answer(request.message))
        assert asked.result().total == int(pattern(1, 50 * BIG).sum())


def test_an_exception_in_the_block_is_sent_to_the_client_and_logged(stranger: Other, place: Place) -> None:
    with answering(place) as ends, said() as texts:
        stranger.call("open_client", place)
        asked = stranger.begin("ask", 1)
        request = ends.server.next()
        with request:
            assert ends.receiver.statistics().leases == 1
            raise KeyError("no such thing")
        with pytest.raises(RemoteError, match="KeyError: 'no such thing'"):
            asked.result()
        # The message is gone, though the request is still here; nothing waits for the garbage collector.
        until(ends.is_settled)
        with pytest.raises(UsageError, match="its message is no longer available"):
            _ = request.message
        with pytest.raises(UsageError, match="already entered"), request:
            pass
        assert ends.server.statistics().failures == 1
    [text] = texts
    assert "KeyError: 'no such thing'" in text


def test_leaving_the_block_without_a_reply_fails_the_request(stranger: Other, place: Place) -> None:
    with answering(place) as ends:
        stranger.call("open_client", place)
        asked = stranger.begin("ask", 1)
        with ends.server.next():
            pass
        with pytest.raises(RemoteError, match="the server's handler ended without a reply"):
            asked.result()
        until(ends.is_settled)


def test_a_dropped_request_raises_peer_lost_error_at_the_client(stranger: Other, place: Place) -> None:
    with answering(place) as ends:
        stranger.call("open_client", place)
        asked = stranger.begin("ask", 1)
        ends.server.next()
        with pytest.raises(PeerLostError, match="dropped without a reply"):
            asked.result()
        until(ends.is_settled)


@pytest.mark.parametrize("reason", ["not today", LookupError("not today")])
def test_a_request_fails_with_a_reason(reason: str | Exception, stranger: Other, place: Place) -> None:
    with answering(place) as ends:
        stranger.call("open_client", place)
        asked = stranger.begin("ask", 1)
        with ends.server.next() as request:
            assert request.fail(reason)
        with pytest.raises(RemoteError, match="not today"):
            asked.result()
        with pytest.raises(UsageError, match="already answered"):
            request.reply(Answer(1))
        with pytest.raises(UsageError, match="already answered"):
            request.fail("twice")


def test_a_reply_that_cannot_be_encoded_can_be_replaced(stranger: Other, place: Place) -> None:
    with answering(place) as ends:
        stranger.call("open_client", place)
        asked = stranger.begin("ask", 1)
        with ends.server.next() as request:
            with pytest.raises(TypeError):
                request.reply(object())
            assert request.reply(answer(request.message))
        assert asked.result()


def test_errors_of_the_handler_and_of_encoding_are_sent_to_the_client(place: Place) -> None:
    answers: list[object] = [ValueError("first"), object(), Answer(3)]

    def handle(question: Question) -> object:
        found = answers[question.seed]
        if isinstance(found, Exception):
            raise found
        return found

    with said(), answering(place) as ends, MessageClient(place.messages, reply_type=Answer) as client:
        serving = in_thread(lambda: ends.server.serve(handle))
        with pytest.raises(RemoteError, match="ValueError: first"):
            client.request(Question(0))
        with pytest.raises(RemoteError, match="TypeError"):
            client.request(Question(1))
        assert client.request(Question(2)) == Answer(3)
        ends.server.close()
        serving.result()


def test_replies_to_cancelled_requests_and_to_sent_messages_return_false(place: Place) -> None:
    with answering(place) as ends, client_on_a_loop(place) as (loop, client):
        asked = loop.start_task_soon(client.request, Question(1))
        request = ends.server.next()
        assert request.is_wanted
        asked.cancel()
        until(lambda: not request.is_wanted)
        assert ends.server.statistics().cancelled == 1
        assert not request.reply(Answer(1))
        loop.call(client.send, Question(2))
        request = ends.server.next()
        assert not request.is_wanted
        with request:  # which is no error
            assert not request.reply(Answer(2))


def test_cancelling_a_request_ends_the_wait_of_its_reply_for_a_permit(place: Place) -> None:
    with (
        TensorSender(place.answers, 1) as sender,
        answering(place, sender=sender) as ends,
        client_on_a_loop(place) as (loop, client),
    ):
        sender.send(pattern(0, 3))  # it has the permit
        asked = loop.start_task_soon(client.request, Question(1))
        with ends.server.next() as request:
            replying = in_thread(lambda: request.reply(Answer(1, tensor=pattern(1, BIG))))
            until(lambda: sender.statistics().waiting == 1)
            asked.cancel()
            assert replying.result() is False
        assert sender.statistics().in_flight == 1


def test_replies_send_their_tensors_with_the_sender(place: Place) -> None:
    with (
        TensorSender(place.answers, 1, 8 * BIG) as sender,
        answering(place, sender=[sender]) as ends,
        other("blocking", place.tensors) as client,
    ):
        serving = in_thread(lambda: ends.server.serve(answer))
        client.call("open_client", place, by_receiver=True)
        until(lambda: sender.receiver_id)
        for seed in range(3):
            assert client.call("ask", seed, BIG, BIG)
        assert sender.statistics().tensors_sent == 3
        ends.server.close()
        serving.result()


def test_closing_the_server_in_a_handler_ends_serve_without_an_error(stranger: Other, place: Place) -> None:
    with answering(place) as ends, said() as texts:
        stranger.call("open_client", place)

        def close(question: Question) -> Answer:
            assert question.tensor is not None
            ends.server.close()
            return Answer(1, tensor=question.tensor)

        asked = stranger.begin("ask", 1)
        in_thread(lambda: ends.server.serve(close)).result()
        with pytest.raises(Exception, match="it closed"):
            asked.result()
        until(lambda: ends.receiver.statistics().leases == 0)
    assert not texts


def test_an_exception_in_the_block_after_closing_is_logged(place: Place) -> None:
    with (
        answering(place) as ends,
        MessageClient(place.messages, reply_type=Answer) as client,
        said() as texts,
    ):
        asked = in_thread(lambda: client.request(Question(1)))
        with ends.server.next() as request:
            ends.server.close()
            raise LookupError("after the end")
        assert asked.exception() is not None
        with pytest.raises(UsageError, match="its message is no longer available"):
            _ = request.message
    assert any("after the end" in text for text in texts)


def test_the_address_of_a_server_contains_the_assigned_port() -> None:
    with (
        MessageServer("tcp://127.0.0.1:0", Question) as server,
        MessageClient(server.address, reply_type=Answer) as client,
    ):
        assert not server.address.endswith(":0")
        asked = in_thread(lambda: client.request(Question(1, pattern(1, 3))))
        with server.next() as request:
            assert request.client_pid == os.getpid()
            assert request.message.tensor is not None
            assert torch.equal(request.message.tensor, pattern(1, 3))
            request.reply(Answer(2))
        assert asked.result() == Answer(2)
