"""However the interpreter ends, it ends: with the right status, and with nothing to say that is ours."""

import pytest

from aiotensor.blocking import MessageClient
from tests.blocking.fork_server import Ended, ForkServer
from tests.blocking.waiting import until
from tests.channel.parties import Answer, Place, Question


def test_what_a_module_left_open_is_no_trouble(fork_server: ForkServer, place: Place) -> None:
    with fork_server.program("leave_all_open", *place) as program:
        assert program.ended() == Ended(0, [], "")


def test_threads_that_wait_do_not_keep_the_interpreter(fork_server: ForkServer, place: Place) -> None:
    with fork_server.program("leave_threads_waiting", *place) as program:
        assert program.ended() == Ended(0, ["8"], "")


@pytest.mark.parametrize("attempt", range(5))
def test_threads_that_are_busy_do_not_take_the_process_with_them(
    attempt: int, fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("be_busy", *place) as program:
        assert program.ended() == Ended(0, [], "")


@pytest.mark.parametrize("attempt", range(3))
def test_copies_in_other_threads_do_not_take_the_process_with_them(
    attempt: int, fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("copy_to_the_end", *place) as program:
        assert program.ended() == Ended(0, [], "")


def test_leaving_by_sys_exit_has_the_status_that_was_given(fork_server: ForkServer, place: Place) -> None:
    with fork_server.program("end_in_the_middle", *place) as program:
        assert program.ended() == Ended(3, [], "")


def test_a_thread_goes_on_after_the_main_thread_has_failed(fork_server: ForkServer, place: Place) -> None:
    with (
        fork_server.program("fail_beside_a_thread", *place) as program,
        MessageClient(place.messages, reply_type=Answer) as client,
    ):
        until(lambda: client.request(Question(1)).total == 0)
        client.send(Question(2, wish="end"))
        ended = program.ended()
        assert (ended.status, ended.lines) == (1, [])
        assert ended.errors.count("Traceback") == 1
        assert ended.errors.endswith("LookupError: in the main thread\n")


def test_what_comes_too_late_is_refused_and_closing_does_not_hang(
    fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("come_too_late", *place) as program:
        assert program.ended() == Ended(0, ["refused", "refused", "refused", "closed"], "")
