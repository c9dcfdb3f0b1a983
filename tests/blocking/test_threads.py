"""Many threads share one object, and all objects share one thread, which ends with the last of them."""

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import pytest
import torch

from aiotensor import ClosedError, RemoteError
from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from tests.blocking.waiting import Place, answer, in_thread, is_right, until
from tests.channel.parties import Answer, Question
from tests.selection import COMPLETE
from verification.patterns import BIG, pattern

_THREADS = 8
_REQUESTS = 50 if COMPLETE else 10
_COUNTS = (3, 2000, BIG // 4)


def _loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aiotensor-blocking"]


def test_many_threads_share_one_client_and_one_server(place: Place) -> None:
    with (
        MessageServer(place.messages, Question) as server,
        MessageClient(place.messages, Answer, 4, 64 << 20) as client,
    ):

        def work() -> int:
            number = -1
            for number, request in enumerate(server):  # noqa: B007
                with request:
                    request.answer(answer(request.message))
                del request
            return number + 1

        def ask(first: int) -> int:
            right = 0
            for seed in range(first, first + _REQUESTS):
                count = _COUNTS[seed % len(_COUNTS)]
                right += is_right(client.request(Question(seed, pattern(seed, count), wish="7")), seed, count)
            return right

        working = [in_thread(work) for _ in range(_THREADS)]
        asking = [in_thread(partial(ask, first * _REQUESTS)) for first in range(_THREADS)]
        assert [one.result() for one in asking] == [_REQUESTS] * _THREADS
        until(lambda: not (client.statistics().in_flight or client.statistics().bytes_in_use))
        server.close()
        assert sum(one.result() for one in working) == _THREADS * _REQUESTS
    seen = client.statistics()
    assert (seen.answers, seen.failures, seen.peak_in_flight) == (_THREADS * _REQUESTS, 0, 4)


def test_all_objects_share_one_thread_that_ends_with_the_last(place: Place) -> None:
    assert not _loops()
    with ExitStack() as stack:
        receiver = TensorReceiver(place.tensors)
        assert not _loops()  # only opening needs it
        stack.enter_context(receiver)
        [loop] = _loops()
        assert loop.daemon
        sender = stack.enter_context(TensorSender(place.tensors))
        client = stack.enter_context(MessageClient(place.messages, Answer))
        server = in_thread(lambda: MessageServer(place.messages, Question).__enter__()).result()
        for first in (receiver, client, sender):  # in whatever order
            assert _loops() == [loop]
            first.close()
        assert _loops() == [loop]
        server.close()
        assert not _loops()
    with TensorReceiver(place.tensors):
        assert len(_loops()) == 1


def test_opening_without_a_thread_raises_os_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    receiver = TensorReceiver(place.tensors)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no thread can be started"):
        patch.setattr(threading.Thread, "start", start)
        receiver.__enter__()
    with pytest.raises(ClosedError):
        receiver.next()
    with TensorReceiver(place.tensors):  # nothing of the attempt is left
        pass


def test_objects_are_opened_and_closed_in_many_threads_at_once(place: Place) -> None:
    ready = threading.Barrier(_THREADS)

    def come_and_go(number: int) -> None:
        ready.wait()
        for _ in range(20 if COMPLETE else 3):
            with MessageServer(f"{place.messages}{number}", Question) as server:
                assert len(_loops()) >= 1
                server.statistics()

    coming = [in_thread(partial(come_and_go, number)) for number in range(_THREADS)]
    for one in coming:
        one.result()
    assert not _loops()


def test_concurrent_calls_of_other_threads_raise_closed_error_during_close(place: Place) -> None:
    def look(server: MessageServer[Question], started: threading.Barrier) -> bool:
        started.wait()
        try:
            while True:
                with suppress(TimeoutError):
                    server.next(timeout=0)
        except ClosedError:
            return server.statistics().clients == 0  # which never are refused

    for _ in range(20 if COMPLETE else 3):
        with MessageServer(place.messages, Question) as server:
            started = threading.Barrier(_THREADS + 1)
            looking = [in_thread(partial(look, server, started)) for _ in range(_THREADS)]
            started.wait()
        assert all(one.result() for one in looking)


@pytest.mark.promise(29)
def test_the_tensor_of_a_failed_call_and_a_closed_object_are_freed_without_the_garbage_collector(
    place: Place, no_collections: None
) -> None:
    def check(work: Callable[[torch.Tensor], object], error: type[Exception]) -> None:
        tensor = pattern(1, BIG)
        freed = weakref.ref(tensor)
        with pytest.raises(error):
            work(tensor)
        del tensor
        until(lambda: freed() is None)

    with TensorSender(place.tensors, 1) as sender:
        check(partial(sender.send, timeout=0.01), TimeoutError)
    closed = weakref.ref(sender)
    del sender
    until(lambda: closed() is None)
    with (
        MessageServer(place.messages, Question) as server,
        MessageClient(place.messages, Answer) as client,
    ):
        check(lambda tensor: client.request(Question(1, tensor), timeout=0.1), TimeoutError)
        serving = in_thread(lambda: server.serve(lambda _: object()))
        check(lambda tensor: client.request(Question(1, tensor)), RemoteError)
        server.close()
        serving.result()
