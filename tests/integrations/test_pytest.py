"""The fixtures for tests of applications, and the tests that docs/guide.md shows."""

import re
from pathlib import Path

import pytest

# pytester removes the modules that its tests have imported. A second import of the library would have another
# registry.
import aiotensor.blocking
import aiotensor.integrations.pytest  # noqa: F401

pytest_plugins = ["pytester"]

PAGE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
[SECTION] = re.findall(r"^## Test an application\n(.*?)^## ", PAGE, re.DOTALL | re.M)
CONFTEST, SERVER, TESTS = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.M)

# An earlier test may have imported the plugin before pytest could rewrite it. Starlette prefers httpx2.
CONFIG = """
[tool.pytest.ini_options]
pythonpath = ["."]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
filterwarnings = [
    "error",
    "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
    "ignore:Using .httpx. with .starlette.testclient. is deprecated",
]
"""

# Without the summary, which repeats the whole text of a failure if the variable CI is set.
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-rN")


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """Return a folder for the tests of a user, with the fixtures enabled."""
    pytester.makepyprojecttoml(CONFIG)
    pytester.makeconftest(CONFTEST)
    return pytester


def run(inner: pytest.Pytester, program: str, **counts: int) -> pytest.RunResult:
    """Run the tests of a program, and check the numbers of their outcomes."""
    inner.makepyfile(program)
    result = inner.runpytest_inprocess(*OPTIONS)
    result.assert_outcomes(**counts)
    return result


def lines_of(result: pytest.RunResult) -> list[str]:
    """Return the lines of the leak check, with all addresses replaced."""
    return [re.sub(r"\w+://\S+:", "X:", line[2:]) for line in result.outlines if line.startswith("- ")]


def test_the_tests_of_the_guide_pass_in_a_new_process(inner: pytest.Pytester) -> None:
    inner.makepyfile(server=SERVER, test_server=TESTS)
    result = inner.runpytest_subprocess(*OPTIONS)
    result.assert_outcomes(passed=3)


HEAD = """
import asyncio
import gc
import tempfile
import threading
from contextlib import contextmanager

import pytest
import torch
from aiotensor import TensorReceiver, TensorSender, UsageError, blocking

kept = []


"""


def test_a_test_that_closes_all_objects_passes(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        HEAD
        + """
def test_with_threads(engine_address):
    with blocking.TensorReceiver(engine_address) as receiver, blocking.TensorSender(engine_address) as sender:
        assert receiver.receive(sender.send(torch.arange(10_000))).sum() == 49995000


async def test_with_tasks(engine_address):
    async with TensorReceiver(engine_address) as receiver, TensorSender(engine_address) as sender:
        tensor = await receiver.receive(await sender.send(torch.arange(10_000)))
        kept_in_a_cycle = [tensor]
        kept_in_a_cycle.append(kept_in_a_cycle)


def test_with_an_engine(engine_address, tensor_engine):
    engine = tensor_engine(list, len)
    with blocking.TensorSender(engine_address) as sender:
        with blocking.MessageClient(engine_address, sender=sender, reply_type=int) as client:
            assert client.request([torch.zeros(10_000)]) == 1
    assert engine.requests[0][0].shape == (10_000,)
""",
        passed=3,
    )
    assert "warning" not in result.stdout.str()


def test_objects_that_were_left_open_fail_the_test(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        HEAD
        + """
async def test_in_a_variable_of_a_test(engine_address):
    sender = await TensorSender(engine_address).__aenter__()
    kept.append(sender)


async def test_collected(engine_address):
    with pytest.warns(ResourceWarning):
        receiver = await TensorReceiver(engine_address).__aenter__()
        del receiver
        gc.collect()


def test_in_a_thread(engine_address):
    kept.append(blocking.TensorSender(engine_address).__enter__())


def test_in_a_thread_and_collected(engine_address):
    with pytest.warns(ResourceWarning):
        sender = blocking.TensorSender(engine_address).__enter__()
        del sender
        gc.collect()


def test_afterwards(engine_address):
    kept.pop().close()
    with pytest.warns(ResourceWarning):
        kept.clear()
        gc.collect()
""",
        passed=5,
        errors=4,
    )
    assert lines_of(result) == [
        "TensorSender at X: was never closed",
        "TensorReceiver at X: was never closed",
        "TensorSender at X: still open: 1",
        "TensorSender at X: was never closed",
    ]


