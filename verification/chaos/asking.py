"""The operations of a client's process in a round."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from functools import partial

import torch

from aiotensor import PeerLostError, RefusedError, TensorReceiver, TensorSender, UsageError
from aiotensor.channel import MessageClient
from verification import inside
from verification.chaos.here import ARENA_BYTES, here
from verification.chaos.journal import Broken
from verification.chaos.plan import ANSWERED_BY_SENDER, ASKS_BY_SENDER, Order, SenderPlan
from verification.chaos.questions import PROBE, Question, Reply, is_answer, messages_at, name_back
from verification.chaos.working import Work
from verification.patterns import pattern
from verification.processes.peers import State

__all__ = [
    "adopt",
    "begin_round",
    "close",
    "leave",
    "open_sender",
    "probe",
    "reopen",
    "send_all",
    "settle",
    "told",
]

_LARGE = 50_000  # elements: a sender carries it, if there is one


class _Ends:
    """The open client of this process."""

    def __init__(self) -> None:
        self.is_open = False
        self.client: MessageClient[Reply]
        self.losses = 0  # of clients that were closed
        self.stack = contextlib.AsyncExitStack()


_ends = _Ends()


async def open_sender(state: State, plan: SenderPlan) -> str:
    """Open a client, with its sender and receiver for tensors; the previous client must be closed."""
    sender = receiver = None
    while True:
        async with contextlib.AsyncExitStack() as stack:
            try:
                if plan.slot in ANSWERED_BY_SENDER:
                    receiver = TensorReceiver(name_back(state, plan.slot))
                    await stack.enter_async_context(receiver)
                if plan.slot in ASKS_BY_SENDER:
                    sender = TensorSender(
                        state.endpoint, plan.permits, ARENA_BYTES, keep_warm_s=plan.keep_warm_s
                    )
                    await stack.enter_async_context(sender)
                client = MessageClient(
                    messages_at(state),
                    sender=sender,
                    receiver=receiver,
                    reply_type=Reply,
                    high_water_mark=plan.permits,
                )
                await stack.enter_async_context(client)
            except (OSError, UsageError):  # this process currently has no descriptors
                await asyncio.sleep(0.005)
                continue
            state.senders[:] = [] if sender is None else [sender]
            state.receivers[:] = [] if receiver is None else [receiver]
            return adopt(client, stack)


def adopt(client: MessageClient[Reply], stack: contextlib.AsyncExitStack) -> str:
    """Take over an open client, with the stack that closes it and its resources; return its name."""
    _ends.client, _ends.is_open = client, True
    _ends.stack = stack.pop_all()
    here.uses[:] = [client.statistics, partial(_begin, client)]
    return str(os.getpid())


def _begin(client: MessageClient[Reply]) -> None:
    """Start a request, up to its first wait."""
    asking = client.request(Question(PROBE, "answer", ()))
    try:
        asking.send(None)
    finally:
        asking.close()


async def leave(state: State) -> None:
    """Close the client with its sender and receiver."""
    del state
    await _ends.stack.aclose()


async def reopen(state: State, plan: SenderPlan) -> str:
    """Close the client during its requests, and open another."""
    await close(state)
    return await open_sender(state, plan)


async def close(state: State) -> None:
    """Close the client during its requests."""
    losses = _losses(state)
    await leave(state)
    _ends.losses = losses


def _losses(state: State) -> int:
    del state
    return _ends.losses + (_ends.client.statistics().servers_lost if _ends.is_open else 0)


def _held(state: State) -> int:
    """Count the operations that wait for the next server."""
    waiting = inside.waiters_for_server(_ends.client)
    for sender in state.senders:
        statistics = sender.statistics()
        waiting += statistics.in_flight + statistics.waiting
    return waiting


async def begin_round(state: State) -> None:
    """Forget the last round."""
    _work.begin(state)


async def send_all(state: State, plan: SenderPlan, part: int, *, pauses: bool) -> None:
    """Carry out the orders of a part; see `Work.run`."""
    await _work.run(state, plan, part, pauses=pauses)


async def told(state: State) -> int:
    """Wait until the loss of a server has ended every request; see `Work.told`."""
    return await _work.told(state)


async def _carry_out(state: State, order: Order, sources: Sequence[torch.Tensor]) -> None:
    await _work.account(order, _ask(state, order, sources))


async def _ask(state: State, order: Order, sources: Sequence[torch.Tensor]) -> None:
    client = _ends.client
    question = Question(order.key, order.wish, order.answer, list(sources))
    if order.how == "one-way":
        await client.send(question, target=order.target)
        return
    if order.how == "inside" and state.senders:
        async with state.sender.message() as message:
            await _work.pause(state)
            reply = await client.request(question, inside=message)
    else:
        reply = await client.request(question, target=order.target)
    if not is_answer(reply, question):
        here.journal(Broken(f"question {order.key} was answered as {reply.key}: {reply.tensors}"))


async def probe(state: State) -> None:
    """Wait until every server has answered a request and its sender has connected."""
    servers = len(_ends.client.statistics().in_flight)
    await asyncio.gather(*(_probe(state, target) for target in range(servers)))


async def _probe(state: State, target: int) -> None:
    sizes = (_LARGE, 3)
    question = Question(PROBE, "answer", sizes, [pattern(PROBE + i, n) for i, n in enumerate(sizes)])
    is_answered = False
    # A refused sender, for example for lack of a descriptor, connects again with a later answer.
    while not is_answered or any(receiver.statistics().senders != 1 for receiver in state.receivers):
        with contextlib.suppress(PeerLostError, RefusedError):
            is_answered = is_answer(await _ends.client.request(question, target=target), question)
            if not is_answered:
                here.journal(Broken("a probe was not answered as it should be"))
        await asyncio.sleep(0.001)


async def settle(state: State) -> list[str]:
    """Wait until nothing is held, and return the problems with the state of this process."""
    client = _ends.client
    while any(client.statistics().in_flight):
        await asyncio.sleep(0.001)
    for sender in state.senders:
        while (sent := sender.statistics()).in_flight or sent.bytes_in_use or sent.waiting:
            await asyncio.sleep(0.001)
    for receiver in state.receivers:
        while (got := receiver.statistics()).leases or got.waiting or got.unclaimed_tensors:
            await asyncio.sleep(0.001)
    now = client.statistics()
    wrong = [] if now.servers == len(now.in_flight) else [f"has lost a server: {now}"]
    if inside.unanswered(client) or inside.unsent(client):
        wrong.append(f"holds something at rest: {now}")
    return wrong


_work = Work(_losses, _held, _carry_out)
