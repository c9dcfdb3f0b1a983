"""A parent that sends to its child over a stock queue, for tests that read the output of both."""

import asyncio
import multiprocessing
import os
import signal
import sys
from typing import Any

import torch

from aiotensor import PeerLostError, TensorReceiver, TensorSender
from aiotensor.transports.stock.pipe import StockQueue
from tests.pairs import beyond
from verification.patterns import BIG, pattern

_COUNTS = (3, BIG)

# An object that is still in a module when the interpreter ends.
left_open: list[TensorSender] = []


def _say(*words: object) -> None:
    print(*words, flush=True)


async def _receive(queue: StockQueue, *, loses: bool) -> None:
    async with TensorReceiver(queue) as receiver:
        deliveries = [await anext(receiver) for _ in _COUNTS]
        for seed, delivery in enumerate(deliveries):
            _say(torch.equal(delivery.tensor, pattern(seed, _COUNTS[seed])))
        last = deliveries.pop().handle
        deliveries.clear()
        if loses:
            try:
                await receiver.receive(beyond(last))
            except PeerLostError:
                _say("lost")


def receive(queue: StockQueue, loses: bool) -> None:
    """Receive the tensors, and perhaps wait for the loss of their sender."""
    asyncio.run(_receive(queue, loses=loses))


async def _send(queue: StockQueue) -> None:
    left_open.append(await TensorSender(queue).__aenter__())
    for seed, count in enumerate(_COUNTS):
        await left_open[0].send(pattern(seed, count))
    await left_open[0].drain()


def main(method: str, end: str) -> None:
    """Send from a parent to its child.

    Args:
        method: the start method of the child.
        end: how this process ends, with an open sender: "exit" or "kill".
    """
    context: Any = multiprocessing.get_context(method)
    queue: StockQueue = context.Queue()
    child = context.Process(target=receive, args=(queue, end == "kill"))
    child.start()
    asyncio.run(_send(queue))
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    child.join()
    _say("status", child.exitcode)


if __name__ == "__main__":
    from tests.processes import stock_program  # whose functions the child can find by their module

    stock_program.main(*sys.argv[1:])
