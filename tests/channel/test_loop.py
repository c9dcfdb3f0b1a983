"""Nothing that the channel does keeps the event loop for long, whatever is in a message."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from aiotensor.channel import MessageClient, MessageServer
from tests.channel import peers
from tests.channel.parties import Answer, Question, place
from tests.conformance.turns import Turns
from tests.pairs import until
from tests.processes import watch

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_LONGEST_S = 0.005  # promised: no call blocks the loop for longer, whatever the size

MESSAGES: dict[str, Callable[[], list[torch.Tensor]]] = {
    "150 MiB": lambda: [torch.zeros(150 << 20, dtype=torch.uint8)],
    "150 MiB that do not lie flat": lambda: [torch.zeros(150 << 10, 1 << 10, dtype=torch.uint8).t()],
    "150 MiB in pieces that do not lie flat": lambda: [torch.zeros(512, 1024)[:, ::2]] * 150,
    "300 MiB that are not aligned on arrival": lambda: [torch.zeros(300 << 16, dtype=torch.complex128)],
    "three thousand tiny tensors": lambda: [torch.zeros(3)] * 3000,
}


@pytest.mark.parametrize("make", MESSAGES.values(), ids=MESSAGES)
async def test_no_message_keeps_the_loop_busy_for_longer_than_5_ms(
    make: Callable[[], list[torch.Tensor]],
) -> None:
    tensors = make()
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            kept: list[object] = []  # freeing so much takes the kernel a while, and is whoever frees it's own
            longest = []
            for _ in range(2):  # what is done for the first one alone does not count
                with Turns() as turns:
                    asking = asyncio.create_task(client.request(Question(1, more={"x": tensors})))
                    request = await anext(server)
                    kept.append(request)
                    assert len(request.message.more["x"]) == len(tensors)
                    await request.reply(Answer(1))
                    await asking
                longest.append(turns.longest_s)
            assert min(longest) < _LONGEST_S


ANSWERS: dict[str, Callable[[], torch.Tensor]] = {
    "taken": lambda: torch.zeros(300 << 16, dtype=torch.complex128),  # not aligned on arrival, so copied then
    "given up": lambda: torch.zeros(400 << 20, dtype=torch.uint8),
}


@pytest.mark.parametrize("fate", ANSWERS)
async def test_no_answer_keeps_the_loop_busy_for_longer_than_5_ms(fate: str) -> None:
    tensor = ANSWERS[fate]()
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            kept: list[object] = []
            longest = []
            for _ in range(2):
                with Turns() as turns:
                    asking = asyncio.create_task(client.request(Question(1)))
                    request = await anext(server)
                    answering = asyncio.create_task(request.reply(Answer(1, tensor=tensor)))
                    if fate == "taken":
                        kept.append(await asking)
                    else:
                        await until(lambda request=request: request._asked.is_answered)  # type: ignore[misc]
                        asking.cancel()
                    assert await answering
                    later = asyncio.create_task(client.request(Question(2)))
                    await (await anext(server)).reply(Answer(2))
                    assert (await later).seed == 2  # by now the other one has come, too
                longest.append(turns.longest_s)
            assert min(longest) < _LONGEST_S


async def test_an_idle_client_and_its_server_do_nothing() -> None:
    with place() as here:
        async with peers.process(here) as engine, peers.process(here) as api:
            await engine.call(peers.open_server, here)
            await api.call(peers.open_client, here)
            for count in (10, 100_000):
                assert await api.call(peers.ask, 1, count)
            for peer in (api, engine):
                await peer.call(peers.held)
            await asyncio.sleep(0.2)  # what was freed is said to the other side
            before = [(watch.seconds(peer.pid), watch.switches(peer.pid)) for peer in (engine, api)]
            await asyncio.sleep(2)
            for peer, (seconds, switches) in zip((engine, api), before, strict=True):
                assert watch.seconds(peer.pid) - seconds <= 0.011
                assert watch.switches(peer.pid) == switches
