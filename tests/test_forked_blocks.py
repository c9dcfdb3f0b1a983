"""A forked child that leaves a block of its parent's event loop: its exceptions propagate."""

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import NoReturn

import pytest

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Question, place
from tests.forked_blocks import check_told_of_fork
from tests.runtime.test_affinity import forks, in_a_fork

Block = AbstractAsyncContextManager[object]


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


@pytest.mark.promise(23)
@forks
async def test_a_forked_child_leaves_a_block_by_an_exception_only() -> None:
    with place() as here:
        async with (
            TensorReceiver(here) as receiver,
            TensorSender(here) as sender,
            sender.message() as message,
            MessageServer(f"{here}s", Question) as server,
            MessageClient(f"{here}s", Answer) as client,
            client.permit() as permit,
        ):
            asking = asyncio.create_task(client.request(Question(1)))
            async with await anext(server) as request:
                blocks: list[Block] = [receiver, sender, message, server, client, permit, request]
                for block in blocks:
                    for error in (SystemExit(3), KeyboardInterrupt("3"), LookupError("3")):
                        assert in_a_fork(partial(_leave, block, error)) == f"{type(error).__name__}: {error}"
                    check_told_of_fork(in_a_fork(partial(_fall_off, block)))
                await request.answer(Answer(1))
            assert (await asking).seed == 1
