"""Clients and servers in threads: each method does what its asynchronous twin does."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

import aiotensor.channel
from aiotensor import PeerLostError, RemoteError, UsageError
from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from tests.blocking.fork_server import ForkServer
from tests.blocking.waiting import answer, in_thread, is_right, until
from tests.channel import parties
from tests.channel.parties import Answer, Place, Question, said
from verification import inside
from verification.patterns import BIG, pattern

_LONG_S = 60.0


class Channel(NamedTuple):
    client: MessageClient[Answer]
    server: MessageServer[Question]
    sender: TensorSender
    receiver: TensorReceiver

    def is_settled(self) -> bool:
        """Return whether all resources of messages were released."""
        sent, served = self.sender.statistics(), self.server.statistics()
        return not (
            sent.in_flight
            or sent.bytes_in_use
            or any(self.client.statistics().in_flight)
            or served.waiting
            or served.waiting_bytes
            or served.in_hand
            or self.receiver.statistics().leases
        )


@contextmanager
def channel(place: Place, max_concurrent_videos: int = 8, **options: Any) -> Iterator[Channel]:
    """Open both ends; `options` are those of the server."""
    with (
        TensorReceiver(place.tensors) as receiver,
        MessageServer(place.messages, Question, receiver=receiver, **options) as server,
        TensorSender(place.tensors, max_concurrent_videos, 64 << 20) as sender,
        MessageClient(place.messages, sender=sender, reply_type=Answer) as client,
    ):
        yield Channel(client, server, sender, receiver)


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


# Requests and their answers


def test_requests_are_iterated_over_and_answered(place: Place) -> None:
    with channel(place) as ends:
        for seed, count in enumerate((3, 2000, BIG)):
            question = Question(seed, pattern(seed, count), {"a": [pattern(1, 5)]}, wish=str(count))
            asked = in_thread(lambda: ends.client.request(question, timeout=30))  # noqa: B023
            request = next(iter(ends.server))
            with request:
                assert request.is_wanted
                assert request.client_pid == os.getpid()
                assert request.reply(answer(request.message), timeout=30)
                assert not request.is_wanted
            del request
            got = asked.result()
            assert got.total == int(pattern(seed, count).sum() + pattern(1, 5).sum())
            assert got.tensor is not None
            assert torch.equal(got.tensor, pattern(seed, count))
        until(ends.is_settled)
    served, asked_for = ends.server.statistics(), ends.client.statistics()
    assert (served.messages_received, served.answers, served.failures) == (3, 3, 0)
    assert (asked_for.messages_sent, asked_for.answers, asked_for.failures) == (3, 3, 0)


def test_serve_runs_in_several_threads_until_the_server_is_closed(place: Place) -> None:
    with channel(place) as ends:
        serving = [in_thread(lambda: ends.server.serve(answer)) for _ in range(3)]
        asked = [
            in_thread(lambda seed=seed: ends.client.request(Question(seed, pattern(seed, 2000), wish="7")))  # type: ignore[misc]
            for seed in range(20)
        ]
        assert all(is_right(one.result(), seed, 2000) for seed, one in enumerate(asked))
        ends.server.close()
    for one in serving:
        one.result()
    assert ends.server.statistics().answers == 20


@pytest.mark.parametrize("timeout", [0, 0.001, None])
def test_next_returns_a_large_request_that_has_arrived(timeout: float | None, place: Place) -> None:
    with (
        MessageServer(place.messages, Question) as server,
        MessageClient(place.messages, reply_type=Answer) as client,
    ):
        with pytest.raises(TimeoutError):
            server.next(timeout=timeout or 0)
        asked = in_thread(lambda: client.request(Question(1, pattern(1, 50 * BIG))))
        server.arrived(timeout=30)
        until(lambda: inside.ready(server.inner))
        assert server.statistics().waiting == 1
        request = server.next(timeout=timeout)  # whose decoding may take longer
        assert server.statistics().in_hand == 1
        request.reply(answer(request.message))
        assert asked.result().total == int(pattern(1, 50 * BIG).sum())


def test_without_a_sender_tensors_are_part_of_the_message(place: Place) -> None:
    with (
        MessageServer(place.messages, Question) as server,
        MessageClient(place.messages, reply_type=Answer) as client,
    ):
        tensor = pattern(3, BIG)
        client.send(Question(3, tensor))
        tensor.zero_()  # it was read by then
        with server.next() as request:
            assert not request.is_wanted  # the message needs no answer, so leaving the block is no error
            assert request.message.tensor is not None
            assert torch.equal(request.message.tensor, pattern(3, BIG))
            assert not request.reply(Answer(1))
        with pytest.raises(UsageError, match="pass sender="):
            client.permit()


def test_replies_send_their_tensors_with_the_sender(place: Place) -> None:
    with (
        TensorSender(place.answers, 1, 8 * BIG) as sender,
        channel(place, sender=[sender]) as ends,
        TensorReceiver(place.answers) as receiver,
        MessageClient(place.messages, receiver=receiver, reply_type=Answer) as client,
    ):
        serving = in_thread(lambda: ends.server.serve(answer))
        until(lambda: sender.receiver_id)
        for seed in range(3):
            got = client.request(Question(seed, wish=str(BIG)))
            assert receiver.statistics().leases == 1
            assert got.tensor is not None
            assert torch.equal(got.tensor, pattern(seed, BIG))
            del got
            until(lambda: receiver.statistics().leases == 0)
        assert sender.statistics().tensors_sent == 3
        ends.server.close()
        serving.result()


# Requests that fail


def test_an_exception_in_the_block_is_sent_to_the_client_and_logged(place: Place) -> None:
    with channel(place) as ends, said() as texts:
        asked = in_thread(lambda: ends.client.request(Question(1, pattern(1, BIG))))
        request = ends.server.next()
        with request:
            assert ends.receiver.statistics().leases == 1
            raise KeyError("no such thing")
        with pytest.raises(RemoteError, match="KeyError: 'no such thing'") as caught:
            asked.result()
        assert caught.value.type_name == "KeyError"
        # The message is gone, though the request is still here; nothing waits for the garbage collector.
        until(ends.is_settled)
        with pytest.raises(UsageError, match="its message is no longer available"):
            _ = request.message
        with pytest.raises(UsageError, match="already entered"), request:
            pass
        assert ends.server.statistics().failures == ends.client.statistics().failures == 1
    [text] = texts
    assert "KeyError: 'no such thing'" in text


@pytest.mark.promise(31)
def test_a_request_that_is_failed_left_or_dropped_raises_at_its_client_only(place: Place) -> None:
    with channel(place) as ends:
        for reason in ("not today", LookupError("not today")):
            asked = in_thread(lambda: ends.client.request(Question(1)))
            with ends.server.next() as request:
                assert request.fail(reason)
            with pytest.raises(RemoteError, match="not today"):
                asked.result()
            with pytest.raises(UsageError, match="already answered"):
                request.reply(Answer(1))
            with pytest.raises(UsageError, match="already answered"):
                request.fail("twice")
        asked = in_thread(lambda: ends.client.request(Question(1)))
        with ends.server.next():
            pass
        with pytest.raises(RemoteError, match="the server's handler ended without a reply"):
            asked.result()
        asked = in_thread(lambda: ends.client.request(Question(1)))
        ends.server.next()
        with pytest.raises(PeerLostError, match="dropped without a reply"):
            asked.result()
        asked = in_thread(lambda: ends.client.request(Question(1)))
        with ends.server.next() as request:
            with pytest.raises(TypeError):
                request.reply(object())
            assert request.reply(answer(request.message))
        assert asked.result() == Answer(1)
        until(ends.is_settled)


def test_errors_of_the_handler_and_of_encoding_are_sent_to_the_client(place: Place) -> None:
    answers: list[object] = [ValueError("first"), object(), Answer(3)]

    def handle(question: Question) -> object:
        found = answers[question.seed]
        if isinstance(found, Exception):
            raise found
        return found

    with said(), channel(place) as ends:
        serving = in_thread(lambda: ends.server.serve(handle))
        with pytest.raises(RemoteError, match="ValueError: first"):
            ends.client.request(Question(0))
        with pytest.raises(RemoteError, match="TypeError"):
            ends.client.request(Question(1))
        assert ends.client.request(Question(2)) == Answer(3)
        ends.server.close()
        serving.result()


def test_cancelling_a_request_ends_the_wait_of_its_reply_for_a_permit(place: Place) -> None:
    with (
        TensorSender(place.answers, 1) as sender,
        channel(place, sender=sender) as ends,
        client_on_a_loop(place) as (loop, client),
    ):
        asked = loop.start_task_soon(client.request, Question(1))
        request = ends.server.next()
        asked.cancel()
        until(lambda: not request.is_wanted)
        assert ends.server.statistics().cancelled == 1
        assert not request.reply(Answer(1))
        sender.send(pattern(0, 3))  # it has the permit
        asked = loop.start_task_soon(client.request, Question(2))
        with ends.server.next() as request:
            replying = in_thread(lambda: request.reply(Answer(1, tensor=pattern(1, BIG))))
            until(lambda: sender.statistics().waiting == 1)
            asked.cancel()
            assert replying.result() is False
        assert sender.statistics().in_flight == 1


def test_closing_the_server_in_a_handler_ends_serve_without_an_error(place: Place) -> None:
    with channel(place) as ends, said() as texts:

        def close(question: Question) -> Answer:
            ends.server.close()
            return Answer(1, tensor=question.tensor)

        asked = in_thread(lambda: ends.client.request(Question(1, pattern(1, BIG))))
        in_thread(lambda: ends.server.serve(close)).result()
        with pytest.raises(PeerLostError, match="it closed"):
            asked.result()
        until(lambda: ends.receiver.statistics().leases == 0)
    assert all("the connection to the server" in text for text in texts)  # only the client logs


def test_a_request_that_timed_out_releases_its_permit(place: Place) -> None:
    with channel(place, max_concurrent_videos=1) as ends:
        with pytest.raises(TimeoutError):
            ends.client.request(Question(2, pattern(2, BIG)), timeout=0.05)
        assert ends.client.statistics().in_flight == (0,)
        assert ends.sender.statistics().in_flight == 0  # its tensors are discarded
        serving = in_thread(lambda: ends.server.serve(answer))
        assert is_right(ends.client.request(Question(3, pattern(3, BIG), wish="7")), 3, BIG)
        until(ends.is_settled)
        assert ends.client.statistics().cancelled == 1
        ends.server.close()
        serving.result()


def test_a_killed_server_raises_peer_lost_error_and_its_successor_answers(
    fork_server: ForkServer, place: Place
) -> None:
    with (
        TensorSender(place.tensors) as sender,
        MessageClient(place.messages, sender=sender, reply_type=Answer) as client,
    ):
        with fork_server.program("serve", *place) as engine:
            assert is_right(client.request(Question(1, pattern(1, BIG), wish="7")), 1, BIG)
            engine.stop()
            asked = in_thread(lambda: client.request(Question(2, pattern(2, BIG))))
            until(lambda: client.statistics().messages_sent == 2)
            engine.kill()
            error = asked.exception()
            assert isinstance(error, PeerLostError)
            assert error.pid == engine.pid
            until(lambda: not (sender.statistics().in_flight or any(client.statistics().in_flight)))
            assert client.statistics().servers_lost == 1
        with fork_server.program("serve", *place):
            assert is_right(client.request(Question(3, pattern(3, BIG), wish="7")), 3, BIG)


# Permits, and several servers


def test_a_permit_bounds_requests_and_sends_its_allocated_tensor(place: Place) -> None:
    with channel(place, max_concurrent_videos=1) as ends:
        serving = in_thread(lambda: ends.server.serve(answer))
        assert ends.client.senders == (ends.sender,)
        with ends.client.permit() as permit:
            with pytest.raises(TimeoutError), ends.client.permit(timeout=0.01):
                pass
            tensor = permit.allocate((BIG,), torch.int64)
            tensor.copy_(pattern(0, BIG))
            asked = ends.client.request(Question(0, tensor), inside=permit)
            assert asked.total == int(tensor.sum())
            with pytest.raises(UsageError, match="already entered"), permit:
                pass
        del tensor
        with ends.sender.message(timeout=30) as message:  # the permit was released
            ends.client.send(Question(5, pattern(5, BIG)), inside=message)
        until(ends.is_settled)
        assert ends.sender.statistics().messages_sent == 2
        ends.server.close()
        serving.result()


def test_requests_go_to_the_least_busy_server_or_to_the_given_one(place: Place) -> None:
    with parties.place() as second, ExitStack() as stack:
        addresses = [place.messages, second.messages]
        servers = [stack.enter_context(MessageServer(address, Question)) for address in addresses]
        client = stack.enter_context(MessageClient(addresses, reply_type=Answer))
        until(lambda: client.statistics().servers == 2)
        asked = []
        for number in range(4):
            asked.append(in_thread(lambda: client.request(Question(1))))
            until(lambda: sum(client.statistics().in_flight) == number + 1)  # noqa: B023
        assert client.statistics().in_flight == (2, 2)
        asked.append(in_thread(lambda: client.request(Question(1), target=1)))
        until(lambda: client.statistics().in_flight == (2, 3))
        client.send(Question(1), target=0)
        for server, count in zip(servers, (3, 3), strict=True):
            for _ in range(count):
                server.next().reply(Answer(1))
        assert [one.result().seed for one in asked] == [1] * 5
        for use in (client.request, client.send):
            with pytest.raises(ValueError, match="target must be the index of one of the 2 servers, got -1"):
                use(Question(1), target=-1)
        with (
            TensorSender(place.tensors) as another,
            TensorReceiver(place.tensors),
            another.message() as permit,
            pytest.raises(ValueError, match="this client's sender"),
        ):
            client.request(Question(1), inside=permit)


# Batches


def test_each_request_of_a_batch_gets_the_result_for_its_message(place: Place) -> None:
    sizes = []

    def handle(questions: list[Question]) -> list[Answer]:
        sizes.append(len(questions))
        return [answer(question) for question in questions]

    with channel(place) as ends:
        serving = in_thread(lambda: ends.server.serve(handle, max_batch=4, batch_wait_s=_LONG_S))
        asked = [
            in_thread(lambda seed=seed: ends.client.request(Question(seed, pattern(seed, 3))))  # type: ignore[misc]
            for seed in range(8)
        ]
        assert [one.result().total for one in asked] == [int(pattern(seed, 3).sum()) for seed in range(8)]
        assert sizes == [4, 4]
        ends.server.close()
        serving.result()


def test_errors_of_a_batch_are_raised_in_the_clients_of_their_messages(place: Place) -> None:
    def handle(questions: list[Question]) -> list[object]:
        if any(question.wish == "raise" for question in questions):
            raise ValueError("no memory on the GPU")
        return [KeyError("unknown") if question.seed == 1 else answer(question) for question in questions]

    with channel(place) as ends, said() as texts:
        serving = in_thread(lambda: ends.server.serve(handle, max_batch=2, batch_wait_s=_LONG_S))
        good, bad = [in_thread(lambda seed=seed: ends.client.request(Question(seed))) for seed in range(2)]  # type: ignore[misc]
        assert good.result().seed == 0
        with pytest.raises(RemoteError, match="unknown"):
            bad.result()
        assert texts == []
        failed = [in_thread(lambda: ends.client.request(Question(0, wish="raise"))) for _ in range(2)]
        for one in failed:
            with pytest.raises(RemoteError, match="no memory on the GPU"):
                one.result()
        assert len(texts) == 1
        assert texts[0].startswith("answering a batch of 2 requests failed")
        ends.server.close()
        serving.result()


def test_batches_are_iterated_over_until_the_server_is_closed(place: Place) -> None:
    with channel(place) as ends:
        asked = [in_thread(lambda: ends.client.request(Question(7))) for _ in range(3)]
        until(lambda: ends.server.statistics().waiting == 3)
        batches = ends.server.batches(2)
        for size in (2, 1):
            batch = next(batches)
            assert len(batch) == size
            for request in batch:
                with request:
                    request.reply(answer(request.message))
        assert [one.result().seed for one in asked] == [7, 7, 7]
        ends.server.close()
        assert list(batches) == []
