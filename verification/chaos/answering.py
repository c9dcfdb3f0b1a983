"""The operations of a server's process in a round."""

import asyncio
import contextlib
from functools import partial

from aiotensor import ClosedError, UsageError
from aiotensor.channel import MessageServer, Request
from verification import inside
from verification.chaos.here import ARENA_BYTES, MAX_MAPPED_BYTES, Kept, at_rest, here, opened, until
from verification.chaos.journal import AnswerSent, Broken, Heard
from verification.chaos.plan import SLOTS, Hold, TakerPlan
from verification.chaos.questions import PROBE, Answer, Question, answer_to, wrong_with
from verification.processes.peers import State


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
        self._kept = None if plan is None or plan.hold is Hold.CYCLE else Kept(plan)
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
            if await request.answer(await self._answer(request.message)) and key != PROBE:
                here.journal(AnswerSent(key))

    async def _answer(self, question: Question) -> Answer:
        self._look(question)
        plan = self._plan
        if plan is not None and plan.slow_ms:
            await asyncio.sleep(plan.slow_ms / 1000)
        if question.wish not in ("answer", "echo"):
            raise HandlerError(question.wish)
        return answer_to(question)

    def _look(self, question: Question) -> None:
        wrong = wrong_with(question)
        if wrong:
            here.journal(Broken(wrong))
        elif question.key != PROBE:
            here.journal(Heard(question.key))
        if self._kept is not None and not wrong:
            for index, tensor in enumerate(question.tensors):
                self._kept.add(tensor, question.key + index)

    async def stop(self) -> None:
        """Stop taking questions."""
        await until(lambda: not self._server.statistics().in_hand)  # one-way messages would be lost
        for task in self._takers:
            task.cancel()
        await self.ended()

    async def ended(self) -> None:
        """Wait until all handlers have ended, and all kept tensors are dropped."""
        for ended in await asyncio.gather(*self._takers, *self._requests, return_exceptions=True):
            if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
                raise ended
        if self._kept is not None:
            await self._kept.dropped()


class _Open:
    """The server of this process."""

    server: MessageServer[Question]
    answering: _Answering


_open = _Open()


async def open_receiver(state: State, plan: TakerPlan) -> None:
    """Open a server, and answer without delay until `take`."""
    limits = {"max_waiting": plan.max_waiting, "max_mapped_bytes": MAX_MAPPED_BYTES, **here.arguments}
    address = here.addresses[plan.number]
    server = await opened(
        lambda: MessageServer(address, Question, arena_bytes=ARENA_BYTES, **limits), (OSError, UsageError)
    )
    _open.server, _open.answering = server, _Answering(server, None)


async def close(state: State) -> None:
    """Close the server during its operations."""
    await _open.server.aclose()
    await _open.answering.ended()


async def take(state: State, plan: TakerPlan) -> None:
    """Start answering as planned, until `stop` or `close`."""
    await _open.answering.stop()
    _open.answering = _Answering(_open.server, plan)


async def stop(state: State) -> None:
    """Answer without delay from now on."""
    await _open.answering.stop()
    _open.answering = _Answering(_open.server, None)


async def lost(state: State, pid: int) -> None:
    """Wait until the server has lost its connection to a client that has ended."""
    await until(lambda: all(client.pid != pid for client in inside.clients_of(_open.server)))


async def settle(state: State) -> list[str]:
    """Wait until nothing is held and all clients are connected, and return the problems of this process."""
    server = _open.server
    await until(lambda: server.statistics().clients == SLOTS)
    wrong = await at_rest(partial(inside.held_by_server, server))
    now = server.statistics()
    if now.mapped_bytes != SLOTS * ARENA_BYTES or now.waiting or now.in_hand or now.leases:
        wrong.append(f"is not at rest: {now}")
    return wrong
