"""Functions of the engine process of these servers."""

import asyncio

from aiotensor import TensorHandle, TensorReceiver
from aiotensor.channel import MessageServer
from aiotensor.types import ReceiverStatistics, ServerStatistics
from tests.integrations.totals import Numbers, Total
from verification.processes.peers import State

__all__ = ["held", "open_engine", "serve", "slow_down", "take"]


async def open_engine(state: State, messages: str) -> None:
    """Open both ends, and answer nothing yet."""
    receiver = await state.stack.enter_async_context(TensorReceiver(state.endpoint))
    server = MessageServer(messages, Numbers, receiver=receiver)
    await state.stack.enter_async_context(server)
    state.others |= {"receiver": receiver, "server": server, "pace": 0.0}


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


async def held(state: State) -> tuple[ReceiverStatistics, ServerStatistics]:
    """Return the statistics of the engine."""
    return state.others["receiver"].statistics(), state.others["server"].statistics()


async def take(state: State, handle: TensorHandle) -> int:
    """Take a tensor that was left here, and add it up."""
    receiver: TensorReceiver = state.others["receiver"]
    return int((await receiver.receive(handle)).sum())
