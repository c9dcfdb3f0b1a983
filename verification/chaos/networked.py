"""The clients and engines that processes open when a network is between them.

Otherwise they behave like clients and servers on one host: `asking.py`, `answering.py`.
"""

import contextlib
from collections.abc import Sequence

from aiotensor.channel import MessageClient, MessageServer
from verification.chaos import answering, asking
from verification.chaos.asking import begin_round, probe, send_all, told
from verification.chaos.here import here
from verification.chaos.plan import SenderPlan, TakerPlan
from verification.chaos.questions import Question, Reply
from verification.processes.peers import State

__all__ = [
    "begin_round",
    "know",
    "open_receiver",
    "open_sender",
    "probe",
    "reopen",
    "send_all",
    "told",
]


async def know(state: State, addresses: Sequence[str], engine: int | None) -> None:
    """Give a process the addresses of the engines, and its own number if it is an engine."""
    state.others.update(addresses=addresses, engine=engine)


async def open_sender(state: State, plan: SenderPlan) -> str:
    """Open a client of all engines, which sends tensors inside the messages."""
    client = MessageClient(
        state.others["addresses"], reply_type=Reply, high_water_mark=plan.permits, **here.arguments
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(client)
        return asking.adopt(client, stack)


async def reopen(state: State, plan: SenderPlan) -> str:
    """Close the client during its requests, and open another."""
    await asking.close(state)
    return await open_sender(state, plan)


async def open_receiver(state: State, plan: TakerPlan) -> None:
    """Open an engine, and answer immediately until `answering.take`."""
    address = state.others["addresses"][state.others["engine"]]
    server = MessageServer(address, Question, max_waiting=plan.max_waiting, **here.arguments)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        answering.adopt(server, stack)
