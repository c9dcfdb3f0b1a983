"""An event loop that goes on only when it is told to, so that what happens between can be chosen."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import Any, TypeVar

import pytest
import uvloop
from anyio._backends._asyncio import WorkerThread

from aiotensor.protocol import pages
from aiotensor.runtime.worker import Worker
from aiotensor.sending import memory
from aiotensor.tensors import segments

T = TypeVar("T")
_Post = tuple[Callable[..., object], tuple[Any, ...], Context | None]


class _Timer:
    """What is to be called when the test lets so much time pass."""

    def __init__(self, when: float, callback: Callable[[], object]) -> None:
        self.when = when
        self._callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def run(self) -> None:
        if self._callback is not None:
            self._callback()


class Steps:
    """Turn a loop one turn at a time, by a clock that goes on when it is told to.

    Threads are waited for before each turn, and their results come in the same order each time; a worker
    that is *held* comes to nothing until it is let go.
    """

    def __init__(self, kind: str) -> None:
        self.loop = asyncio.SelectorEventLoop() if kind == "asyncio" else uvloop.new_event_loop()
        self.complaints: list[str] = []
        self.loop.set_exception_handler(lambda loop, context: self.complaints.append(str(context)))
        self._workers: dict[Worker, dict[object, threading.Event]] = {}  # and what holds its lanes
        self._posted: list[_Post] = []  # by `call_soon_threadsafe`, since the last turn
        self._clock = 0.0
        self._timers: list[_Timer] = []
        self._patched = pytest.MonkeyPatch()
        self._patched.setattr(self.loop, "call_soon_threadsafe", self._post)
        self._patched.setattr(self.loop, "call_later", self._call_later)
        self._patched.setattr(self.loop, "call_at", self._call_at)
        self._patched.setattr(self.loop, "time", lambda: self._clock)
        # So that small tensors, too, take either lane, and share chunks with others.
        self._patched.setattr(memory, "_SHORT_COPY_BYTES", 32 << 10)
        for module in (pages, segments):
            self._patched.setattr(module, "CHUNK_BYTES", 32 << 10)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Act as a callback of the loop does, without a turn of it."""
        asyncio._set_running_loop(self.loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def start(self, call: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begin a call; it does its first step in the next turn."""
        with self.inside():
            return self.loop.create_task(call)

    def turn(self) -> None:
        """Let the loop turn once: what is ready runs, and what came is read."""
        self._join_threads()
        due = [timer for timer in self._timers if timer.when <= self._clock]
        self._timers = [timer for timer in self._timers if timer.when > self._clock]
        for timer in sorted(due, key=lambda timer: timer.when):
            self.loop.call_soon(timer.run)
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def pass_time(self, seconds: float) -> None:
        """Let timers of so many seconds become due."""
        self._clock += seconds

    def watch(self, worker: Worker) -> None:
        """Wait for the work of this one from now on."""
        self._workers[worker] = {}

    def hold(self, worker: Worker, *, only_long: bool) -> None:
        """Let no more work of a worker begin, or none that takes long; what has begun is done first."""
        # Not the short lane alone, since work in the other may wait for it.
        for lane in (worker._long,) if only_long else (worker._short, worker._long):
            event = self._workers[worker][lane] = threading.Event()
            lane.executor.submit(int).result()
            lane.executor.submit(event.wait)

    def is_held(self, worker: Worker) -> bool:
        """Say whether some work of a worker does not begin."""
        return bool(self._workers.get(worker))

    def let_go(self, worker: Worker) -> None:
        """Let the work of a worker begin."""
        for event in self._workers[worker].values():
            event.set()
        self._workers[worker] = {}

    def close(self) -> None:
        """Close the loop, in which nothing runs any more."""
        self._patched.undo()
        assert not asyncio.all_tasks(self.loop), "tasks were left behind"
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        for worker in self._workers:
            for lane in (worker._short, worker._long):
                for thread in list(lane.executor._threads):
                    thread.join()

    def abandon(self) -> None:
        """End what can be ended, after a failure."""
        self._patched.undo()
        for worker in self._workers:
            if self.is_held(worker):
                self.let_go(worker)
            for executor in (worker._short.executor, worker._long.executor, worker.helper):
                executor.shutdown()

    def _call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> "_Timer":
        return self._call_at(self._clock + delay, callback, *args)

    def _call_at(self, when: float, callback: Callable[..., object], *args: Any) -> "_Timer":
        timer = _Timer(when, partial(callback, *args))
        self._timers.append(timer)
        return timer

    def _post(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> None:
        self._posted.append((callback, args, context))

    def _join_threads(self) -> None:
        others: list[object] = []
        for thread in threading.enumerate():
            if isinstance(thread, WorkerThread) and thread.loop is self.loop:
                others.append(thread)
                if thread.stopping:
                    thread.join()
                else:
                    thread.queue.join()
        for worker, held in self._workers.items():
            for lane in (worker._short, worker._long):
                if lane not in held and lane.running:
                    try:
                        lane.executor.submit(int).result()
                    except RuntimeError:  # it was shut down, and ends what it was doing
                        for thread in list(lane.executor._threads):
                            thread.join()
        # Which of two threads was faster must make no difference, nor whether one was done at once.
        lanes = [lane for worker in self._workers for lane in (worker._short, worker._long)]
        order = {id(owner): place for place, owner in enumerate([*others, *lanes], 1)}
        posted, self._posted = self._posted, []
        for callback, args, context in sorted(posted, key=lambda one: order.get(id(_owner_of(*one)), 0)):
            self.loop.call_soon(callback, *args, context=context)


def _owner_of(callback: Callable[..., object], args: tuple[object, ...], _: object) -> object:
    owner = getattr(callback, "__self__", None)
    return args[0] if isinstance(owner, Worker) else owner  # the lane
