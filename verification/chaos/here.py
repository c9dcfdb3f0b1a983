"""The private state of a process of the run, and what the operations of all kinds of work share."""

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import torch
import zmq

from aiotensor import AioTensorError
from verification.chaos.journal import Began, Broken, Ended, Journal
from verification.chaos.plan import Hold, Order, SenderPlan, TakerPlan
from verification.patterns import pattern
from verification.processes import peers
from verification.processes.allocator import forget_free_memory, keep_no_large_pieces
from verification.processes.peers import State

T = TypeVar("T")

ARENA_BYTES = 16 << 20
MAX_MAPPED_BYTES = 4 * ARENA_BYTES  # three senders, and the remains of a killed one
_PIECE = 8192  # elements
_REST_S = 8.0  # for steps of milliseconds, less than the time limit of a call
_PAUSES_S = 0.02  # between two measurements


class Here:
    """The journal and the settings of this process."""

    def __init__(self) -> None:
        self.journal: Journal
        self.pauses: Pauses
        self.arguments: Mapping[str, Any] = {}  # of its objects, for their connections: keys and timeouts
        self.addresses: Sequence[str] = ()  # of the family
        self.open: Any = None  # its latest object of the library


class Pauses:
    """Measure the pauses of this process in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._longest_s = 0.0
        threading.Thread(target=self._measure, name="pauses", daemon=True).start()

    def longest_s(self) -> float:
        """Return the longest pause since the last call, in seconds."""
        with self._lock:
            longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def _measure(self) -> None:
        began = time.monotonic()
        while True:
            time.sleep(_PAUSES_S)
            ended = time.monotonic()
            with self._lock:
                self._longest_s = max(self._longest_s, ended - began)
            began = ended


here = Here()


async def begin(state: State, path: str, arguments: Mapping[str, Any], addresses: Sequence[str]) -> None:
    """Redirect the journal, the log and the standard error of this process to its files."""
    silence = os.open(f"{path}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(silence, sys.stderr.fileno())
    os.close(silence)
    warnings.simplefilter("always")
    log = logging.FileHandler(f"{path}.log")
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.getLogger("aiotensor").addHandler(log)
    logging.getLogger("aiotensor").setLevel(logging.INFO)
    logging.getLogger("aiotensor").propagate = False  # asyncio's own complaints go to stderr
    faulthandler.register(signal.SIGUSR1)  # to locate a hang
    here.journal = Journal(f"{path}.journal")
    here.arguments, here.addresses, here.pauses = arguments, addresses, Pauses()
    token_of(pattern(0, 3).zero_())  # torch opens files at its first operations
    zmq.Frame(bytes(zmq.COPY_THRESHOLD), copy=False)  # the first one opens descriptors, too
    keep_no_large_pieces()
    gc.freeze()  # a collection at every allocation then visits few objects


async def paused_s(state: State) -> float:
    """Return the longest pause of the process since the last call, in seconds."""
    return here.pauses.longest_s()


async def opened(
    make: Callable[[], AbstractAsyncContextManager[T]], errors: tuple[type[Exception], ...] = (OSError,)
) -> T:
    """Open an object; try again after these errors, while this process has no descriptors."""
    while True:
        closed = make()
        try:
            here.open = found = await closed.__aenter__()
        except errors:
            await asyncio.sleep(0.005)
        else:
            return found


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true, with pauses in which other processes run."""
    while not condition():
        await asyncio.sleep(0.001)


class Kept:
    """The tensors that this process has taken and keeps, as planned."""

    def __init__(self, plan: TakerPlan) -> None:
        self._plan = plan
        self._tensors: list[tuple[torch.Tensor, int | None]] = []

    def add(self, tensor: torch.Tensor, token: int | None) -> None:
        """Use a tensor with the pattern of a token, or with zeros if that is None."""
        later, after_s = asyncio.get_running_loop().call_later, self._plan.hold_ms / 1000
        match self._plan.hold:
            case Hold.KEEP:
                self._tensors.append((tensor, token))
                later(after_s, self._let_go)
            case Hold.CYCLE:
                garbage: list[object] = [tensor]
                garbage.append(garbage)
                later(after_s, gc.collect)

    def _let_go(self) -> None:
        """Drop the oldest tensor, and check that only this process has changed it."""
        tensor, token = self._tensors.pop(0)
        if bool(tensor.any()) if token is None else token_of(tensor) != token:
            here.journal(Broken(f"the values of {token} changed while they were kept: {tensor[:9]}"))

    async def dropped(self) -> None:
        """Wait until all are dropped."""
        await until(lambda: not self._tensors)


