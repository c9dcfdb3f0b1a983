"""Any order of everything that users, peers and the kernel can do, over both links, on both loops.

The suite runs the same ones each time, and few; `make model EXAMPLES=5000` runs as many others as it is told.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, rule

from tests.model.settled import SettledWorld

pytestmark = pytest.mark.timeout(900)  # what fails takes minutes to be made short

_EXAMPLES = int(os.environ.get("AIOTENSOR_EXAMPLES", "0"))

_SETTINGS = settings(
    max_examples=_EXAMPLES or 100,
    derandomize=not _EXAMPLES,
    stateful_step_count=45,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class WholeProtocol(SettledWorld):
    """What must be so after every step, whatever is on its way."""

    @rule()
    def settle_and_compare(self) -> None:
        self.settle()

    @invariant()
    def no_bound_is_exceeded_and_nobody_is_overtaken(self) -> None:
        for sender in self.senders:
            now = sender.sender.statistics()
            assert now.in_flight <= now.peak_in_flight <= now.max_concurrent_videos == sender.limit
            assert now.bytes_in_use <= now.peak_bytes_in_use <= now.arena_bytes == sender.arena_bytes
        for sender in self.living:
            permits = sender.sender._outgoing.permits.budget
            assert not permits.waiting or permits.in_use == permits.limit, "a permit is free, and one waits"
            begun = [m for m in sender.messages if m.opened is not None or m.number is not None]
            latest = max((m.began for m in begun if m.waits_in_line), default=0)
            later = [
                call for call in self.of(sender, "send", "several", "message") if call.begun.began > latest
            ]
            assert permits.waiting <= len(later), "one who came later got a permit first"
            later = [call for call in self.of(sender, "allocate") if call.began > sender.latest_allocation]
            later += self.of(sender, "send", "several", "send in a message")
            waiting = sender.sender._outgoing.memory.gate.budget.waiting
            assert waiting <= len(later), "one who came later got memory first"
        for receiver in self.receivers:
            here = receiver.receiver.statistics()
            limit = here.max_unclaimed_messages
            assert limit is None or here.promised_messages <= limit
            assert here.leased_bytes <= here.peak_leased_bytes


class _OverQueue(WholeProtocol):
    link = "queue"


class _OverUnix(WholeProtocol):
    link = "unix"


class _OverQueueOnUvloop(_OverQueue):
    loop = "uvloop"


class _OverUnixOnUvloop(_OverUnix):
    loop = "uvloop"


TestAnythingOverAQueue = _OverQueue.TestCase
TestAnythingOverASocket = _OverUnix.TestCase
TestAnythingOverAQueueOnUvloop = _OverQueueOnUvloop.TestCase
TestAnythingOverASocketOnUvloop = _OverUnixOnUvloop.TestCase
for _case in (
    TestAnythingOverAQueue,
    TestAnythingOverASocket,
    TestAnythingOverAQueueOnUvloop,
    TestAnythingOverASocketOnUvloop,
):
    _case.settings = _SETTINGS
del _case
