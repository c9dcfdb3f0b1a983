"""The engine that the user has chosen, and an engine that runs in a thread."""

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar, get_args

from aiotensor.engines import Engine, EngineError, RegistrationError, engine_maker
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.worker import Worker
from aiotensor.types import EngineName

__all__ = ["TURN_S", "EngineChoice", "RunningEngine", "choose_engine"]

logger = logger_of("transports")

R = TypeVar("R")

# Called at the end of a write, with its error, or with None.
_WriteEnd: TypeAlias = Callable[[EngineError | None], object]

_MOST_REASONS = 16

# Engines cannot wait for the progress of their peers: NIXL does not expose the descriptor of UCX that would
# become readable. So the thread polls while a write is under way. In between it waits for other calls, which
# leaves the processor to other threads.
_PAUSE_S = 50e-6

TURN_S = 0.002  # after which the event loop decides whether to poll further


def choose_engine(name: EngineName | None, endpoint: str) -> "EngineChoice | None":
    """Load the engine with this name, and return it as the choice of the user; None for no engine.

    Raises:
        ValueError: there is no such engine.
    """
    if name is None:
        return None
    if name not in get_args(EngineName):
        raise ValueError(f"engine must be None or one of {get_args(EngineName)}, got {name!r}")
    return EngineChoice(name, endpoint)


class EngineChoice:
    """The engine that the user has chosen for an endpoint.

    Args:
        name: the name of the engine.
        endpoint: the endpoint, for the log.

    Attributes:
        make: makes the engine; None if the engine cannot be used here.
        reason: why the engine cannot be used here.
    """

    def __init__(self, name: str, endpoint: str) -> None:
        self.name = name
        self.make: Callable[[], Engine] | None = None
        self.reason = ""
        self._endpoint = endpoint
        self._reported: set[str] = set()
        try:
            self.make = engine_maker(name)
        except EngineError as error:
            self.reason = str(error)

    def report(self, reason: str, what: str = "all tensors of a connection") -> None:
        """Log that ZeroMQ carries tensors instead of the engine, once for each reason, up to a limit.

        Args:
            reason: why the engine does not carry them; possibly a text of the peer.
            what: which tensors, for the log.
        """
        if reason not in self._reported and len(self._reported) < _MOST_REASONS:
            self._reported.add(reason)
            logger.warning(
                "ZeroMQ carries %s at %s instead of %s: %s",
                what,
                self._endpoint,
                self.name,
                reason,
                extra={
                    "event": "nixl_unavailable",
                    "endpoint": self._endpoint,
                    "engine": self.name,
                    "reason": reason,
                },
            )