def test_resources_that_were_left_in_use_fail_the_test(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        HEAD
        + """
@pytest.fixture(scope="module")
def pair():
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder, both(f"engine://{folder}/e") as pair:
        yield pair


@contextmanager
def both(address):
    with blocking.TensorReceiver(address) as receiver, blocking.TensorSender(address) as sender:
        yield receiver, sender


def test_a_tensor_is_not_received(pair, aiotensor_leak_check):
    receiver, sender = pair
    kept.append(sender.send(torch.zeros(10)))
    receiver.arrived(kept[0])


def test_a_tensor_is_kept(pair, aiotensor_leak_check):
    receiver, sender = pair
    receiver.receive(kept.pop())
    kept.append(receiver.receive(sender.send(torch.zeros(10_000))))


def test_a_permit_and_memory_are_kept(pair, aiotensor_leak_check):
    kept.clear()
    receiver, sender = pair
    message = sender.message()
    message.__enter__()
    kept.extend([message, message.allocate((1 << 20,), torch.uint8)])


def test_nothing_more_is_kept(pair, aiotensor_leak_check):
    kept.pop()
    kept.pop().__exit__(None, None, None)


def test_the_engine_keeps_a_tensor(engine_address, tensor_engine):
    tensor_engine(list, kept.extend)
    with blocking.TensorSender(engine_address) as sender:
        with blocking.MessageClient(engine_address, sender=sender, reply_type=None) as client:
            client.request([torch.zeros(10_000)])


def test_no_request_refers_to_a_tensor(engine_address, tensor_engine):
    kept.clear()
    tensor_engine(list, len)
    with blocking.TensorSender(engine_address) as sender:
        with blocking.MessageClient(engine_address, sender=sender, reply_type=int) as client:
            sender.send(torch.zeros(10))
            client.request([torch.zeros(10_000)])  # its tensor arrives after the other one


@pytest.mark.parametrize("which", [1, 2])
def test_a_failed_test_is_not_checked(engine_address, which):
    kept.append(blocking.TensorSender(engine_address).__enter__())
    assert which == 3


def test_afterwards():
    kept.pop().close()
    kept.pop().close()
""",
        passed=7,
        failed=2,
        errors=5,
    )
    memory = "bytes of shared memory in use"
    assert lines_of(result) == [
        "TensorReceiver at X: tensors that were sent and never received: 1",
        "TensorSender at X: permits in use: 1",
        "TensorReceiver at X: living tensors that use shared memory: 1",
        f"TensorSender at X: {memory}: 40000",
        "TensorSender at X: permits in use: 1",
        f"TensorSender at X: {memory}: {(1 << 20) - 40_000}",  # more than before the test
        "TensorReceiver at X: living tensors that use shared memory: 1",
        "TensorReceiver at X: tensors that were sent and never received: 1",
    ]


def test_an_engine_serves_both_kinds_of_addresses_and_is_one_of_several(inner: pytest.Pytester) -> None:
    run(
        inner,
        HEAD
        + """
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


def test_swapped_arguments_of_an_engine_raise_with_the_right_order(inner: pytest.Pytester) -> None:
    run(
        inner,
        HEAD
        + """
def model(message):
    return 1


def test_order(tensor_engine):
    with pytest.raises(TypeError, match="message_type must be a type, and the handler is the second"):
        tensor_engine(model, list)
""",
        passed=1,
    )


def test_a_loop_that_runs_only_during_tests_learns_of_released_memory(inner: pytest.Pytester) -> None:
    run(
        inner,
        HEAD
        + """
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sender():
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        async with TensorSender(f"engine://{folder}/e") as sender:
            yield sender, f"engine://{folder}/e"


async def test_the_other_side_releases_memory_after_the_test(sender, aiotensor_leak_check):
    sender, address = sender
    with blocking_receiver(address) as receiver:
        handle = await sender.send(torch.zeros(10_000))
        tensor = await asyncio.to_thread(receiver.receive, handle)


@contextmanager
def blocking_receiver(address):
    receiver = blocking.TensorReceiver(address)
    enter = threading.Thread(target=receiver.__enter__)
    enter.start()
    enter.join()
    yield receiver
    leave = threading.Thread(target=receiver.close)
    leave.start()
    leave.join()


async def test_a_permit_is_kept(sender, aiotensor_leak_check):
    kept.append(sender[0].message())
    await kept[0].__aenter__()


async def test_afterwards(sender):
    await kept[0].__aexit__(None, None, None)
""",
        passed=3,
        errors=1,
    )
