"""Closing waits for messages in flight until its timeout, and always closes."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import pytest
import torch

from aiotensor import ClosedError, WouldBlockError
from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from aiotensor.blocking.portal import BlockingObject
from tests.blocking.fork_server import ForkServer, Program
from tests.blocking.waiting import in_thread, nobody_listens_in, until
from tests.channel.parties import Answer, Place, Question
from tests.selection import COMPLETE
from verification import inside
from verification.patterns import BIG, pattern
from verification.promptly import promptly


@contextmanager
def _full_link(fork_server: ForkServer, place: Place) -> Iterator[tuple[TensorSender, Program]]:
    """Stop a receiver, and fill the link to it, so that the sender cannot be closed in order."""
    with fork_server.program("receive", *place) as engine:
        assert engine.line() == "ready"
        sender = TensorSender(place.tensors, 1000).__enter__()
        sender.send(pattern(0, BIG))
        assert engine.line() == "0 True"
        engine.stop()
        with suppress(WouldBlockError):
            while True:
                sender.send_nowait(pattern(0, 1000))
        yield sender, engine


def test_closing_waits_until_sent_messages_are_written(fork_server: ForkServer, place: Place) -> None:
    with _full_link(fork_server, place) as (sender, engine):
        closing = in_thread(sender.close)
        until(lambda: sender.is_closed)
        sender.close()  # again does nothing
        with pytest.raises(ClosedError):
            sender.send(pattern(1, 3))
        assert sender.statistics().in_flight > 1
        assert not closing.done()
        engine.go_on()
        closing.result()
        for number in range(1, sender.statistics().messages_sent):
            assert engine.line().startswith(f"{number} ")


def test_closing_with_a_timeout_raises_timeout_error_and_closes(
    fork_server: ForkServer, place: Place
) -> None:
    with _full_link(fork_server, place) as (sender, _):
        begun = time.monotonic()
        with promptly(10), pytest.raises(TimeoutError):
            sender.close(timeout=0.1)
        assert time.monotonic() - begun >= 0.1
        assert not [thread for thread in threading.enumerate() if thread.name == "aiotensor-blocking"]
        with pytest.raises(ClosedError):
            sender.send(pattern(1, 3))
        assert sender.statistics().messages_sent > 1
        sender.close()


def test_the_loop_stops_after_uninterruptible_calls_have_ended(place: Place) -> None:
    receiver = TensorReceiver(place.tensors).__enter__()
    has_begun = threading.Event()

    async def work() -> int:
        has_begun.set()
        await asyncio.sleep(0.1)  # which no closing ends, as it ends no copy
        return 5

    working = in_thread(lambda: receiver.wait_for(work))
    has_begun.wait()
    receiver.close()
    assert working.result() == 5


def test_an_object_that_another_thread_is_opening_can_be_closed(place: Place) -> None:
    listeners: list[BlockingObject[Any, Any]] = [
        TensorReceiver(place.tensors),
        MessageServer(place.messages, Question),
    ]
    folder = os.path.dirname(place.messages.removeprefix("ipc://"))
    for listener in listeners:
        with nobody_listens_in(folder):
            opening = in_thread(listener.__enter__)
            until(lambda: inside.is_opening(listener))  # noqa: B023
            listener.close()
            assert isinstance(opening.exception(), ClosedError)
        assert not os.listdir(folder)


def test_several_threads_may_close_at_once_also_while_another_opens(place: Place) -> None:
    for number in range(60 if COMPLETE else 10):
        receiver = TensorReceiver(place.tensors)
        begin = threading.Barrier(3)

        def close() -> None:
            begin.wait()  # noqa: B023 - of this round
            receiver.close()  # noqa: B023

        def enter() -> None:
            begin.wait()  # noqa: B023
            with suppress(ClosedError):
                receiver.__enter__()  # noqa: B023

        if number % 2:
            receiver.__enter__()
        ends = [in_thread(close), in_thread(close), in_thread(close if number % 2 else enter)]
        for end in ends:
            end.result()
        receiver.close()
        assert not os.listdir(os.path.dirname(place.messages.removeprefix("ipc://")))


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def test_an_interrupted_close_can_be_repeated(place: Place) -> None:
    server = MessageServer(place.messages, Question).__enter__()
    inside.after_next_lock(server, _interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.close()
    server.close()
    assert not os.listdir(os.path.dirname(place.messages.removeprefix("ipc://")))


def test_an_exception_in_the_block_closes_the_object_and_propagates(place: Place) -> None:
    with pytest.raises(LookupError, match="here"), TensorReceiver(place.tensors) as receiver:
        raise LookupError("here")
    with pytest.raises(ClosedError):
        receiver.next()


def test_a_message_whose_sender_is_closed_in_its_block_is_not_sent(place: Place) -> None:
    with TensorReceiver(place.tensors):
        sender = TensorSender(place.tensors)
        with pytest.raises(ClosedError), sender, sender.message() as message:
            message.send(pattern(1, 3))
            sender.close()
        assert sender.statistics().messages_sent == 0
        sender = TensorSender(place.tensors)
        with pytest.raises(LookupError, match="here"), sender, sender.message() as message:
            message.send(pattern(1, 3))
            sender.close()
            raise LookupError("here")


def test_received_and_allocated_tensors_stay_valid_after_closing(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors) as sender:
        tensor = receiver.receive(sender.send(pattern(1, BIG)))
        allocated = sender.allocate((BIG,), torch.int64)
    allocated.fill_(3)
    assert torch.equal(tensor, pattern(1, BIG))
    assert int(allocated.sum()) == 3 * BIG


def test_statistics_are_available_after_closing(place: Place) -> None:
    with (
        TensorReceiver(place.tensors) as receiver,
        TensorSender(place.tensors) as sender,
        MessageServer(place.messages, Question, receiver=receiver) as server,
        MessageClient(place.messages, sender=sender, reply_type=Answer) as client,
    ):
        client.send(Question(1, pattern(1, BIG)))
        with server.next():
            pass
        until(lambda: sender.statistics().bytes_in_use == 0)
        for each in (client, server, sender, receiver):
            each.close(timeout=30)
    assert client.statistics().messages_sent == 1
    assert (server.statistics().messages_received, server.statistics().clients) == (1, 0)
    assert (sender.statistics().messages_sent, sender.statistics().in_flight) == (1, 0)
    assert (receiver.statistics().tensors_taken, receiver.statistics().senders) == (1, 0)
