"""Closing waits for messages in flight until its timeout, and always closes."""

import asyncio
import os
import threading
import time
from contextlib import suppress
from typing import NoReturn

import pytest
import torch

from aiotensor import ClosedError
from aiotensor.blocking import MessageServer, TensorReceiver, TensorSender
from tests.blocking.waiting import Place, held_back, in_thread, until
from tests.cancellation.situations import strided
from tests.channel.parties import Question
from tests.selection import COMPLETE
from verification import inside
from verification.patterns import BIG, pattern
from verification.promptly import promptly


@pytest.mark.parametrize("timeout", [None, 0.1])
def test_closing_waits_for_copies_until_its_timeout_and_closes(timeout: float | None, place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver:
        sender = TensorSender(place.tensors).__enter__()
        sender.ready(timeout=20)
        with held_back(sender):
            handle = sender.post(strided(1, BIG))
            begun = time.monotonic()
            closing = in_thread(lambda: sender.close(timeout=timeout))
            until(lambda: sender.is_closed)
            sender.close()  # again does nothing
            with pytest.raises(ClosedError):
                sender.send(pattern(1, 3))
            if timeout is None:
                assert not closing.done()
            else:
                with promptly(10):
                    assert isinstance(closing.exception(), TimeoutError)
                assert time.monotonic() - begun >= timeout
        if timeout is None:
            closing.result()
            assert torch.equal(receiver.receive(handle), pattern(1, BIG))


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
        assert not os.listdir(place.folder)


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def test_an_interrupted_close_can_be_repeated(place: Place) -> None:
    server = MessageServer(place.messages, Question).__enter__()
    inside.after_next_lock(server, _interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.close()
    server.close()
    assert not os.listdir(place.folder)


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


def test_a_dropped_receiver_with_a_sender_closes_without_an_error_in_its_loop(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = TensorReceiver(place.tensors).__enter__()
    with TensorSender(place.tensors) as sender:
        sender.ready(timeout=20)
        receiver.abandon()  # as a finalizer does
        until(lambda: sender.statistics().receivers_lost == 1)
    assert not [record for record in caplog.records if record.name == "asyncio"]
