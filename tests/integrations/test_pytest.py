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

HEAD = """
import pytest
import torch
from aiotensor import PeerLostError, RemoteError, TensorReceiver, TensorSender, UsageError, blocking
from aiotensor.channel import MessageClient


"""


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """Return a folder for the tests of a user, with the fixtures enabled."""
    pytester.makepyprojecttoml(CONFIG)
    pytester.makeconftest('pytest_plugins = ["aiotensor.integrations.pytest"]')
    return pytester


def run(inner: pytest.Pytester, program: str, **counts: int) -> None:
    """Run the tests of a program, and check the numbers of their outcomes."""
    inner.makepyfile(HEAD + program)
    result = inner.runpytest_inprocess(*OPTIONS)
    result.assert_outcomes(**counts)
    assert "warning" not in result.stdout.str()


def test_tests_with_threads_and_with_tasks_use_the_fixtures(inner: pytest.Pytester) -> None:
    run(
        inner,
        """
def test_an_address(engine_address):
    with blocking.TensorReceiver(engine_address) as receiver, blocking.TensorSender(engine_address) as sender:
        assert receiver.receive(sender.send(torch.arange(10_000))).sum() == 49995000


def test_a_function_answers(engine_address, tensor_engine):
    engine = tensor_engine(list, len)
    with blocking.TensorSender(engine_address) as sender:
        with blocking.MessageClient(engine_address, sender=sender, reply_type=int) as client:
            assert client.request([torch.zeros(10_000)]) == 1
    assert engine.requests[0][0].shape == (10_000,)


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_engine_exits(engine_address, tensor_engine, is_async):
    def exit_now(message):
        raise SystemExit(1)

    async def exit_in_loop(message):
        raise SystemExit(1)

    tensor_engine(list, exit_in_loop if is_async else exit_now)
    async with MessageClient(engine_address, reply_type=int) as client:
        with pytest.raises(PeerLostError):
            await client.request([1])


async def test_a_function_raises_and_its_engine_stops(engine_address, tensor_engine):
    def broken_model(message):
        raise ValueError("out of memory")

    engine = tensor_engine(list, broken_model)
    async with MessageClient(engine_address, reply_type=int) as client:
        with pytest.raises(RemoteError, match="out of memory"):
            await client.request([1])
        engine.stop()
        with pytest.raises(PeerLostError):
            await client.request([2])
""",
        passed=5,
    )


def test_an_engine_serves_both_kinds_of_addresses_and_is_one_of_several(inner: pytest.Pytester) -> None:
    run(
        inner,
        """
def ask(tensors, messages):
    with blocking.TensorSender(tensors) as sender:
        with blocking.MessageClient(messages, sender=sender, reply_type=int) as client:
            return client.request([torch.zeros(10_000)], timeout=10)


async def double(message):
    return 2 * len(message)


def test_engines(socket_folder, engine_address, tensor_engine):
    first = tensor_engine(list, len)
    second = tensor_engine(list, double, address=f"engine://{socket_folder}/second")
    assert ask(f"unix://{socket_folder}/engine/tensors", f"ipc://{socket_folder}/engine/messages") == 1
    assert ask(second.address, second.address) == 2
    assert [len(engine.requests) for engine in (first, second)] == [1, 1]
    assert repr(first) == f"<Engine running, at {engine_address}, 1 requests>"
    with first.paused():
        assert "paused" in repr(first)
    first.stop()
    first.stop()
    assert "stopped" in repr(first)
    with pytest.raises(UsageError, match="runs already"):
        second.start()
    assert first.start() is None
    assert ask(engine_address, engine_address) == 1
""",
        passed=1,
    )
