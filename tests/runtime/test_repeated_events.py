"""Events that a peer repeats at any rate are logged in at most one line per interval, and all are counted."""

import asyncio
import itertools
import weakref

from aiotensor.runtime.logs import RepeatedEvent

_SHORT_S = 0.001


async def test_no_two_lines_are_closer_than_the_interval_and_no_event_is_lost() -> None:
    loop = asyncio.get_running_loop()
    written: list[tuple[float, int]] = []
    repeated = RepeatedEvent(lambda count: written.append((loop.time(), count)), 0.02)
    events = 0
    while len(written) < 10:
        repeated.add()
        events += 1
        await asyncio.sleep(0)
    repeated.close()
    assert sum(count for _, count in written) == events
    times = [time for time, _ in written[:-1]]  # closing writes the last at once
    # The timers of uvloop count whole milliseconds.
    assert all(later - earlier >= 0.019 for earlier, later in itertools.pairwise(times))


async def test_an_event_after_a_quiet_interval_is_logged_immediately() -> None:
    lines: list[int] = []
    repeated = RepeatedEvent(lines.append, _SHORT_S)
    repeated.add()
    await asyncio.sleep(2 * _SHORT_S)  # its timer began later, and so it ends after the interval
    repeated.add()
    assert lines == [1, 1]
    repeated.close()


async def test_closing_logs_the_pending_count_and_cancels_the_timer() -> None:
    lines: list[int] = []
    repeated = RepeatedEvent(lines.append, 60.0)
    for _ in range(5):
        repeated.add()
    repeated.close()
    repeated.close()
    assert lines == [1, 4]
    lives = weakref.ref(repeated)
    del repeated  # which a timer would keep
    assert lives() is None
