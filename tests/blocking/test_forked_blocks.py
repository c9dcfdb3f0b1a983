"""A forked child that leaves a block of its parent: its exceptions propagate; it has its own exit status."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import NoReturn

import pytest

from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from tests.blocking.fork_server import Ended, ForkServer
from tests.channel.parties import Answer, Place, Question
from tests.forked_blocks import check_told_of_fork, in_each_block_of
from tests.runtime.test_affinity import forks, in_a_fork

pytestmark = forks

Block = AbstractContextManager[object]


@contextmanager
def _sender(place: Place) -> Iterator[Block]:
    with TensorReceiver(place.tensors), TensorSender(place.tensors) as sender:
        yield sender


@contextmanager
def _receiver(place: Place) -> Iterator[Block]:
    with TensorReceiver(place.tensors) as receiver:
        yield receiver


@contextmanager
def _message(place: Place) -> Iterator[Block]:
    with TensorReceiver(place.tensors), TensorSender(place.tensors) as sender, sender.message() as message:
        yield message


@contextmanager
def _client(place: Place) -> Iterator[Block]:
    with MessageClient(place.messages, reply_type=Answer) as client:
        yield client


@contextmanager
def _server(place: Place) -> Iterator[Block]:
    with MessageServer(place.messages, Question) as server:
        yield server


@contextmanager
def _request(place: Place) -> Iterator[Block]:
    with (
        MessageServer(place.messages, Question) as server,
        MessageClient(place.messages, reply_type=Answer) as client,
    ):
        asking = threading.Thread(target=client.request, args=(Question(1),))
        asking.start()
        with server.next() as request:
            yield request
            request.reply(Answer(1))
        asking.join()


each_block = in_each_block_of(_sender, _receiver, _message, _client, _server, _request)


def _leave(block: Block, error: BaseException) -> NoReturn:
    with ExitStack() as stack:
        stack.push(block)  # which the parent has entered
        raise error
    raise AssertionError("the block kept the exception")


def _fall_off(block: Block) -> None:
    block.__exit__(None, None, None)


@pytest.mark.promise(23)
@each_block
def test_a_forked_child_leaves_a_block_by_an_exception_only(
    make: Callable[[Place], AbstractContextManager[Block]], place: Place
) -> None:
    with make(place) as entered:
        for error in (SystemExit(3), KeyboardInterrupt("3"), LookupError("3")):
            assert in_a_fork(partial(_leave, entered, error)) == f"{type(error).__name__}: {error}"
        check_told_of_fork(in_a_fork(partial(_fall_off, entered)))


def test_sys_exit_in_a_forked_child_leaves_all_blocks_silently_with_its_status(
    fork_server: ForkServer, place: Place
) -> None:
    with fork_server.program("leave_in_a_child", 7, *place) as program:
        assert program.ended() == Ended(0, ["7"], "")
