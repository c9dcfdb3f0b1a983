"""The processes that measure: the near one, which reports, and the far ones, which it starts.

The harness starts `near` in a new process. Results are sent through a connection, one message for each
batch; all other output of the processes is written to one file, which is shown if they fail.
"""

import asyncio
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import msgspec

from bench.contenders.base import Contender, Layout, Port, Side
from bench.fork_server import Output, Server, adopt
from bench.records import Batch, Spec
from bench.usage import shared_bytes
from bench.workloads import WORKLOADS
from bench.workloads.base import Barrier, Stage, Workload
from verification.networks import Host, Hosts

_LAST_WORDS_S = 0.3


def near(
    output: Output,
    server: Server,
    contender: Contender,
    spec: Spec,
    folder: Path,
    results: Connection,
    hosts: Hosts | None,
) -> None:
    """Measure and report; runs in a separate process, on the first of the hosts if there are two."""
    del output  # its work was done while it was unpickled
    os.setpgid(0, 0)  # so that this process and its children can be ended together
    _begin(None if hosts is None else hosts.a)
    adopt(server)
    shared_before = shared_bytes()
    workload = WORKLOADS[spec.workload]
    near_side, far_sides = _connect(workload, contender, spec, folder, hosts)
    far_host = None if hosts is None else hosts.b
    ends, processes = [], []
    for number, side in enumerate([] if contender.alone else far_sides):
        near_end, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A daemon ends with this process also when this one fails and the other waits for its next tensor.
        process = multiprocessing.get_context("forkserver").Process(
            target=_far, args=(Output(2), contender, spec, number, side, far_end, far_host), daemon=True
        )
        process.start()
        far_end.close()
        ends.append(near_end)
        processes.append(process)
    follower = Thread(target=_follow, args=(processes,), daemon=True)
    follower.start()
    pids = (os.getpid(), *(process.pid for process in processes if process.pid is not None))

    def stage(port: Any) -> Stage[Any]:
        return Stage(spec, port, Barrier(ends, leads=True), processes=pids, shared_before=shared_before)

    try:
        _run(spec, _report(near_side, stage, _module(contender, workload), results))
    except Exception:  # noqa: BLE001 - any error is printed, and this process ends
        # Printed before the regular exit, which ends the other processes first. The follower may print more.
        traceback.print_exc()
        follower.join(_LAST_WORDS_S)
        os._exit(1)
    follower.join()  # only that thread may wait for the processes: of two, one would get no exit codes


async def _report(
    side: Side[Any], stage_of: Callable[[Any], Stage[Any]], module: ModuleType, results: Connection
) -> None:
    async with _opened(side, stage_of) as stage:
        batches: AsyncIterator[Batch] = module.near(stage)
        async for batch in batches:
            results.send_bytes(msgspec.json.encode(batch))


def _far(
    output: Output,
    contender: Contender,
    spec: Spec,
    number: int,
    side: Side[Any],
    end: socket.socket,
    host: Host | None,
) -> None:
    del output
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        os.setpgid(0, parent.pid)
    _begin(host)
    workload = WORKLOADS[spec.workload]

    async def answer() -> None:
        async with _opened(
            side, lambda port: Stage(spec, port, Barrier([end], leads=False), number)
        ) as stage:
            await _module(contender, workload).far(stage)

    _run(spec, answer())


@asynccontextmanager
async def _opened(side: Side[Any], stage_of: Callable[[Any], Stage[Any]]) -> AsyncIterator[Stage[Any]]:
    async with side() as port:
        stage = stage_of(port)
        # No process sends before all can receive, and none closes while another may still need it.
        await stage.barrier.meet()
        if isinstance(port, Port) and port.connect is not None:
            await port.connect(stage.barrier.meet)
        yield stage
        await stage.barrier.meet()


def _connect(
    workload: Workload, contender: Contender, spec: Spec, folder: Path, hosts: Hosts | None
) -> tuple[Side[Any], Sequence[Side[Any]]]:
    layout = Layout(
        max(spec.peers), spec.depth, workload.both_ways, workload.broadcasts, max(spec.sizes), folder
    )
    if hosts is not None:
        peer, only = (hosts.b, hosts.a) if workload.single_is_near else (hosts.a, hosts.b)
        layout = layout._replace(device=only.device, peer_address=peer.address, single_address=only.address)
    several: Sequence[Side[Any]]
    several, single = importlib.import_module(contender.module).connect(layout, **contender.options)
    if workload.single_is_near:
        return single, several
    (side,) = several
    return side, [single]


def _module(contender: Contender, workload: Workload) -> ModuleType:
    return importlib.import_module(contender.module if contender.drives_itself else workload.module)


def _run(spec: Spec, work: Coroutine[Any, Any, None]) -> None:
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if spec.loop == "uvloop":
        loop_factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(work)


def _follow(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    # A blocking contender would wait forever for a far side that has crashed.
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            if not isinstance(sentinel, int):
                raise TypeError("a sentinel is a descriptor")
            process = running.pop(sentinel)
            process.join()
            if process.exitcode not in (
                0,
                -signal.SIGTERM,
            ):  # the latter when this process is ending, and ends it
                message = f"an answering process ended with exit status {process.exitcode}"
                print(message, file=sys.stderr, flush=True)
                os._exit(1)


def _begin(host: Host | None) -> None:
    """Move this process to its host, and let it end with its parent process."""
    if host is not None:
        host.enter()  # before any thread is started, which would stay where it is
    _end_with_parent()


def _end_with_parent() -> None:
    # No process outlives the harness, even if SIGKILL ends it.
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("this runs only in a process that another one has started")

    def follow() -> None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)  # with all processes that a contender has started

    Thread(target=follow, daemon=True).start()
