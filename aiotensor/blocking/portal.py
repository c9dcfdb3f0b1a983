"""The base of blocking objects, which runs the calls of threads in the shared event loop of the process."""

import asyncio
import inspect
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar, cast

import torch

from aiotensor import channel
from aiotensor.blocking.thread import Call, Loop, borrow, release
from aiotensor.errors import ClosedError, UsageError
from aiotensor.runtime.affinity import LoopObject, ProcessBound, close_now, warn_unclosed
from aiotensor.runtime.logs import logger_of
from aiotensor.sender import OpenMessage

logger = logger_of("blocking")

A = TypeVar("A", bound=LoopObject)
B = TypeVar("B", bound=OpenMessage | channel.Permit)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def parameters_of(
    other: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator for an `__init__` that forwards all its arguments to another class.

    Type checkers and `inspect.signature` then see the parameters of that class.

    Args:
        other: the other class.
    """

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(getattr(other, "__origin__", other))  # of a generic class
        parameters = [itself, *signature.parameters.values()]
        init.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return init

    return decorate


class BlockingObject(ProcessBound, Generic[A, S]):
    """Use an asynchronous object from threads without an event loop; several threads may share it.

    Args:
        inner: the asynchronous object, not yet opened, with statistics of type `S`.

    Attributes:
        inner: the asynchronous object, to be used only in the thread of the event loop.
        is_closed: whether `close` was called.
    """

    def __init__(self, inner: A) -> None:
        self._name = type(self).__name__
        self.inner = inner
        inner.affinity.has_guardian = True  # `__del__` of this class closes it
        self._pid = os.getpid()
        self._user = object()  # represents this object, which the shared loop must not keep alive
        self._loop: Loop | None = None
        self._opening: Call[A] = Call(inner.__aenter__)
        # Reentrant: a signal handler may close the object while its thread holds the lock.
        self._lock = threading.RLock()
        self._was_opened = False
        self.is_closed = False
        self._is_ending = self._has_released_loop = False
        self._last: S | None = inner.statistics()  # before opening, and again at the end
        # Used in the loop: the items that interrupted threads have not received, and the calls that wait for
        # an item, with a list for an item of an interrupted thread.
        self._not_received: list[tuple[object, Any]] = []
        self._takers: dict[asyncio.Task[Any], tuple[object, list[Any]]] = {}

    def __repr__(self) -> str:
        inner = self.__dict__.get("inner")
        return f"<aiotensor.blocking.{type(self).__name__ + ' new>' if inner is None else repr(inner)[1:]}"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing() or self.__dict__.get("_loop") is None or os.getpid() != self._pid:
            return
        self.abandon()
        warn_unclosed(self)  # last, because it raises if warnings are errors

    def __enter__(self) -> Self:
        self._check_place()
        with self._lock:
            if self.is_closed or self._was_opened:
                error, state = (ClosedError, "closed") if self.is_closed else (UsageError, "already opened")
                raise error(f"this {self._name} was {state}: create a new one")
            self._was_opened = True
        try:
            loop = borrow(self._user)
            with self._lock:
                if not self.is_closed:
                    self._loop, self._last = loop, None
            self._run(self._opening)
        except BaseException as error:
            self.close()  # the object may be open already if a signal has interrupted this thread
            if not self._is_ending:  # otherwise, the thread that closes the object releases the loop
                self._release_loop()
            if isinstance(error, asyncio.CancelledError):
                raise ClosedError(f"this {self._name} was closed while it was being opened") from None
            raise
        return self

    if not TYPE_CHECKING:  # type checkers report the wrong statement

        async def __aenter__(self) -> NoReturn:
            raise TypeError(f"use `with` for this {self._name}, or `async with` for the class in aiotensor")

        async def __aexit__(self, *error: object) -> None:
            """Exist, because `async with` looks for it before it calls `__aenter__`."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.inner.affinity.is_left_in_child(error):  # otherwise, closing would replace the error
            self.close()

    def close(self, *, timeout: float | None = None) -> None:
        """Close the object, and wait as its `aclose` does.

        Args:
            timeout: the time in seconds after which the object is closed without further waiting; None for no
                limit.

        Raises:
            TimeoutError: the timeout has expired; the object is closed nevertheless.
        """
        self._check_place()
        with self._lock:
            self.is_closed = True
        # `is_closed` does not mean that an earlier call has ended: a signal may have interrupted it here.
        if self._is_ending or self._has_released_loop or not self._was_opened:
            return
        try:
            if self._loop is None or not self._loop.is_out_of_reach:
                # Another thread, or code that a signal handler has interrupted, may be opening the object.
                self._opening.give_up()
                self._end(timeout)
        finally:
            self._release_loop()

    def _end(self, timeout: float | None) -> None:
        """Close the object in the loop, even if this thread is interrupted."""
        if self._loop is None:
            return  # the object was never opened in a loop

        async def end() -> None:
            try:
                await self.inner.aclose()
            finally:
                self._last = self.inner.statistics()
                if self._not_received:
                    logger.warning(
                        "this %s was closed with items that calls had taken when a signal handler "
                        "interrupted them (lost=%d)",
                        self._name,
                        len(self._not_received),
                        extra={"event": "items_dropped", "count": len(self._not_received)},
                    )
                    self._not_received.clear()

        try:
            self._is_ending = True
            self.wait_for(end, timeout=timeout)
        except ClosedError:
            return  # another thread has closed the object in the meantime
        except BaseException:
            with suppress(TimeoutError):
                self.wait_for(end, timeout=0)  # a signal may have interrupted the first call before it began
            raise

    def _release_loop(self) -> None:
        """Release the shared loop, which ends after its last user."""
        with self._lock:
            self._loop = None
        release(self._user)
        self._has_released_loop = True

    def abandon(self) -> None:
        """Close the object without waiting; for finalizers, which may run in any thread."""
        loop, self._loop = self._loop, None
        self.is_closed = True
        if loop is not None:
            loop.abandon(partial(close_now, self.inner.aclose), self._user)

    def statistics(self) -> S:
        """Return the current usage and the totals since opening; also available after closing."""
        statistics: Callable[[], S] = self.inner.statistics
        return self._last or self.call(statistics)

    # Calls

    def call(self, function: Callable[..., R], *args: Any) -> R:
        """Call a function in the thread of the loop, and return its result."""
        result: R = self.wait_for(_now, function, *args)
        return result

    def call_briefly(self, function: Callable[..., R], *args: Any) -> R:
        """Call a function that never waits in the thread of the loop; the caller may run another loop."""
        self._check_process()
        if self._loop is not None and self._loop.is_here:
            raise UsageError(f"this {self._name} cannot be used in the thread of its own event loop")
        return self._run(Call(partial(_now, function, *args)))

    def call_or_do(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the thread of the loop, or here if the object was closed.

        The function ends the use of an object that belongs to this thread.
        """
        try:
            self.call(function, *args)
        except ClosedError:
            function(*args)

    def wait_for(
        self, function: Callable[..., Awaitable[R]], *args: Any, timeout: float | None = None, **options: Any
    ) -> R:
        """Run a coroutine function in the loop, and wait in this thread for its result.

        Args:
            function: the coroutine function.
            args: its positional arguments.
            timeout: the time in seconds after which the coroutine is cancelled; None for no limit.
            options: its keyword arguments.

        Raises:
            TimeoutError: the coroutine was cancelled after `timeout` seconds.
        """
        self._check_place()
        return self._run(Call(partial(function, *args, **options), timeout))

    def take(
        self,
        key: object,
        function: Callable[..., Awaitable[R]],
        *args: Any,
        timeout: float | None = None,
        **options: Any,
    ) -> R:
        """Run a coroutine function that takes an item, as `wait_for` does, and lose no item.

        If a signal handler raises an error in this thread after the item was taken, a waiting call with the
        same key returns it, or else the next one.

        Args:
            key: identifies the kind of item, such as a handle; None for the next item of the object.
            function: the coroutine function, which takes an item; cancelling it loses none.
            args: its positional arguments.
            timeout: as for `wait_for`.
            options: its keyword arguments.
        """
        self._check_place()
        left, takers = self._not_received, self._takers

        async def next_item() -> R:
            for index, (other, item) in enumerate(left):
                if other == key:
                    del left[index]
                    return cast("R", item)
            given: list[R] = []
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            takers[task] = key, given
            try:
                given.append(await function(*args, **options))
            except BaseException:
                if not given:
                    raise
            finally:
                del takers[task]
            [result, *others] = given
            for item in others:
                put_back(item)
            return result

        def put_back(item: R) -> None:
            for task, (other, given) in takers.items():
                if other == key and not task.cancelling():
                    given.append(item)
                    task.cancel()
                    return
            left.append((key, item))

        return self._run(Call(next_item, timeout, put_back))

    def take_now(self, key: object, function: Callable[..., R], *args: Any) -> R:
        """Call a function that takes an item without waiting in the thread of the loop, as `take` does."""
        result: R = self.take(key, _now, function, *args)
        return result

    def _run(self, call: Call[R]) -> R:
        try:
            with self._lock:  # otherwise, another thread could stop the loop before the call begins
                self._begin(call)
            return call.result()
        except BaseException:
            call.give_up()  # a signal may have interrupted this thread, but not the call
            raise

    def _begin(self, call: Call[Any]) -> None:
        if self._loop is None and not self.is_closed:
            raise UsageError(f"this {self._name} is not open yet: enter it with `with` first")
        if self._loop is not None and not self._loop.is_out_of_reach:
            with suppress(RuntimeError):  # a signal handler has just closed the object
                self._loop.begin(call)
                return
        raise ClosedError(f"this {self._name} was closed: create a new one")

    async def _next(self, items: AsyncIterator[R]) -> R:
        """Return the next item of an iterator in the loop, or raise `ClosedError` at its end."""
        try:
            return await anext(items)
        except StopAsyncIteration:
            raise ClosedError(f"this {self._name} was closed: create a new one") from None

    def _check_place(self) -> None:
        self._check_process()
        if asyncio._get_running_loop() is not None:
            raise UsageError(
                f"this {self._name} would block the event loop of this thread: use the asynchronous class "
                "here instead, with await"
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this {self._name} was inherited by a forked process, in which its thread does not run: "
                "start processes with multiprocessing.get_context('spawn') and open one in each"
            )


async def _now(function: Callable[..., R], *args: Any) -> R:
    return function(*args)


class Block(Generic[B]):
    """A block of an object, which waits to be entered: a message or a permit.

    Args:
        owner: the object.
        inner: the asynchronous block.
        timeout: the time in seconds after which entering raises `TimeoutError`; None for no limit.

    Attributes:
        inner: the argument, to be used only in the thread of the event loop.
    """

    def __init__(self, owner: BlockingObject[Any, Any], inner: B, timeout: float | None) -> None:
        self._owner = owner
        self.inner = inner
        self._timeout = timeout
        self._is_entered = False

    def __repr__(self) -> str:
        return f"<aiotensor.blocking.{repr(self.inner)[1:]}"

    def __enter__(self) -> Self:
        try:
            self._owner.wait_for(self.inner.__aenter__, timeout=self._timeout)
        except BaseException as error:
            if not self._is_entered:  # a signal may have interrupted this thread after the block was entered
                self.__exit__(type(error), error, error.__traceback__)
            raise
        self._is_entered = True
        return self

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, timeout: float | None = None
    ) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory for this block, which is sent without a copy."""
        return self._owner.wait_for(self.inner.allocate, shape, dtype, timeout=timeout)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owner.inner.affinity.is_left_in_child(error):
            return
        try:
            self._owner.wait_for(self.inner.__aexit__, kind, error, trace)
        except ClosedError:
            if kind is None:
                raise


class UntilClosed(Iterator[R]):
    """Iterate over the results of a function until it raises `ClosedError`; several threads may iterate.

    Not a generator, which would keep each result while it waits for the next one.
    """

    def __init__(self, next_item: Callable[[], R]) -> None:
        self._next_item = next_item
        self._is_over = False

    def __next__(self) -> R:
        try:
            if not self._is_over:
                return self._next_item()
        except ClosedError:
            self._is_over = True
        raise StopIteration
