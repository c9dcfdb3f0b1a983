"""Functions of the engine process of these servers."""

import asyncio

from aiotensor.channel import MessageServer
from aiotensor.types import ServerStatistics
from tests.integrations.totals import Numbers, Total
from verification.processes.peers import State


async def open_engine(state: State) -> None:
    """Open the server, and answer nothing yet."""
    server = MessageServer(state.endpoint, Numbers)
    await state.stack.enter_async_context(server)
    state.others |= {"server": server, "pace": 0.0}


async def slow_down(state: State, seconds: float) -> None:
    """Make each answer take this many seconds."""
    state.others["pace"] = seconds


async def serve(state: State, max_concurrent: int) -> None:
    """Begin to answer."""

    async def answer(message: Numbers) -> Total:
        await asyncio.sleep(state.others["pace"])  # the work of the model
        return Total(int(message.values.sum()))

    server: MessageServer[Numbers] = state.others["server"]
    state.others["serving"] = asyncio.create_task(server.serve(answer, max_concurrent=max_concurrent))


async def held(state: State) -> ServerStatistics:
    """Return the statistics of the engine."""
    server: MessageServer[Numbers] = state.others["server"]
    return server.statistics()
