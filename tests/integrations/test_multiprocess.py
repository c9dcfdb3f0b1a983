"""Several workers serve one application: their numbers are combined, including those of a killed worker."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from aiotensor import TensorReceiver, UsageError
from aiotensor.integrations.prometheus import MultiprocessPublisher
from tests.integrations.published import publish_to
from tests.integrations.scraping import at, scrape
from verification.patterns import pattern
from verification.places import LINKS
from verification.processes import peers
from verification.processes.peers import Peer, State
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SELDOM_S = 3600.0


class Workers(NamedTuple):
    """Two worker processes with a sender each, and the receiver of both here."""

    workers: list[Peer]
    receiver: TensorReceiver
    endpoint: str
    folder: Path

    def registry(self) -> CollectorRegistry:
        """Return what the process that is scraped would gather by."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self.folder))  # type: ignore[no-untyped-call]
        return registry

    def gathered(self) -> dict[str, float]:
        """Return the numbers of all workers, as the scraped process would export them."""
        registry = self.registry()
        while True:
            try:
                return at(scrape(registry), self.endpoint)
            except struct.error:  # prometheus_client cannot read a file that it has just created
                continue

    async def until(self, condition: Callable[[dict[str, float]], bool]) -> None:
        """Wait until the workers have published something."""
        while not condition(self.gathered()):
            await asyncio.sleep(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the workers' metrics."""
    return tmp_path


@asynccontextmanager
async def two_workers(folder: Path, **options: Any) -> AsyncIterator[Workers]:
    with LINKS["unix"].place() as place:
        assert isinstance(place.endpoint, str)
        async with (
            peers.peers(place.endpoint, 2, first=partial(publish_to, str(folder))) as workers,
            TensorReceiver(place.endpoint) as receiver,
        ):
            for worker in workers:
                await worker.call(_begin, options)
            yield Workers(workers, receiver, place.endpoint, folder)


async def _begin(state: State, options: dict[str, Any]) -> None:
    publisher = MultiprocessPublisher(**options)
    await publisher.__aenter__()
    state.others["publisher"] = publisher
    await peers.open_sender(state, 3)


async def _end(state: State) -> None:
    await state.sender.aclose()
    await state.others["publisher"].__aexit__(None, None, None)


async def _serve_again(state: State, options: dict[str, Any]) -> None:
    await _begin(state, options)
    await state.sender.send(pattern(0, 3))


async def _wait_for_a_permit(state: State) -> None:
    async with state.sender.message(), state.sender.message(), state.sender.message():
        waiting = asyncio.create_task(state.sender.send(pattern(0, 3)))  # no permit becomes free
        await until(lambda: state.sender.statistics().waiting == 1)
        await asyncio.sleep(0.01)  # the least that the wait is to last
        waiting.cancel()
        await asyncio.wait([waiting])


async def _send(state: State, count: int) -> None:
    for _ in range(count):
        await state.sender.send(pattern(0, 3))
        await state.sender.drain()


async def _send_and_take(both: Workers, worker: Peer, count: int) -> None:
    sending = worker.start(_send, count)
    for _ in range(count):
        await anext(both.receiver)
    await sending


async def test_metrics_of_two_workers_are_added_and_survive_a_killed_worker(folder: Path) -> None:
    async with two_workers(folder, interval_s=0.02) as both:
        first, second = both.workers
        await _send_and_take(both, first, 2)
        await _send_and_take(both, second, 3)
        await first.call(_wait_for_a_permit)
        # A scrape reads one file of a worker after the other, while the worker writes to them.
        expected = {
            "aiotensor_sender_tensors_sent_total": 5,
            "aiotensor_sender_sent_bytes_total": 5 * 24,
            "aiotensor_sender_permits_limit": 6,
            "aiotensor_sender_permits_in_use": 0,
            "aiotensor_sender_permits_peak": 3,  # the largest of all workers
            "aiotensor_sender_wait_seconds_bucket{for=permit,le=0.005}": 0,
            "aiotensor_sender_wait_seconds_bucket{for=permit,le=+Inf}": 1,
            "aiotensor_sender_wait_seconds_count{for=permit}": 1,
            "aiotensor_sender_errors_total{type=PeerLostError}": 0,
        }
        await both.until(lambda now: expected.items() <= now.items())
        # Written after the buckets; uvloop counts milliseconds.
        await both.until(lambda now: now.get("aiotensor_sender_wait_seconds_sum{for=permit}", 0) > 0.005)

        second.kill()
        await second.ended()
        mark_process_dead(second.pid, str(folder))  # type: ignore[no-untyped-call]
        numbers = both.gathered()
        assert numbers["aiotensor_sender_tensors_sent_total"] == 5
        assert numbers["aiotensor_sender_permits_limit"] == 3
        await _send_and_take(both, first, 1)
        await both.until(lambda now: now["aiotensor_sender_tensors_sent_total"] == 6)


async def test_a_worker_publishes_when_it_begins_and_for_the_last_time_when_it_ends(folder: Path) -> None:
    async with two_workers(folder, interval_s=SELDOM_S) as both:
        for worker in both.workers:
            await _send_and_take(both, worker, 2)
        assert "aiotensor_sender_tensors_sent_total" not in both.gathered()  # published before they were open
        assert os.listdir(folder)
        for done, worker in enumerate(both.workers, start=1):
            await worker.call(_end)
            assert both.gathered()["aiotensor_sender_tensors_sent_total"] == 2 * done
        # In a process that continues, the count continues from there.
        await both.workers[0].call(_serve_again, {"interval_s": SELDOM_S})
        numbers = both.gathered()
        assert numbers["aiotensor_sender_tensors_sent_total"] == 4
        await both.workers[0].call(_end)
        numbers = both.gathered()
        assert numbers["aiotensor_sender_tensors_sent_total"] == 5
        assert numbers.get("aiotensor_sender_permits_limit", 0) == 0


def test_a_multiprocess_publisher_without_its_variable_raises_usage_error() -> None:
    with pytest.raises(UsageError, match="set PROMETHEUS_MULTIPROC_DIR to a folder before"):
        MultiprocessPublisher()


def test_invalid_arguments_are_refused() -> None:
    for interval_s in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="interval_s must be positive"):
            MultiprocessPublisher(interval_s=interval_s)
