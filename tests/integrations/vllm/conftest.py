"""Fixtures of the tests of vLLM's hooks: a sender and a receiver that share this process."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from aiotensor import TensorQueue, blocking
from aiotensor.integrations.vllm import TensorConsumer, TensorProvider


class Ends(NamedTuple):
    """Both ends of the transport, in this process."""

    consumer: TensorConsumer
    provider: TensorProvider
    sender: blocking.TensorSender
    receiver: blocking.TensorReceiver


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
