"""A forked child that leaves a block of its parent's event loop: its exceptions propagate."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import NoReturn

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Place, Question, place
from tests.forked_blocks import by_each_exception, check_told_of_fork, in_each_block_of
from tests.runtime.test_affinity import forks, in_a_fork

pytestmark = forks

Block = AbstractAsyncContextManager[object]


@asynccontextmanager
async def _sender(here: Place) -> AsyncIterator[Block]:
    async with TensorReceiver(here.tensors), TensorSender(here.tensors) as sender:
        yield sender


@asynccontextmanager
async def _receiver(here: Place) -> AsyncIterator[Block]:
    async with TensorReceiver(here.tensors) as receiver:
        yield receiver


@asynccontextmanager
async def _message(here: Place) -> AsyncIterator[Block]:
    async with (
        TensorReceiver(here.tensors),
        TensorSender(here.tensors) as sender,
        sender.message() as message,
    ):
        yield message


@asynccontextmanager
async def _client(here: Place) -> AsyncIterator[Block]:
    async with MessageClient(here.messages, reply_type=Answer) as client:
        yield client


@asynccontextmanager
async def _server(here: Place) -> AsyncIterator[Block]:
    async with MessageServer(here.messages, Question) as server:
        yield server


@asynccontextmanager
async def _request(here: Place) -> AsyncIterator[Block]:
    async with (
        MessageServer(here.messages, Question) as server,
        MessageClient(here.messages, reply_type=Answer) as client,
    ):
        asking = asyncio.create_task(client.request(Question(1)))
        async with await anext(server) as request:
            yield request
            await request.reply(Answer(1))
        assert (await asking).seed == 1


each_block = in_each_block_of(_sender, _receiver, _message, _client, _server, _request)


def _leave(block: Block, error: BaseException) -> None:
    async def leave() -> NoReturn:
        async with AsyncExitStack() as stack:
            stack.push_async_exit(block)  # which the parent has entered
            raise error
        raise AssertionError("the block kept the exception")

    leave().send(None)  # nothing in it may wait: a child has no event loop


def _fall_off(block: Block) -> None:
    async def leave() -> None:
        await block.__aexit__(None, None, None)

    leave().send(None)


@by_each_exception
@each_block
async def test_an_exception_in_a_forked_child_propagates_out_of_the_block(
    make: Callable[[Place], AbstractAsyncContextManager[Block]], error: BaseException
) -> None:
    with place() as here:
        async with make(here) as entered:
            assert in_a_fork(partial(_leave, entered, error)) == f"{type(error).__name__}: {error}"


@each_block
async def test_a_forked_child_that_reaches_the_end_of_a_block_raises_usage_error(
    make: Callable[[Place], AbstractAsyncContextManager[Block]],
) -> None:
    with place() as here:
        async with make(here) as entered:
            check_told_of_fork(in_a_fork(partial(_fall_off, entered)))
