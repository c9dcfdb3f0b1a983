"""An event loop that runs one iteration at a time, so that tests choose the events in between."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import uvloop
from anyio._backends._asyncio import WorkerThread

from aiotensor.memory import arena, memory, pages
from aiotensor.runtime import worker as workers
from aiotensor.runtime.worker import Worker
from verification.internals import lanes_of

T = TypeVar("T")
_Post = tuple[Callable[..., object], tuple[Any, ...], Context | None]


class _Timer:
    """A callback that is due when the test has advanced the clock far enough."""

    def __init__(self, when: float, callback: Callable[[], object]) -> None:
        self.when = when
        self._callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def run(self) -> None:
        if self._callback is not None:
            self._callback()


class Steps:
    """Run a loop one iteration at a time, with a clock that only `pass_time` advances.

    Each iteration first runs the jobs of the threads, and gets their results in the same order each time. No
    job runs during an iteration, since its speed would then decide what the iteration finds. A worker that is
    *held* starts no jobs.

    Args:
        kind: the kind of the loop.
    """

    def __init__(self, kind: str) -> None:
        self.loop = asyncio.SelectorEventLoop() if kind == "asyncio" else uvloop.new_event_loop()
        self.complaints: list[str] = []
        self.loop.set_exception_handler(lambda loop, context: self.complaints.append(str(context)))
        self._workers: dict[Worker, dict[object, threading.Event]] = {}  # and the events that hold its lanes
        self._gates: dict[object, threading.Event] = {}  # what the lanes with new jobs wait for
        self._posted: list[_Post] = []  # by `call_soon_threadsafe`, since the last iteration
        self._clock = 0.0
        self._timers: list[_Timer] = []
        self._patches = ExitStack()
        self._patch(self.loop, "call_soon_threadsafe", self._post)
        self._patch(self.loop, "call_later", self._call_later)
        self._patch(self.loop, "call_at", self._call_at)
        self._patch(self.loop, "time", lambda: self._clock)
        self._patch(workers._Lane, "submit", self._submitting(workers._Lane.submit))
        # With these sizes small tensors also take either lane, and share chunks with others.
        self._patch(memory, "_SHORT_COPY_BYTES", 32 << 10)
        self._patch(memory, "_GRACE_S", 0.0)  # all readers are in this process, which does not end
        for module in (pages, arena):
            self._patch(module, "CHUNK_BYTES", 32 << 10)

    def _patch(self, target: object, name: str, value: object) -> None:
        self._patches.enter_context(patch.object(target, name, value))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run a block like a callback of the loop, without an iteration."""
        asyncio._set_running_loop(self.loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def start(self, call: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a call; its first step runs in the next iteration."""
        with self.inside():
            return self.loop.create_task(call)

    def turn(self) -> None:
        """Run one iteration of the loop, with its ready callbacks and readable sockets."""
        self._join_threads()
        due = [timer for timer in self._timers if timer.when <= self._clock]
        self._timers = [timer for timer in self._timers if timer.when > self._clock]
        for timer in sorted(due, key=lambda timer: timer.when):
            self.loop.call_soon(timer.run)
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def pass_time(self, seconds: float) -> None:
        """Advance the clock, which makes timers due."""
        self._clock += seconds

    def watch(self, worker: Worker) -> None:
        """Wait for the jobs of a worker before each iteration from now on."""
        self._workers[worker] = {}

    def hold(self, worker: Worker, *, only_long: bool) -> None:
        """Hold a worker, or only its lane for long jobs; wait until its running jobs are done."""
        self._open_gates()
        # Never the short lane alone, since a job in the other may wait for it.
        for lane in lanes_of(worker)[1:] if only_long else lanes_of(worker):
            event = self._workers[worker][lane] = threading.Event()
            lane.executor.submit(int).result()
            lane.executor.submit(event.wait)

    def is_held(self, worker: Worker) -> bool:
        """Return whether a worker is held."""
        return bool(self._workers.get(worker))

    def let_go(self, worker: Worker) -> None:
        """Stop holding a worker."""
        for event in self._workers[worker].values():
            event.set()
        self._workers[worker] = {}

    def close(self) -> None:
        """Close the loop, which must have no tasks left."""
        self._patches.close()
        assert not asyncio.all_tasks(self.loop), "tasks were left behind"
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        self._open_gates()
        for worker in self._workers:
            for lane in lanes_of(worker):
                for thread in list(lane.executor._threads):
                    thread.join()

    def abandon(self) -> None:
        """End the threads after a failure."""
        self._patches.close()
        self._open_gates()
        for worker in self._workers:
            if self.is_held(worker):
                self.let_go(worker)
            for executor in (*(lane.executor for lane in lanes_of(worker)), worker.helper):
                executor.shutdown()

    def _call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> "_Timer":
        return self._call_at(self._clock + delay, callback, *args)

    def _call_at(self, when: float, callback: Callable[..., object], *args: Any) -> "_Timer":
        timer = _Timer(when, partial(callback, *args))
        self._timers.append(timer)
        return timer

    def _post(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> None:
        self._posted.append((callback, args, context))

    def _submitting(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that submits jobs to a lane, to be run before the next iteration."""

        def submit_later(lane: Any, *args: Any, **options: Any) -> Any:
            if lane not in self._gates:
                gate = threading.Event()
                with suppress(RuntimeError):  # the lane was closed, which `submit` reports
                    lane.executor.submit(gate.wait)
                    self._gates[lane] = gate
            return submit(lane, *args, **options)

        return submit_later

    def _open_gates(self) -> None:
        gates, self._gates = self._gates, {}
        for gate in gates.values():
            gate.set()

    def _join_threads(self) -> None:
        self._open_gates()
        others: list[object] = []
        for thread in threading.enumerate():
            if isinstance(thread, WorkerThread) and thread.loop is self.loop:
                others.append(thread)
                if thread.stopping:
                    thread.join()
                else:
                    thread.queue.join()
        for worker, held in self._workers.items():
            for lane in lanes_of(worker):
                if lane not in held and lane.running:
                    try:
                        lane.executor.submit(int).result()
                    except RuntimeError:  # it was shut down, and finishes its last job
                        for thread in list(lane.executor._threads):
                            thread.join()
        # The order must not depend on which of two threads was faster.
        lanes = [lane for worker in self._workers for lane in lanes_of(worker)]
        order = {id(owner): place for place, owner in enumerate([*others, *lanes], 1)}
        posted, self._posted = self._posted, []

        def place_of(one: tuple[Callable[..., object], tuple[object, ...], Context | None]) -> int:
            return order.get(id(getattr(one[0], "__self__", None)), 0)

        for callback, args, context in sorted(posted, key=place_of):
            self.loop.call_soon(callback, *args, context=context)
