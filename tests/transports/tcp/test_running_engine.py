"""The thread of an engine."""

import asyncio
import threading
from collections.abc import Hashable

import pytest

from aiotensor.transports.tcp.engine import RunningEngine

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

KEY = b"key"


class WaitingEngine:
    """An engine whose peer never writes."""

    address = b"address"

    def __init__(self) -> None:
        self.was_polled = threading.Event()
        self.was_closed = False

    def connect(self, address: bytes) -> None:
        raise AssertionError("it has no peer")

    def register(self, memory: memoryview) -> bytes:
        return KEY

    def unregister(self, key: bytes) -> None:
        assert key == KEY

    def write(self, source: memoryview, key: bytes, start: int) -> Hashable:
        raise AssertionError("it has no peer")

    def poll(self) -> list[tuple[Hashable, str]]:
        self.was_polled.set()
        return []

    def close(self) -> None:
        self.was_closed = True


async def test_calls_end_the_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiotensor.transports.tcp.engine.TURN_S", 3600.0)
    engine, failures, closed = WaitingEngine(), list[str](), asyncio.Event()
    running = RunningEngine(failures.append)
    assert await running.open(lambda: engine) == engine.address
    running.begin_polling()
    for _ in range(3):
        engine.was_polled.clear()
        await asyncio.to_thread(engine.was_polled.wait)
        assert await running.register(memoryview(b"")) == KEY
    running.close(closed.set)
    await closed.wait()
    assert engine.was_closed
    assert not failures
