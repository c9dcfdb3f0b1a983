"""The operations of a client's process in a round."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from functools import partial

import torch

from aiotensor import PeerLostError, RefusedError
from aiotensor.channel import MessageClient
from verification import inside
from verification.chaos.here import ARENA_BYTES, account, at_rest, here, opened, until
from verification.chaos.journal import Broken
from verification.chaos.plan import Order, SenderPlan
from verification.chaos.questions import PROBE, Answer, Question, is_answer
from verification.patterns import pattern
from verification.processes.peers import State

_PROBE_SIZES = (50_000, 3)  # elements


class _Open:
    """The client of this process."""

    client: MessageClient[Answer]


_open = _Open()


async def open_sender(state: State, plan: SenderPlan) -> str:
    """Open a client of all servers; the previous client must be closed."""
    arguments = plan.permits, ARENA_BYTES
    _open.client = await opened(lambda: MessageClient(here.addresses, Answer, *arguments, **here.arguments))
    return str(os.getpid())


async def leave(state: State) -> None:
    """Close the client during its requests."""
    await _open.client.aclose()


async def reopen(state: State, plan: SenderPlan) -> str:
    """Close the client during its requests, and open another."""
    await leave(state)
    return await open_sender(state, plan)


async def lost(state: State, pid: int) -> None:
    """Wait until the client has lost its connection to a server that has ended."""
    await until(lambda: all(session.pid != pid for session in inside.sessions_of(_open.client)))


async def carry_out(state: State, order: Order, sources: Sequence[torch.Tensor]) -> None:
    """Carry out an order; see `here.carry_out_all`."""
    await account(order, _ask(order, list(sources)))
    now = _open.client.statistics()
    if now.peak_in_flight > now.max_concurrent_videos or now.peak_bytes_in_use > now.arena_bytes:
        here.journal(Broken(f"more permits or bytes in use than there are: {now}"))


async def _ask(order: Order, tensors: list[torch.Tensor]) -> None:
    client, target = _open.client, order.target
    if order.how == "inside":
        async with client.permit() as permit:
            for index, source in enumerate(tensors):
                tensors[index] = (await permit.allocate(source.shape, source.dtype)).copy_(source)
            question = Question(order.key, order.wish, order.answer, tensors)
            answer = await client.request(question, target=target, inside=permit)
    else:
        question = Question(order.key, order.wish, order.answer, tensors)
        if order.how == "one-way":
            await client.send(question, target=target)
            return
        answer = await client.request(question, target=target, idempotent=order.how == "idempotent")
    if not is_answer(answer, question):
        here.journal(Broken(f"question {order.key} was answered as {answer.key}: {answer.tensors}"))


async def probe(state: State) -> None:
    """Wait until every server has answered a request with tensors."""
    await asyncio.gather(*(_probe(target) for target in range(len(here.addresses))))


async def _probe(target: int) -> None:
    sizes = _PROBE_SIZES
    while True:
        question = Question(PROBE, "answer", sizes, [pattern(PROBE + i, n) for i, n in enumerate(sizes)])
        with contextlib.suppress(PeerLostError, RefusedError):
            answer = await _open.client.request(question, target=target)
            if not is_answer(answer, question):
                here.journal(Broken("a probe was not answered as it should be"))
            return
        await asyncio.sleep(0.001)


async def settle(state: State) -> list[str]:
    """Wait until nothing is held, and return the problems with the state of this process."""
    wrong = await at_rest(partial(inside.held_by_client, _open.client))
    now = _open.client.statistics()
    if now.servers != len(here.addresses) or now.in_flight or now.waiting or now.bytes_in_use or now.holders:
        wrong.append(f"is not at rest: {now}")
    return wrong
