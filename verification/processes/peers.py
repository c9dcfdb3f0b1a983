"""Child processes that run coroutine functions for their parent, and return the results."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from aiotensor import TensorHandle, TensorReceiver, TensorSender
from aiotensor.transports.endpoints import Endpoint
from verification import loops
from verification.patterns import pattern
from verification.processes import watch
from verification.waiting import until

P = ParamSpec("P")
R = TypeVar("R")

# Children are forked from a server with the slow imports, including that of test modules: pytest.
contexts: dict[str, SpawnContext | ForkServerContext] = {
    "spawn": multiprocessing.get_context("spawn"),
    "forkserver": multiprocessing.get_context("forkserver"),
}
contexts["forkserver"].set_forkserver_preload(["pytest", "verification.processes.peers"])


@dataclass
class State:
    """The state of a child process between calls."""

    endpoint: Endpoint
    senders: list[TensorSender] = field(default_factory=list)
    receivers: list[TensorReceiver] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    handles: list[TensorHandle] = field(default_factory=list)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)  # further objects to close at the end
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def sender(self) -> TensorSender:
        return self.senders[-1]

    @property
    def receiver(self) -> TensorReceiver:
        return self.receivers[-1]


class Peer:
    """A child process, as seen by its parent.

    Args:
        endpoint: the endpoint of its senders and receivers.
        method: the start method of multiprocessing.
        kind: its event loop; None for the kind of the running loop.
        first: called in the child before everything else, for example to enter a network.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        method: str = "forkserver",
        kind: loops.Kind | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        context, loop = contexts[method], asyncio.get_running_loop()
        self._connection, theirs = context.Pipe()
        self.process = context.Process(
            target=main, args=(endpoint, theirs, kind or loops.kind_of(loop), first), daemon=True
        )
        self.process.start()
        theirs.close()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._gone: asyncio.Future[None] | None = None
        loop.add_reader(self._connection.fileno(), self._answered)

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    def start(
        self, work: Callable[Concatenate[State, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> "asyncio.Future[R]":
        """Start a coroutine function in the child."""
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._connection.send((number, work, args, kwargs))
        return future

    async def call(
        self, work: Callable[Concatenate[State, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a coroutine function in the child, and return its result or raise its error."""
        return await self.start(work, *args, **kwargs)

    def kill(self) -> None:
        """End the child as the kernel would when memory runs out."""
        os.kill(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the child: it does nothing until `go_on` continues it."""
        os.kill(self.pid, signal.SIGSTOP)
        await until(lambda: watch.is_stopped(self.pid))

    def go_on(self) -> None:
        """Continue a stopped child, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    async def ended(self) -> int | None:
        """Wait for the end of the child, and return its exit status."""
        # Not by a join in a thread: starting a process polls all other children, and of two threads that poll
        # a child that has ended, the second gets no status and reports 255.
        if self._gone is None:
            loop = asyncio.get_running_loop()
            self._gone = loop.create_future()
            loop.add_reader(self.process.sentinel, self._has_gone)
        await asyncio.shield(self._gone)
        self.process.join()
        return self.process.exitcode

    def _has_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self.process.sentinel)
        if self._gone is not None:
            self._gone.set_result(None)

    async def finish(self) -> int | None:
        """End the child normally, and return its exit status."""
        self._connection.send(None)
        return await self.ended()

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._connection.fileno())
        with contextlib.suppress(ProcessLookupError):  # it may have ended a moment ago
            if self.process.is_alive():
                self.kill()
        await self.ended()
        self._connection.close()
        self.process.close()
        for future in self._answers.values():
            future.cancel()

    def _answered(self) -> None:
        try:
            number, result, error = self._connection.recv()
        except (EOFError, ConnectionResetError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(ConnectionError("the peer process ended"))
                    future.exception()  # a caller that killed it need not retrieve the error
            return
        future = self._answers.pop(number)
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


@asynccontextmanager
async def peers(
    endpoint: Endpoint, count: int, method: str = "forkserver", first: Callable[[], None] | None = None
) -> AsyncIterator[list[Peer]]:
    """Start children, and end them when the block ends; the arguments are those of `Peer`."""
    started: list[Peer] = []
    try:
        for _ in range(count):
            started.append(Peer(endpoint, method=method, first=first))
        yield started
    finally:
        for peer in started:
            await peer.close()


def main(
    endpoint: Endpoint, connection: Connection, kind: loops.Kind, first: Callable[[], None] | None = None
) -> None:
    if first is not None:
        first()
    torch.set_num_threads(1)
    gc.freeze()  # collections skip the imported modules, which take a tenth of a second each time
    with loops.complaints() as complaints, asyncio.Runner(loop_factory=kind.make) as runner:
        runner.run(_serve(State(endpoint), connection, complaints))


async def _serve(state: State, connection: Connection, complaints: list[str]) -> None:
    loop = asyncio.get_running_loop()
    finished = loop.create_future()
    running: set[asyncio.Task[None]] = set()

    def receive() -> None:
        try:
            request = connection.recv()
        except EOFError:
            request = None
        if request is None:
            loop.remove_reader(connection.fileno())
            finished.set_result(None)
            return
        task = loop.create_task(_answer(state, connection, complaints, *request))
        running.add(task)
        task.add_done_callback(running.discard)

    loop.add_reader(connection.fileno(), receive)
    await finished
    state.tensors.clear()
    await state.stack.aclose()
    for sender in state.senders:
        await sender.aclose()
    for receiver in state.receivers:
        await receiver.aclose()


async def _answer(
    state: State,
    connection: Connection,
    complaints: list[str],
    number: int,
    work: Callable[..., Awaitable[object]],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    try:
        result = await work(state, *args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        connection.send((number, None, error))
    else:
        # The loop only logs its complaints, which would be overlooked.
        wrong = AssertionError("\n".join(complaints)) if complaints else None
        connection.send((number, result, wrong))


# The most common functions to run in a child.


async def open_sender(state: State, max_concurrent_videos: int = 8, arena_bytes: int = 1 << 30) -> str:
    sender = TensorSender(state.endpoint, max_concurrent_videos, arena_bytes)
    await sender.__aenter__()
    state.senders.append(sender)
    return sender.id


async def open_receiver(state: State) -> None:
    receiver = TensorReceiver(state.endpoint)
    await receiver.__aenter__()
    state.receivers.append(receiver)


async def send_pattern(state: State, seed: int, count: int) -> TensorHandle:
    return await state.sender.send(pattern(seed, count))


async def receive_pattern(state: State, handle: TensorHandle, seed: int, *, keep: bool = False) -> bool:
    tensor = await state.receiver.receive(handle)
    if keep:
        state.tensors.append(tensor)
    return torch.equal(tensor, pattern(seed, tensor.numel()))


async def forget_tensors(state: State) -> None:
    state.tensors.clear()


async def close_sender(state: State) -> None:
    await state.sender.aclose()


async def close_receiver(state: State) -> None:
    await state.receiver.aclose()


async def fork_and_sleep(state: State) -> int:
    """Fork, and return the pid of the child, which lives until it is killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the purpose
        child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    return child


async def drain(state: State) -> None:
    await state.sender.drain()
