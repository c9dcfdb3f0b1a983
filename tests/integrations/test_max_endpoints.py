"""The number of series is limited, and the sums of the endpoints beyond the limit are correct."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch

from aiotensor import TensorSender, TooLargeError
from tests.integrations.scraping import Numbers, at, new_registry, scrape

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

ERRORS = "aiotensor_sender_errors_total{type=TooLargeError}"
LIMIT = "aiotensor_sender_permits_limit"
FORGOTTEN = 260  # more closed endpoints than a process remembers


class Senders:
    """Open senders, each at its own endpoint. They need no receivers."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._open: dict[str, AsyncExitStack] = {}

    def at(self, name: str) -> str:
        """Return the endpoint of a name."""
        return f"unix://{self.folder}/{name}"

    async def open(self, *names: str, permits: int = 8, errors: int = 0) -> None:
        """Open senders, and have each raise errors."""
        for name in names:
            self._open[name] = stack = AsyncExitStack()
            sender = await stack.enter_async_context(TensorSender(self.at(name), permits))
            for _ in range(errors):
                with pytest.raises(TooLargeError):
                    await sender.allocate((1 << 40,), torch.int64)

    async def close(self, *names: str) -> None:
        """Close senders."""
        for name in names:
            await self._open.pop(name).aclose()

    async def open_and_close(self, count: int) -> None:
        """Open and close further endpoints; the process remembers the 256 endpoints that it closed last."""
        for number in range(count):
            await self.open(f"further{number}")
            await self.close(f"further{number}")
        await asyncio.sleep(0)  # the last one is recorded as closed in the next iteration

    async def close_all(self) -> None:
        """Close all senders."""
        await self.close(*self._open)


@asynccontextmanager
async def senders() -> AsyncIterator[Senders]:
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        those = Senders(folder)
        try:
            yield those
        finally:
            await those.close_all()


def endpoints(numbers: Numbers) -> set[str]:
    return {value for _, labels in numbers for label, value in labels if label == "endpoint"}


async def test_the_number_of_series_does_not_grow_with_the_number_of_endpoints() -> None:
    registry = new_registry(max_endpoints=3)
    async with senders() as those:
        await those.open(*map(str, range(4)))
        size = len(scrape(registry))
        for number in range(4, 60):
            await those.open(f"{number}")
            assert len(scrape(registry)) == size
        numbers = scrape(registry)
        assert endpoints(numbers) == {those.at("0"), those.at("1"), those.at("2"), "other"}
        assert at(numbers, those.at("0"))[LIMIT] == 8
        assert at(numbers, "other")[LIMIT] == 57 * 8


async def test_the_sum_of_other_endpoints_stays_correct_while_they_open_and_close() -> None:
    registry = new_registry(max_endpoints=1)
    async with senders() as those:
        await those.open("named", "other")
        before = at(scrape(registry), "other")[ERRORS]
        sums, expected = [before], before
        for number in range(FORGOTTEN):
            await those.open(f"{number}", errors=1 + number % 2)
            expected += 1 + number % 2
            if number % 3 == 0:  # else it is closed before its first scrape
                sums.append(at(scrape(registry), "other")[ERRORS])
                assert sums[-1] == expected
            if number >= 5:
                await those.close(f"{number - 5}")
        await those.open_and_close(FORGOTTEN)
        numbers = scrape(registry)
        assert at(numbers, "other")[ERRORS] == expected
        assert ERRORS in at(numbers, those.at("named"))
        remembered = scrape(new_registry(max_endpoints=1000))
        assert sum(at(remembered, endpoint)[ERRORS] for endpoint in endpoints(remembered)) < expected
    assert sums == sorted(sums)


async def test_a_new_endpoint_takes_the_place_of_the_one_closed_first() -> None:
    registry = new_registry(max_endpoints=3)
    async with senders() as those:
        await those.open("a", "b", "c")
        assert endpoints(scrape(registry)) - {"other"} == {those.at(name) for name in "abc"}
        await those.close("b")
        await those.close("a")
        await asyncio.sleep(0)
        # Closed endpoints keep their names until an open one needs them.
        await those.open("closed again")
        await those.close("closed again")
        await asyncio.sleep(0)
        assert endpoints(scrape(registry)) - {"other"} == {those.at(name) for name in "abc"}
        await those.open("d")
        assert endpoints(scrape(registry)) - {"other"} == {those.at(name) for name in "acd"}
        await those.open("e", "f")
        numbers = scrape(registry)
        assert endpoints(numbers) == {"other"} | {those.at(name) for name in "cde"}
        assert at(numbers, "other")[LIMIT] == 8  # of f


async def test_an_endpoint_keeps_its_name_or_other_while_it_is_open() -> None:
    registry = new_registry(max_endpoints=2)
    async with senders() as those:
        await those.open("a", "b", "c", errors=1)
        before = at(scrape(registry), "other")[ERRORS]
        await those.close("a")
        await those.open_and_close(FORGOTTEN)
        for _ in range(2):
            numbers = scrape(registry)
            assert at(numbers, those.at("b"))[LIMIT] == at(numbers, "other")[LIMIT] == 8
            assert those.at("c") not in endpoints(numbers)
        # Opened again, it is like a new one. Its errors are not counted twice.
        await those.close("c")
        await asyncio.sleep(0)
        scrape(registry)
        await those.open("c")
        assert at(scrape(registry), those.at("c"))[ERRORS] == 0
        await those.close("c")
        await those.open("c", errors=1)
        numbers = scrape(registry)
        assert at(numbers, those.at("c"))[ERRORS] == 1
        assert at(numbers, "other")[ERRORS] == before
        assert LIMIT not in at(numbers, "other")
