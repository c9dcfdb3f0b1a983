"""The fixtures for tests of applications."""

import pytest

# pytester removes the modules that its tests have imported. A second import of the library would have another
# registry.
import aiotensor.blocking
import aiotensor.integrations.pytest  # noqa: F401

pytest_plugins = ["pytester"]

# An earlier test may have imported the plugin before pytest could rewrite it.
CONFIG = """
[tool.pytest.ini_options]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
filterwarnings = ["error", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
"""

# Without the summary, which repeats the whole text of a failure if the variable CI is set.
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-rN")

TESTS = """
import asyncio
import threading

import pytest
import torch
from aiotensor import PeerLostError, UsageError, blocking
from aiotensor.channel import MessageClient


def test_a_function_answers(engine_address, tensor_engine):
    engine = tensor_engine(list, len)
    with blocking.MessageClient(engine_address, int) as client:
        assert client.request([torch.zeros(10_000)]) == 1
    assert engine.requests[0][0].shape == (10_000,)


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_engine_exits(engine_address, tensor_engine, is_async):
    def exit_now(message):
        raise SystemExit(1)

    async def exit_in_loop(message):
        raise SystemExit(1)

    tensor_engine(list, exit_in_loop if is_async else exit_now)
    async with MessageClient(engine_address, int) as client:
        with pytest.raises(PeerLostError):
            await client.request([1])


async def test_an_engine_stops_during_a_request(engine_address, tensor_engine):
    begun = threading.Event()

    async def never(message):
        begun.set()
        await asyncio.Event().wait()

    engine = tensor_engine(list, never)
    async with MessageClient(engine_address, int) as client:
        asking = asyncio.create_task(client.request([1]))
        await asyncio.to_thread(begun.wait)
        engine.stop()
        with pytest.raises(PeerLostError):
            await asking


def ask(address):
    with blocking.MessageClient(address, int) as client:
        return client.request([torch.zeros(10_000)], timeout=10)


async def double(message):
    return 2 * len(message)


def test_engines(socket_folder, engine_address, tensor_engine):
    first = tensor_engine(list, len)
    second = tensor_engine(list, double, address=f"unix://{socket_folder}/second.sock")
    assert ask(first.address) == 1
    assert ask(second.address) == 2
    assert [len(engine.requests) for engine in (first, second)] == [1, 1]
    assert repr(first) == f"<Engine running, at {engine_address}, 1 requests>"
    with first.paused():
        assert "paused" in repr(first)
        with blocking.MessageClient(engine_address, int) as client, pytest.raises(TimeoutError):
            client.request([], timeout=0.05)
    assert len(first.requests) == 1
    first.stop()
    first.stop()
    assert "stopped" in repr(first)
    with pytest.raises(UsageError, match="runs already"):
        second.start()
    assert first.start() is None
    assert ask(engine_address) == 1
"""


def test_the_tests_of_a_user_with_threads_and_with_tasks_use_the_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml(CONFIG)
    pytester.makeconftest('pytest_plugins = ["aiotensor.integrations.pytest"]')
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess(*OPTIONS)
    result.assert_outcomes(passed=5)
    assert "warning" not in result.stdout.str()