async def at_rest(held: Callable[[], Mapping[str, int]]) -> list[str]:
    """Wait until all numbers are 0, without a garbage collection; return those that are not in the end."""
    ends = time.monotonic() + _REST_S
    while left := {name: count for name, count in held().items() if count}:
        if time.monotonic() > ends:
            return [f"holds at rest: {left}"]
        await asyncio.sleep(0.001)
    return []


async def tidy(state: State) -> int:
    """Return free memory to the system, so that only used memory remains; count the blocks of objects."""
    forget_free_memory()
    return sys.getallocatedblocks()


def left_running() -> list[str]:
    """List the threads of the library and the tasks of this process that serve no call."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("aiotensor")]
    tasks = [repr(task) for task in asyncio.all_tasks() if peers.__name__ not in _module_of(task)]
    return threads + tasks


def _module_of(task: "asyncio.Task[Any]") -> str:
    frame = getattr(task.get_coro(), "cr_frame", None)
    return "" if frame is None else str(frame.f_globals["__name__"])


async def say_where(state: State) -> None:
    """Print what every task waits for to the standard error."""
    for task in asyncio.all_tasks():
        awaited: Any = task.get_coro()
        while awaited is not None:
            frame = getattr(awaited, "cr_frame", None)
            where = f"{frame.f_code.co_qualname}:{frame.f_lineno}" if frame is not None else repr(awaited)
            print(f"{task.get_name()} {where}", file=sys.stderr)  # noqa: T201
            awaited = getattr(awaited, "cr_await", None)
    print(here.open.statistics(), file=sys.stderr)  # noqa: T201


def token_of(tensor: torch.Tensor) -> int | None:
    """Return the token whose pattern a tensor has, or None if it has none; takes little memory."""
    token = int(tensor[0])
    for start in range(0, tensor.numel(), _PIECE):
        piece = tensor[start : start + _PIECE]
        if not torch.equal(piece, torch.arange(start, start + piece.numel()) * 31 + token):
            return None
    return token


async def begin_round(state: State) -> None:
    """Forget the last round."""
    here.journal.begin_anew()


async def carry_out_all(
    state: State,
    carry_out: Callable[[State, Order, Sequence[torch.Tensor]], Awaitable[None]],
    plan: SenderPlan,
    part: int,
) -> None:
    """Carry out the orders of a part of a plan."""
    orders = deque(
        (order, [pattern(order.key + i, n) for i, n in enumerate(order.counts)]) for order in plan.parts[part]
    )

    async def work() -> None:
        while orders:
            await carry_out(state, *orders.popleft())
            await asyncio.sleep(0)

    await asyncio.gather(*(work() for _ in range(plan.width)))


async def account(order: Order, doing: Coroutine[Any, Any, None]) -> None:
    """Carry out an order, cancel it if that is planned, and record the outcome."""
    here.journal(Began(order.key))
    how, text = "whole", ""
    try:
        if not order.is_cancelled:
            await doing
        elif await _cancel(asyncio.create_task(doing), order.after_ms / 1000):
            how = "cancelled"
    except (AioTensorError, OSError) as error:
        how, text = type(error).__name__, str(error)
    here.journal(Ended(order.key, how, text))


async def _cancel(task: "asyncio.Task[None]", after_s: float) -> bool:
    """Cancel a task after a while; return whether that ended it, or raise its own error."""
    try:
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            return True
        task.result()
        return False
    finally:
        del task  # its error refers to this frame, and would keep the tensor until a garbage collection
