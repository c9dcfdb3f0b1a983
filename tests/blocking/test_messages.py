"""Clients and servers in threads: requests, permits, failures and batches."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from anyio.from_thread import start_blocking_portal

import aiotensor
from aiotensor import PeerLostError, RemoteError, UsageError
from aiotensor.blocking import MessageClient, MessageServer
from tests.blocking.waiting import Place, answer, in_thread, until
from tests.channel.parties import Answer, Question, said
from verification.inside import held_by_client, held_by_server
from verification.patterns import BIG, pattern

_LONG_S = 60.0


class Channel(NamedTuple):
    client: MessageClient[Answer]
    server: MessageServer[Question]

    def is_settled(self) -> bool:
        """Return whether all resources of messages were released."""
        held = held_by_client(self.client.inner) | held_by_server(self.server.inner)
        return not any(held.values())


@contextmanager
def channel(place: Place, max_concurrent_videos: int = 8, **options: Any) -> Iterator[Channel]:
    """Open both ends; `options` are those of the server."""
    with (
        MessageServer(place.messages, Question, **options) as server,
        MessageClient(place.messages, Answer, max_concurrent_videos, 64 << 20) as client,
    ):
        yield Channel(client, server)


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
                assert request.answer(answer(request.message), timeout=30)
                assert not request.is_wanted
            del request
            got = asked.result()
            assert got.total == int(pattern(seed, count).sum() + pattern(1, 5).sum())
            assert got.tensor is not None
            assert torch.equal(got.tensor, pattern(seed, count))
            del got, asked
        until(ends.is_settled)
    assert ends.client.statistics().answers == 3


@pytest.mark.parametrize("timeout", [0, 0.001])
def test_next_returns_a_large_request_that_has_arrived(timeout: float, place: Place) -> None:
    with channel(place) as ends:
        with pytest.raises(TimeoutError):
            ends.server.next(timeout=timeout)
        body = "x" * 1_000_000
        asked = in_thread(lambda: ends.client.request(Question(1, wish=body)))
        ends.server.arrived(timeout=30)
        assert ends.server.statistics().waiting == 1
        request = ends.server.next(timeout=timeout)  # whose decoding, in a thread, may take longer
        assert ends.server.statistics().in_hand == 1
        assert request.message.wish == body
        request.answer(Answer(1))
        assert asked.result() == Answer(1)


# Requests that fail


@pytest.mark.promise(31)
def test_a_request_that_is_failed_left_or_dropped_raises_at_its_client_only(place: Place) -> None:
    with channel(place) as ends, said() as texts:

        def ask() -> Any:
            return in_thread(lambda: ends.client.request(Question(1, pattern(1, BIG))))

        asked = ask()
        with ends.server.next() as request:
            raise KeyError("no such thing")
        with pytest.raises(RemoteError, match="KeyError: 'no such thing'") as caught:
            asked.result()
        assert caught.value.type_name == "KeyError"
        [text] = texts
        assert "KeyError: 'no such thing'" in text
        # The message is gone, though the request is still here; nothing waits for the garbage collector.
        until(ends.is_settled)
        with pytest.raises(UsageError, match="its message is no longer available"):
            _ = request.message
        with pytest.raises(UsageError, match="already entered"), request:
            pass
        asked = ask()
        with ends.server.next() as request:
            assert request.fail("not today")
        with pytest.raises(RemoteError, match="not today"):
            asked.result()
        with pytest.raises(UsageError, match="already answered"):
            request.answer(Answer(1))
        asked = ask()
        with ends.server.next():
            pass
        with pytest.raises(RemoteError, match="the server's handler ended without an answer"):
            asked.result()
        asked = ask()
        ends.server.next()
        with pytest.raises(PeerLostError, match="dropped without an answer"):
            asked.result()
        asked = ask()
        with ends.server.next() as request:
            with pytest.raises(TypeError):
                request.answer(object())
            assert request.answer(Answer(1))
        assert asked.result() == Answer(1)
        until(ends.is_settled)


def test_cancelling_a_request_ends_the_wait_of_its_answer_for_memory(place: Place) -> None:
    with (
        MessageServer(place.messages, Question, arena_bytes=8 * BIG) as server,
        start_blocking_portal() as loop,
        loop.wrap_async_context_manager(aiotensor.MessageClient(place.messages, Answer)) as client,
    ):
        held = loop.start_task_soon(client.request, Question(1))
        server.next().answer(Answer(1, tensor=pattern(1, BIG)))
        asked = loop.start_task_soon(client.request, Question(2))
        with server.next() as request:
            kept = held.result()  # its tensor occupies the arena of the server
            answering = in_thread(lambda: request.answer(Answer(1, tensor=pattern(1, BIG))))
            until(lambda: server.inner._memory.gate.waiting == 1)
            asked.cancel()
            assert answering.result() is False
        assert server.statistics().cancelled == 1
        assert kept.tensor is not None
        assert torch.equal(kept.tensor, pattern(1, BIG))


def test_closing_the_server_in_a_handler_ends_serve_without_an_error(place: Place) -> None:
    with channel(place) as ends, said() as texts:

        def close(question: Question) -> Answer:
            ends.server.close()
            return Answer(1, tensor=question.tensor)

        asked = in_thread(lambda: ends.client.request(Question(1, pattern(1, BIG))))
        in_thread(lambda: ends.server.serve(close)).result()
        with pytest.raises(PeerLostError, match="closed"):
            asked.result()
    assert all("the connection to the server" in text for text in texts)  # only the client logs


# Permits


def test_a_permit_bounds_requests_and_sends_its_allocated_tensor(place: Place) -> None:
    with channel(place, max_concurrent_videos=1) as ends:
        ends.client.ready(nbytes=8 * BIG, timeout=30)
        with ends.client.permit() as permit:
            with pytest.raises(TimeoutError), ends.client.permit(timeout=0.01):
                pass
            tensor = permit.allocate((BIG,), torch.int64)
            tensor.copy_(pattern(0, BIG))
            serving = in_thread(lambda: ends.server.serve(answer))
            asked = ends.client.request(Question(0, tensor), inside=permit)
            assert asked.total == int(tensor.sum())
            with pytest.raises(UsageError, match="already entered"), permit:
                pass
        del tensor
        with ends.client.permit(timeout=30) as permit:  # the first one was released
            ends.client.send(Question(5, pattern(5, BIG)), target=0, inside=permit)
        until(ends.is_settled)
        assert ends.client.statistics().messages_sent == 2
        ends.server.close()
        serving.result()


# Handlers and batches


def test_each_request_of_a_batch_gets_the_result_for_its_message(place: Place) -> None:
    sizes = []

    def handle(questions: list[Question]) -> list[object]:
        sizes.append(len(questions))
        if any(question.wish == "raise" for question in questions):
            raise ValueError("no memory on the GPU")
        return [KeyError("unknown") if question.seed == 3 else answer(question) for question in questions]

    with channel(place) as ends, said() as texts:
        serving = in_thread(lambda: ends.server.serve(handle, max_batch=4, batch_wait_s=_LONG_S))

        def ask(wish: str = "") -> list[Any]:
            return [
                in_thread(lambda seed=seed: ends.client.request(Question(seed, pattern(seed, 3), wish=wish)))  # type: ignore[misc]
                for seed in range(4)
            ]

        *good, bad = ask()
        assert [one.result().total for one in good] == [int(pattern(seed, 3).sum()) for seed in range(3)]
        with pytest.raises(RemoteError, match="unknown"):
            bad.result()
        assert texts == []
        for one in ask("raise"):
            with pytest.raises(RemoteError, match="no memory on the GPU"):
                one.result()
        assert len(texts) == 1
        assert texts[0].startswith("answering a batch of 4 requests failed")
        assert sizes == [4, 4]
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
                    request.answer(answer(request.message))
        assert [one.result().seed for one in asked] == [7, 7, 7]
        ends.server.close()
        assert list(batches) == []
