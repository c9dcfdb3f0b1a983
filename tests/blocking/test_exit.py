"""The interpreter exits in every case, with the right status and without output of the library."""

import pytest

from aiotensor.blocking import MessageClient
from tests.blocking.fork_server import Ended, ForkServer
from tests.blocking.waiting import Place, until
from tests.channel.parties import Answer, Question
from tests.selection import COMPLETE


@pytest.mark.promise(4)
def test_an_exit_inside_a_block_with_open_objects_is_silent_and_keeps_its_status(
    fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("leave_all_open", *place) as program:
        assert program.ended() == Ended(3, [], "")


def test_waiting_daemon_threads_do_not_delay_the_exit(fork_server: ForkServer, place: Place) -> None:
    with fork_server.program("leave_threads_waiting", *place) as program:
        assert program.ended() == Ended(0, ["all wait"], "")


@pytest.mark.parametrize("attempt", range(5 if COMPLETE else 1))
def test_busy_daemon_threads_do_not_crash_the_exit(
    attempt: int, fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("be_busy", *place) as program:
        assert program.ended() == Ended(0, [], "")


def test_a_thread_continues_to_serve_after_the_main_thread_failed(
    fork_server: ForkServer, place: Place
) -> None:
    with (
        fork_server.program("fail_beside_a_thread", *place) as program,
        MessageClient(place.messages, Answer) as client,
    ):
        until(lambda: client.request(Question(1)).total == 0)
        client.send(Question(2, wish="end"))
        ended = program.ended()
        assert (ended.status, ended.lines) == (1, [])
        assert ended.errors.count("Traceback") == 1
        assert ended.errors.endswith("LookupError: in the main thread\n")


def test_calls_at_interpreter_exit_raise_and_closing_does_not_hang(
    fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("come_too_late", *place) as program:
        assert program.ended() == Ended(0, ["refused", "refused", "refused", "closed"], "")
