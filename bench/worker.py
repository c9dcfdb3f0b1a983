"""One contender in its own processes: this one, which times, and the one it spawns, which answers.

The harness starts it with two arguments, the module of the contender and a `Spec` in JSON. It writes
one line of JSON for each batch.
"""

import asyncio
import ctypes
import importlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from multiprocessing.connection import wait
from threading import Thread
from types import ModuleType
from typing import Any, BinaryIO

import msgspec

from bench.contenders.base import Side
from bench.records import Spec
from bench.workloads import WORKLOADS
from bench.workloads.base import Barrier

_PR_SET_PDEATHSIG = 1


def main() -> None:
    _die_with_parent()
    results = _take_over_standard_output()
    spec = msgspec.json.decode(sys.argv[2], type=Spec)
    near, far = importlib.import_module(sys.argv[1]).pair()
    near_road, far_road = socket.socketpair()
    # A daemon ends with this process also when this one fails and the other waits for its next tensor.
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_answer, args=(spec, far, far_road), daemon=True)
    process.start()
    far_road.close()
    follower = Thread(target=_follow, args=(process,), daemon=True)
    follower.start()
    _run(spec, _near(spec, near, Barrier(near_road), results))
    follower.join()  # only that thread may wait for the process: of two, one would not learn how it ended


async def _near(spec: Spec, side: Side, barrier: Barrier, results: BinaryIO) -> None:
    async with side.open() as port:
        async for batch in _workload(spec).near(port, barrier, spec):
            results.write(msgspec.json.encode(batch) + b"\n")
            results.flush()
        # Neither side closes while the other may still need it, for instance to fetch a file descriptor.
        await barrier.meet()


def _answer(spec: Spec, side: Side, road: socket.socket) -> None:
    _die_with_parent()
    _run(spec, _far(spec, side, Barrier(road)))


async def _far(spec: Spec, side: Side, barrier: Barrier) -> None:
    async with side.open() as port:
        await _workload(spec).far(port, barrier, spec)
        await barrier.meet()


def _workload(spec: Spec) -> ModuleType:
    return importlib.import_module(WORKLOADS[spec.workload])


def _run(spec: Spec, work: Coroutine[Any, Any, None]) -> None:
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if spec.loop == "uvloop":
        loop_factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(work)


def _follow(process: multiprocessing.process.BaseProcess) -> None:
    # A blocking contender would wait for ever for a far side that has crashed.
    wait([process.sentinel])
    process.join()
    if process.exitcode not in (0, -signal.SIGTERM):  # the latter when this process is ending, and ends it
        print(f"the answering process ended with exit status {process.exitcode}", file=sys.stderr, flush=True)
        os._exit(1)


def _die_with_parent() -> None:
    # Whatever ends the harness, even SIGKILL, leaves no process behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_over_standard_output() -> BinaryIO:
    # Whatever else writes to standard output, here or in the spawned process, must not mix with results.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return results


if __name__ == "__main__":
    main()