class RunningEngine:
    """Call an engine in a thread, and poll it while it is needed; belongs to the running loop.

    Args:
        failed: called with the reason if polling or the end of a registration fails.
    """

    def __init__(self, failed: Callable[[str], object]) -> None:
        self._failed = failed
        self._worker = Worker("aiotensor-engine")
        self._engine: Engine | None = None  # used only in the thread, like `_ends`
        self._ends: dict[Hashable, _WriteEnd] = {}
        self._calls = 0  # calls in the thread that have not ended, except for polling
        self._has_calls = threading.Event()  # they end the polling
        self._needs = 0  # writes of either side that are under way
        self._is_polling = self._is_closed = False

    async def open(self, make: Callable[[], Engine]) -> bytes:
        """Open the engine, and return its address; errors are those of `make`.

        If the call is cancelled, `close` still closes the engine.
        """

        def open_() -> bytes:
            engine = self._engine = make()
            return engine.address

        return await self._submit(partial(_translated, open_))

    async def connect(self, address: bytes) -> None:
        """Set the peer, as `Engine.connect` does."""
        await self._call(lambda engine: engine.connect(address))

    def register(self, memory: memoryview) -> "asyncio.Future[bytes]":
        """Allow the peer to write to memory, as `Engine.register` does."""
        return self._call(lambda engine: engine.register(memory))

    def unregister(self, keys: Sequence[bytes]) -> None:
        """End the registrations with these keys, as `Engine.unregister` does."""

        def unregister(engine: Engine) -> None:
            for key in keys:
                engine.unregister(key)

        self._call(unregister).add_done_callback(self._unregistered)

    def write(self, source: memoryview, key: bytes, start: int, ended: _WriteEnd) -> None:
        """Write to memory of the peer, as `Engine.write` does.

        Args:
            source: the bytes.
            key: the key of the memory.
            start: the position of the first byte in the memory.
            ended: called at the end with an error or None, but not after `close`. With a `RegistrationError`,
                the write has not begun; after other errors, bytes may be under way until `close`.
        """

        def write(engine: Engine) -> None:
            self._ends[engine.write(source, key, start)] = ended

        self.begin_polling()
        self._call(write).add_done_callback(partial(self._write_begun, ended))

    def begin_polling(self) -> None:
        """Poll until `end_polling` has been called as often as this method."""
        self._needs += 1
        self._poll()

    def end_polling(self) -> None:
        """Undo one call of `begin_polling`."""
        self._needs -= 1

    def close(self, closed: Callable[[], object]) -> None:
        """Close the engine, which stops all writes, and call a function afterwards."""
        self._is_closed = True

        def close() -> None:
            engine, self._engine = self._engine, None
            self._ends.clear()
            if engine is not None:
                engine.close()

        def has_closed(work: "asyncio.Future[None]") -> None:
            closed()
            work.result()

        try:
            closing = self._submit(close)
        except OSError:
            closed()  # no thread was ever started, so there is no engine; or the process is ending
        else:
            closing.add_done_callback(has_closed)
        self._worker.close()

    def _call(self, call: Callable[[Engine], R]) -> "asyncio.Future[R]":
        return self._submit(partial(self._call_in_thread, call))

    def _submit(self, work: Callable[[], R]) -> "asyncio.Future[R]":
        """Run work in the thread, which ends its polling for it."""
        future = self._worker.submit(work)
        self._calls += 1
        self._has_calls.set()
        future.add_done_callback(self._call_ended)
        return future

    def _call_ended(self, _: "asyncio.Future[R]") -> None:
        self._calls -= 1
        if not self._calls:
            self._has_calls.clear()

    def _call_in_thread(self, call: Callable[[Engine], R]) -> R:
        if self._engine is None:
            raise EngineError("it is closed")
        return _translated(partial(call, self._engine))

    # Errors are not raised again here: the frames of the engine in their tracebacks would keep it alive.

    def _write_begun(self, ended: _WriteEnd, work: "asyncio.Future[None]") -> None:
        error = work.exception()
        if error is not None:
            self.end_polling()
            if not self._is_closed:
                ended(error if isinstance(error, EngineError) else EngineError(str(error)))

    def _unregistered(self, work: "asyncio.Future[None]") -> None:
        error = work.exception()
        if error is not None and not self._is_closed:
            self._failed(str(error))

    def _poll(self) -> None:
        if self._needs and not self._is_polling and not self._is_closed:
            self._is_polling = True
            polling = self._worker.submit(partial(self._call_in_thread, self._poll_in_thread))
            polling.add_done_callback(self._polled)

    def _poll_in_thread(self, engine: Engine) -> list[tuple[_WriteEnd, str]]:
        end = time.monotonic() + TURN_S
        while not (ended := engine.poll()) and time.monotonic() < end:
            if self._has_calls.wait(_PAUSE_S):
                break
        # `ended` may include a write that failed to begin, which was already reported.
        return [(self._ends.pop(write), reason) for write, reason in ended if write in self._ends]

    def _polled(self, work: "asyncio.Future[list[tuple[_WriteEnd, str]]]") -> None:
        self._is_polling = False
        error = work.exception()
        if error is not None:
            if not self._is_closed:
                self._failed(str(error))
            return
        for ended, reason in work.result():
            if self._is_closed:
                return  # the end of an earlier write may have closed this
            self.end_polling()
            ended(EngineError(reason) if reason else None)
        self._poll()


def _translated(call: Callable[[], R]) -> R:
    """Call an engine, and raise each error as an `EngineError` without the frames of the engine."""
    kind: type[EngineError]
    try:
        return call()
    except RegistrationError as error:
        kind, text = RegistrationError, str(error)
    except EngineError as error:
        kind, text = EngineError, str(error)
    except Exception as error:  # noqa: BLE001 - of a library; the connection reports it
        kind, text = EngineError, f"{type(error).__name__}: {error}"
    raise kind(text)
