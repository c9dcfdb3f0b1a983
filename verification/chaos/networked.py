"""The clients and engines that processes open when a network is between them.

Otherwise they behave like clients and servers on one host: `asking.py`, `answering.py`.
"""

import contextlib
from typing import Any

from aiotensor.channel import MessageClient, MessageServer
from verification.chaos import answering, asking
from verification.chaos.asking import begin_round, probe, send_all, told
from verification.chaos.network import Places
from verification.chaos.pauses import Pauses
from verification.chaos.plan import SenderPlan, TakerPlan
from verification.chaos.questions import Question, Reply
from verification.processes.peers import State

__all__ = [
    "begin_round",
    "know",
    "open_receiver",
    "open_sender",
    "paused_s",
    "probe",
    "reopen",
    "send_all",
    "told",
]


# With this many busy processes, a living peer may be silent for longer than the default timeout.
_HEARTBEATS: dict[str, Any] = {"heartbeat_interval_s": 0.25, "heartbeat_timeout_s": 2.0}


async def know(state: State, places: Places, engine: int | None) -> None:
    """Give a process the places of the engines, and its own number if it is an engine."""
    state.others.update(places=places, engine=engine, pauses=Pauses())


async def paused_s(state: State) -> float:
    """Return the longest pause of the process since the last call."""
    pauses: Pauses = state.others["pauses"]
    return pauses.longest_s()


async def open_sender(state: State, plan: SenderPlan) -> str:
    """Open a client of all engines, which sends tensors inside the messages."""
    places: Places = state.others["places"]
    client = MessageClient(
        places.addresses,
        reply_type=Reply,
        high_water_mark=plan.permits,
        **places.keys_of_client(),
        **_HEARTBEATS,
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
    places: Places = state.others["places"]
    server = MessageServer(
        places.addresses[state.others["engine"]],
        Question,
        max_waiting=plan.max_waiting,
        **places.keys_of_engine(),
        **_HEARTBEATS,
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        answering.adopt(server, stack)
