"""The memory in which the bytes of a peer on another machine arrive, after it was closed."""

import pytest

from aiotensor.receiving.landing import LandingSegment
from aiotensor.runtime.worker import Worker

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_a_closed_landing_ignores_bytes_and_freed_blocks() -> None:
    worker = Worker("aiotensor-receiver")
    landing = LandingSegment(0, 1 << 16, 1 << 16, worker)
    mapped = landing.mapped()
    landing.close()
    assert landing.store(0, 8, 0, memoryview(b"12345678"), lambda failure: pytest.fail(failure))
    landing.free(0)
    landing.free(64)
    mapped.close()
    worker.close()
