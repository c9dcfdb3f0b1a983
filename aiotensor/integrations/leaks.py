"""Find the objects and resources of aiotensor that a test has left in use."""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from aiotensor.errors import ClosedError, UsageError
from aiotensor.runtime.affinity import LoopObject
from aiotensor.statistics import registry
from aiotensor.types import (
    ClientStatistics,
    PipeStatistics,
    PublisherStatistics,
    ReceiverStatistics,
    SenderStatistics,
    ServerStatistics,
    SubscriberStatistics,
)

__all__ = ["LeakCheck"]

# The resources that a test must release: for each kind of object, fields of its statistics and their meaning.
_HELD: dict[type, tuple[str, dict[str, str]]] = {
    SenderStatistics: (
        "TensorSender",
        {"in_flight": "permits in use", "bytes_in_use": "bytes of shared memory in use"},
    ),
    ReceiverStatistics: (
        "TensorReceiver",
        {
            "unclaimed_tensors": "tensors that were sent and never received",
            "leases": "living tensors that use shared memory",
        },
    ),
    ClientStatistics: ("MessageClient", {"in_flight": "requests without an answer"}),
    ServerStatistics: (
        "MessageServer",
        {"waiting": "requests that were never taken", "in_hand": "requests that were never answered"},
    ),
    PublisherStatistics: ("Publisher", {}),
    SubscriberStatistics: ("Subscriber", {"leases": "living tensors that use shared memory"}),
    PipeStatistics: (
        "RankPipe",
        {"unclaimed": "messages that were never received", "leases": "living tensors that use shared memory"},
    ),
}
_KINDS = {kind for kind, _ in _HELD.values()}  # without the parts of these objects
_OPEN = "still open"

_SETTLE_S = 1.0  # peers release permits and memory in frames that may still be in transit
_STEP_S = 0.02
_ANSWER_S = 1.0  # for the event loops of other threads


class LeakCheck:
    """Compare the objects and resources of aiotensor in use with those at the creation of this object."""

    def __init__(self) -> None:
        self._before = _usage()
        if self._before:  # objects of earlier tests that are garbage must not be attributed to this test
            gc.collect()
            self._before = _usage()
        registry.unclosed.clear()

    def in_use(self) -> list[str]:
        """Return a line for each resource in use, except open objects; waits for frames in transit."""
        return self._settled(lambda what: what != _OPEN)

    def left(self) -> list[str]:
        """Return a line for each resource in use, open object, and object that was never closed."""
        lines = self._settled(lambda _: True)
        while registry.unclosed:  # not an iteration, during which a finalizer could append
            name, endpoint = registry.unclosed.popleft()
            if name in _KINDS:
                lines.append(f"{name} at {endpoint}: was never closed")
        return lines

    def _settled(self, is_checked: Callable[[str], bool]) -> list[str]:
        end = time.monotonic() + _SETTLE_S
        while True:
            more = {key: count for key, count in (_usage() - self._before).items() if is_checked(key[2])}
            if not more or time.monotonic() > end:
                return [
                    f"{kind} at {endpoint}: {what}: {count}" for (kind, endpoint, what), count in more.items()
                ]
            gc.collect()  # only here, because it takes a tenth of a second
            _let_loops_run()


def _usage() -> Counter[tuple[str, str, str]]:
    """Count open objects and the resources that they use, by kind, endpoint and resource."""
    usage: Counter[tuple[str, str, str]] = Counter()
    for endpoint, statistics in registry.collect(_ANSWER_S).present:
        if type(statistics) not in _HELD:
            continue  # a server of a client, which is counted itself
        kind, fields = _HELD[type(statistics)]
        usage[kind, endpoint, _OPEN] += 1
        for field, what in fields.items():
            value = getattr(statistics, field)
            usage[kind, endpoint, what] += sum(value) if isinstance(value, tuple) else value
    return usage


def _let_loops_run() -> None:
    """Wait for a moment, and run the loops of this thread that run only during tests."""
    loops = set()
    for owner in registry.owners():
        if isinstance(owner, LoopObject) and isinstance(
            loop := owner.affinity.open_in, asyncio.AbstractEventLoop
        ):
            with suppress(UsageError, ClosedError):
                owner.affinity.check_place()
                loops.add(loop)
    for loop in loops:
        if not loop.is_running() and not loop.is_closed():
            loop.run_until_complete(asyncio.sleep(0))
    # Peers in other threads handle frames in the meantime. No event reports that all statistics have settled.
    time.sleep(_STEP_S)
