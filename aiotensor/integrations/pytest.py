"""Fixtures of pytest for applications that send tensors to an engine. Requires pytest 8 or later.

    pytest_plugins = ["aiotensor.integrations.pytest"]  # in conftest.py

docs/guide.md describes the fixtures. The package has no entry point for pytest: pytest would then import
torch at the start of every run in the environment, including runs that test other projects.
"""

import asyncio
import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import anyio
import anyio.abc
import anyio.from_thread
import anyio.to_thread

from aiotensor.integrations import not_installed

try:
    import pytest
except ModuleNotFoundError as error:
    raise not_installed(error, __name__) from None

from aiotensor.channel import MessageServer, Request
from aiotensor.errors import UsageError

__all__ = [
    "Engine",
    "StartEngine",
    "engine_address",
    "socket_folder",
    "tensor_engine",
]

M = TypeVar("M")


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Return an empty folder for sockets, which is removed after the test.

    The path of a socket may have at most 107 bytes, which the folders of `tmp_path` can exceed.
    """
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as path:
        yield Path(path)


@pytest.fixture
def engine_address(socket_folder: Path) -> str:
    """Return a ``unix://`` address at which no engine runs yet."""
    return f"unix://{socket_folder}/engine.sock"


StartEngine: TypeAlias = "Callable[..., Engine[Any]]"
"""The type of the fixture `tensor_engine`."""


@pytest.fixture
def tensor_engine(engine_address: str) -> Iterator[StartEngine]:
    """Return a function that starts an engine at `engine_address`.

    For example, ``engine = tensor_engine(Video, model)``. The arguments are the type of the messages, a
    handler, which is a function or a coroutine function that returns the answer to a message, and optionally
    an address in place of `engine_address`. The engines are stopped after the test.
    """
    engines: list[Engine[Any]] = []
    with anyio.from_thread.start_blocking_portal() as portal:

        def start(
            message_type: type[M], handler: Callable[[M], Any], *, address: str | None = None
        ) -> Engine[M]:
            engine = Engine(portal, address or engine_address, message_type, handler)
            engines.append(engine)
            engine.start()
            return engine

        try:
            yield start
        finally:
            for engine in engines:
                engine.stop()


class Engine(Generic[M]):
    """An engine in a thread of the test process: a `MessageServer` that answers with a function.

    A handler that is a plain function is called in another thread, for one message at a time, as by a
    blocking engine. A coroutine function is called in a task for each message, and cancelled when its client
    disconnects. An exception in the handler is raised at the client as `RemoteError`; `SystemExit` stops the
    engine. The methods can be called in any thread, and block it briefly, even in asynchronous tests.

    Attributes:
        address: the address of the engine.
        requests: a copy of each message that the engine has taken, in this order. The copies use no shared
            memory.
    """

    def __init__(
        self,
        portal: anyio.from_thread.BlockingPortal,
        address: str,
        message_type: type[M],
        handler: Callable[[M], Any],
    ) -> None:
        self.address = address
        self.requests: list[M] = []
        self._portal = portal
        self._message_type = message_type
        self._handler = handler
        self._is_async = any(map(inspect.iscoroutinefunction, (handler, type(handler).__call__)))
        self._thread = anyio.CapacityLimiter(1)
        self._running: tuple[anyio.CancelScope, Future[None]] | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()

    def __repr__(self) -> str:
        state = "stopped" if self._running is None else "running" if self._resumed.is_set() else "paused"
        return f"<Engine {state}, at {self.address}, {len(self.requests)} requests>"

    def start(self) -> None:
        """Start the engine again after `stop`; `tensor_engine` calls it for the first time.

        Raises:
            UsageError: the engine runs already.
        """
        if self._running is not None:
            raise UsageError(f"the engine at {self.address} runs already: call `stop` first")
        future, scope = self._portal.start_task(self._run)
        self._running = scope, future

    def stop(self) -> None:
        """Stop the engine, as after SIGTERM: unfinished requests raise `PeerLostError` at their clients.

        Stopping a stopped engine has no effect.
        """
        if self._running is None:
            return
        scope, future = self._running
        self._running = None
        self._portal.call(scope.cancel)
        future.result()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep requests waiting during a ``with`` block, like a busy engine.

        The engine takes no further request. Clients stay connected, and keep the permits of waiting requests.
        """
        self._portal.call(self._resumed.clear)
        try:
            yield
        finally:
            self._portal.call(self._resumed.set)

    async def _run(self, *, task_status: anyio.abc.TaskStatus[anyio.CancelScope]) -> None:
        async with (
            MessageServer(self.address, self._message_type) as server,
            anyio.create_task_group() as tasks,
        ):
            task_status.started(tasks.cancel_scope)
            while True:
                await server.arrived()
                if not self._resumed.is_set():
                    await self._resumed.wait()
                    continue  # the request may have been cancelled in the meantime
                request = await anext(server)
                if self._is_async:
                    tasks.start_soon(self._answer, request, tasks.cancel_scope)
                else:
                    await self._answer(request, tasks.cancel_scope)
                del request  # its tensors must not live until the next request

    async def _answer(self, request: Request[M], engine: anyio.CancelScope) -> None:
        try:
            async with request:
                self.requests.append(copy.deepcopy(request.message))
                if self._is_async:
                    answer = await self._handler(request.message)
                else:
                    answer = await anyio.to_thread.run_sync(
                        self._handler, request.message, abandon_on_cancel=True, limiter=self._thread
                    )
                await request.answer(answer)
        except (SystemExit, KeyboardInterrupt):
            engine.cancel()  # the process of an engine would end; the event loop here must not
