"""The operations of a server's process in a round."""

import asyncio
import contextlib
import gc
from collections.abc import Mapping

import torch

from aiotensor import ClosedError, TensorReceiver, TensorSender, UsageError
from aiotensor.channel import MessageServer, Request
from verification import inside
from verification.chaos.here import ARENA_BYTES, MAX_MAPPED_BYTES, here
from verification.chaos.journal import Broken, Heard, Replied
from verification.chaos.plan import ANSWERED_BY_SENDER, ASKS_BY_SENDER, SLOTS, Hold, TakerPlan
from verification.chaos.questions import PROBE, Question, Reply, answer_to, messages_at, name_back, wrong_with
from verification.processes.peers import State

__all__ = ["adopt", "close", "heard", "leave", "open_receiver", "settle", "stop", "take"]


class HandlerError(Exception):
    """The error that a question requested."""


class _Answering:
    """The handlers of a server.

    Args:
        server: the server that takes the questions.
        plan: the plan of the round; None to answer without delay.
    """

    def __init__(self, server: MessageServer[Question], plan: TakerPlan | None) -> None:
        self._server = server
        self._plan = plan
        self._kept: list[list[torch.Tensor]] = []
        self._requests: set[asyncio.Task[None]] = set()
        iterators = 1 if plan is None or plan.serves else plan.iterators
        self._takers = [asyncio.create_task(self._take()) for _ in range(iterators)]

    async def _take(self) -> None:
        plan = self._plan
        await asyncio.sleep(0 if plan is None else plan.stuck_ms / 1000)
        if plan is not None and plan.serves:
            with contextlib.suppress(ClosedError):  # closed before it took a question
                await self._server.serve(self._answer, max_concurrent=plan.iterators)
            return
        async for request in self._server:
            task = asyncio.create_task(self._handle(request))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
            del request, task

    async def _handle(self, request: Request[Question]) -> None:
        key = request.message.key
        if request.message.wish == "drop":
            self._look(request.message)
            return
        async with request:
            if await request.reply(await self._answer(request.message)) and key != PROBE:
                here.journal(Replied(key))

    async def _answer(self, question: Question) -> Reply:
        self._look(question)
        plan = self._plan
        if plan is not None and plan.slow_ms:
            await asyncio.sleep(plan.slow_ms / 1000)
        if question.wish != "answer":
            raise HandlerError(question.wish)
        return answer_to(question)

    def _look(self, question: Question) -> None:
        wrong = wrong_with(question)
        if wrong:
            here.journal(Broken(wrong))
        elif question.key != PROBE:
            here.journal(Heard(question.key))
        if self._plan is not None and self._plan.hold is Hold.KEEP:
            self._kept.append(question.tensors)
            asyncio.get_running_loop().call_later(self._plan.hold_ms / 1000, self._kept.pop, 0)

    async def stop(self) -> None:
        """Stop taking questions."""
        while self._server.statistics().in_hand:  # also for one-way messages, which would be lost
            await asyncio.sleep(0.001)
        for task in self._takers:
            task.cancel()
        await self.ended()

    async def ended(self) -> None:
        """Wait until all handlers have ended, and all kept tensors are dropped."""
        for ended in await asyncio.gather(*self._takers, *self._requests, return_exceptions=True):
            if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
                raise ended
        while self._kept:
            await asyncio.sleep(0.001)


class _Ends:
    """The open server of this process."""

    def __init__(self) -> None:
        self.server: MessageServer[Question]
        self.answering: _Answering
        self.stack = contextlib.AsyncExitStack()


_ends = _Ends()


async def open_receiver(state: State, plan: TakerPlan) -> None:
    """Open a server, and answer without delay until `take`."""
    while True:
        async with contextlib.AsyncExitStack() as stack:
            receiver = TensorReceiver(state.endpoint, max_mapped_bytes=MAX_MAPPED_BYTES)
            senders = [TensorSender(name_back(state, slot), 4, ARENA_BYTES) for slot in ANSWERED_BY_SENDER]
            server = MessageServer(
                messages_at(state), Question, receiver=receiver, sender=senders, max_waiting=plan.max_waiting
            )
            try:
                await stack.enter_async_context(receiver)
                for sender in senders:
                    await stack.enter_async_context(sender)
                await stack.enter_async_context(server)
            except (OSError, UsageError):  # this process currently has no descriptors
                await asyncio.sleep(0.005)
                continue
            state.receivers[:] = [receiver]
            state.senders[:] = senders
            adopt(server, stack)
            return


def adopt(server: MessageServer[Question], stack: contextlib.AsyncExitStack) -> None:
    """Take over an open server, with the stack that closes it and its resources; answer without delay."""
    _ends.stack = stack.pop_all()
    _ends.server = server
    _ends.answering = _Answering(server, None)
    here.uses[:] = [server.statistics]


async def close(state: State) -> None:
    """Close the server during its operations."""
    await leave(state)


async def leave(state: State) -> None:
    """Close the server with its senders and receiver."""
    del state
    await _ends.stack.aclose()
    await _ends.answering.ended()


async def take(state: State, plan: TakerPlan, firsts: Mapping[str, int]) -> None:
    """Start answering as planned, until `stop` or `close`."""
    del state, firsts
    await _ends.answering.stop()
    _ends.answering = _Answering(_ends.server, plan)


async def stop(state: State) -> None:
    """Answer without delay from now on."""
    del state
    await _ends.answering.stop()
    _ends.answering = _Answering(_ends.server, None)


async def heard(state: State, sender: str) -> int:
    """Wait until a client is known to be lost, and return its pid."""
    del state
    while any(client.pid == int(sender) for client in inside.clients_of(_ends.server)):
        await asyncio.sleep(0.001)
    return int(sender)


async def settle(state: State) -> list[str]:
    """Wait until nothing is held and all peers are connected, and return the problems of this process."""
    gc.collect()
    server = _ends.server
    while (now := server.statistics()).waiting or now.in_hand or now.clients != SLOTS:
        await asyncio.sleep(0.001)
    for receiver in state.receivers:
        while (got := receiver.statistics()).leases or got.waiting or got.unclaimed_tensors:
            await asyncio.sleep(0.001)
        while receiver.statistics().senders != len(ASKS_BY_SENDER):
            await asyncio.sleep(0.001)
    for sender in state.senders:
        while (sent := sender.statistics()).in_flight or sent.bytes_in_use or sent.waiting:
            await asyncio.sleep(0.001)
    held = (now.waiting_bytes, inside.arriving(server), inside.found(server), len(inside.ready(server)))
    return [] if held == (0, 0, 0, 0) else [f"holds {held} at rest: {now}"]
