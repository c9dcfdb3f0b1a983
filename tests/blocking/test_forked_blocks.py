"""A forked child that leaves a block of its parent: its exceptions propagate; it has its own exit status."""

from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import NoReturn

import pytest

from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from tests.blocking.fork_server import Ended, ForkServer
from tests.blocking.waiting import Place, in_thread
from tests.channel.parties import Answer, Question
from tests.forked_blocks import check_told_of_fork
from tests.runtime.test_affinity import forks, in_a_fork

pytestmark = [forks, pytest.mark.promise(23)]

Block = AbstractContextManager[object]


def _leave(block: Block, error: BaseException) -> NoReturn:
    with ExitStack() as stack:
        stack.push(block)  # which the parent has entered
        raise error
    raise AssertionError("the block kept the exception")


def test_a_forked_child_leaves_a_block_by_an_exception_only(place: Place) -> None:
    with (
        TensorReceiver(place.tensors) as receiver,
        TensorSender(place.tensors) as sender,
        sender.message() as message,
        MessageServer(place.messages, Question) as server,
        MessageClient(place.messages, Answer) as client,
    ):
        asking = in_thread(lambda: client.request(Question(1)))
        with server.next() as request:
            blocks: list[Block] = [receiver, sender, message, server, client, request]
            for block in blocks:
                for error in (SystemExit(3), KeyboardInterrupt("3"), LookupError("3")):
                    assert in_a_fork(partial(_leave, block, error)) == f"{type(error).__name__}: {error}"
                check_told_of_fork(in_a_fork(partial(block.__exit__, None, None, None)))
            request.answer(Answer(1))
        assert asking.result() == Answer(1)


def test_sys_exit_in_a_forked_child_leaves_all_blocks_silently_with_its_status(
    fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("leave_in_a_child", 7, *place) as program:
        assert program.ended() == Ended(0, ["7"], "")
