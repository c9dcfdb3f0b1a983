"""Fixtures of the tests of vLLM's hooks: the codecs, and a sender and a receiver that share this process."""

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from aiotensor import TensorQueue, blocking
from aiotensor.integrations.vllm import TensorConsumer, TensorProvider
from tests.integrations.vllm.codecs import CODECS, Codec

# Read when vLLM is imported, here and in the processes that tests start. The wheel is built for CUDA.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class Ends(NamedTuple):
    """Both ends of the transport, in this process."""

    consumer: TensorConsumer
    provider: TensorProvider
    sender: blocking.TensorSender
    receiver: blocking.TensorReceiver


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ignore a warning of torch that vLLM's decoder causes."""
    item.add_marker(pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"))


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    """Return each encoder and decoder in turn."""
    return CODECS[request.param]


@pytest.fixture
def permits() -> int:
    """Return the number of messages that may be in flight; a test may override it."""
    return 8


@pytest.fixture
def ends(permits: int) -> Iterator[Ends]:
    """Open a receiver and an admitted sender."""
    queue = TensorQueue()
    with (
        blocking.TensorReceiver(queue) as receiver,
        blocking.TensorSender(queue, permits, arena_bytes=64 << 20) as sender,
    ):
        sender.ready()
        yield Ends(TensorConsumer(sender), TensorProvider(receiver), sender, receiver)
    queue.close()
