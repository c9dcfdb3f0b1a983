"""Errors while the blocks of freed tensors are released."""

import asyncio
from typing import Any

from tests.pairs import pair
from verification.internals import senders_of
from verification.patterns import pattern
from verification.waiting import until

LARGE = 100_000  # elements, which are placed in shared memory


async def test_an_error_while_releasing_a_tensor_does_not_end_the_answers() -> None:
    errors: list[object] = []

    def fail(block: int) -> None:
        raise ZeroDivisionError

    def handle_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        errors.append(context["exception"])

    asyncio.get_running_loop().set_exception_handler(handle_error)
    async with pair() as (sender, receiver):
        tensor = await receiver.receive(await sender.send(pattern(1, LARGE)))
        [peer] = senders_of(receiver).connected.values()
        peer.memory.release = fail
        handle = await sender.send(pattern(2, 3))
        await receiver.arrived(handle)
        await receiver.receive(handle)  # schedules the answer; the release follows in the same iteration
        del tensor
        await until(lambda: bool(errors))
        assert isinstance(errors[0], ZeroDivisionError)

        await sender.drain()
        await receiver.receive(await sender.send(pattern(3, 3)))
        await sender.drain()
