"""A signal ends waiting calls immediately; the blocks end, the other side is notified, and nothing hangs."""

import os
import signal

import pytest

from aiotensor.blocking import MessageClient
from tests.blocking.fork_server import Ended, ForkServer
from tests.blocking.waiting import nobody_listens_in, until
from tests.blocking.waits import WAITS
from tests.channel.parties import Answer, Place, Question
from tests.selection import COMPLETE


def _was_interrupted(ended: Ended) -> bool:
    """Return whether a program ended as Python ends one at Ctrl-C, without other errors."""
    assert ended.errors.count("Traceback") == 1, ended.errors
    assert ended.errors.endswith("\nKeyboardInterrupt\n"), ended.errors
    return ended.status == -signal.SIGINT


@pytest.mark.parametrize(
    "name", WAITS if COMPLETE else ["send, for memory", "receive", "request", "serve", "reply"]
)
def test_an_interrupt_ends_a_waiting_call(name: str, fork_server: ForkServer, place: Place) -> None:
    with WAITS[name].far(place) as hear, fork_server.program("wait", name, *place) as program:
        assert program.line() == "waits"
        program.signal()
        ended = program.ended()
        assert _was_interrupted(ended)
        assert ended.lines == ["closed"]
        hear()


def test_an_interrupt_delivered_to_another_thread_ends_a_waiting_call(
    fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("be_interrupted_elsewhere", *place) as program:
        assert _was_interrupted(program.ended())


@pytest.mark.parametrize("name", ["receiver", "server"])
def test_an_interrupt_ends_an_opening_that_waits_for_another_process(
    name: str, fork_server: ForkServer, place: Place
) -> None:
    folder = os.path.dirname(place.messages.removeprefix("ipc://"))
    with (
        nobody_listens_in(folder),
        fork_server.program("open_where_somebody_else_does", name, *place) as program,
    ):
        assert program.line() == "waits"
        program.signal()
        ended = program.ended()
        assert _was_interrupted(ended)
        assert ended.lines == ["closed"]
    assert not os.listdir(folder)


def test_a_signal_handler_may_close_an_object_that_is_opening(fork_server: ForkServer, place: Place) -> None:
    folder = os.path.dirname(place.messages.removeprefix("ipc://"))
    with (
        nobody_listens_in(folder),
        fork_server.program("open_where_somebody_else_does", "receiver", *place) as program,
    ):
        assert program.line() == "waits"
        program.signal(signal.SIGTERM)
        assert program.ended() == Ended(0, ["closed by the handler", "closed"], "")
    assert not os.listdir(folder)


def test_an_interrupt_before_the_loop_begins_to_close_still_closes(
    fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("close_with_a_busy_loop", *place) as program:
        assert program.line() == "waits"
        program.signal()
        assert program.ended() == Ended(0, ["0 False"], "")


def test_an_interrupt_before_the_loop_begins_a_receive_leaves_no_claim(
    fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("go_on_after_a_signal", *place) as program:
        assert program.line() == "waits"
        program.signal()
        assert program.ended() == Ended(0, ["waiting 0", "True", "True"], "")


def test_an_interrupted_send_releases_its_permit_before_it_raises(
    fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("look_at_once", *place) as program:
        assert program.line() == "waits"
        program.signal()
        assert program.ended() == Ended(0, ["1 2"], "")


def test_a_signal_handler_may_close_a_server_that_serves(fork_server: ForkServer, place: Place) -> None:
    with (
        fork_server.program("close_at_a_signal", *place) as program,
        MessageClient(place.messages, reply_type=Answer) as client,
    ):
        assert client.request(Question(5)) == Answer(5)
        assert program.line() == "waits"
        program.signal(signal.SIGTERM)
        assert program.ended() == Ended(0, ["served 1"], "")
        until(lambda: client.statistics().servers_lost == 1)


def test_a_second_interrupt_ends_the_closing(fork_server: ForkServer, place: Place) -> None:
    with (
        fork_server.program("receive", *place) as engine,
        fork_server.program("send_into_a_full_link", engine.pid, *place) as program,
    ):
        assert program.line() == "connected"
        engine.stop()
        assert program.line() == "waits"
        program.signal()
        assert program.line() == "closes"  # and would not end before the engine reads
        program.signal()
        ended = program.ended()
        assert ended.status == -signal.SIGINT
        assert ended.errors.count("KeyboardInterrupt\n") == 2
        assert "Exception ignored" not in ended.errors
