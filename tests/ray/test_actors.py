"""Tensors travel between a driver and actors of Ray."""

import os
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from aiotensor import PeerLostError, UsageError, blocking
from tests.ray.actors import Engine
from verification.processes import watch

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        yield f"unix://{folder}/frames"


@pytest.fixture
def engine(address: str) -> Iterator[Any]:
    actor = ray.remote(Engine).remote(address)
    ray.get(actor.pid.remote())  # it has opened its receiver
    yield actor
    ray.kill(actor)


def test_a_handle_is_an_argument_of_an_actor_that_receives_its_tensor(engine: Any, address: str) -> None:
    with blocking.TensorSender(address, max_concurrent_videos=2) as sender:
        for number in range(10):
            tensor = torch.full((1_000_000,), number)
            assert ray.get(engine.sum_of.remote(sender.send(tensor, timeout=10))) == 1_000_000 * number
        sender.drain(timeout=10)
        ray.get(engine.close.remote())


def test_an_open_object_is_refused_with_advice(engine: Any, address: str) -> None:
    with blocking.TensorSender(address) as sender:
        for use in (engine.take.remote, ray.put, lambda value: ray.remote(lambda: value).remote()):
            for value in (sender, sender.inner):
                with pytest.raises(UsageError, match="pass its address or its queue to the other process"):
                    use(value)
        assert ray.get(engine.sum_of.remote(sender.send(torch.ones(3)))) == 3  # it still works


def test_a_received_tensor_is_copied_into_an_argument(engine: Any, address: str) -> None:
    own = f"{address}-2"
    with blocking.TensorReceiver(own) as receiver, blocking.TensorSender(own) as sender:
        tensor = receiver.receive(sender.send(torch.ones(100_000)))

        assert ray.get(engine.take.remote(tensor)) == "Tensor 100000.0"
        assert ray.get(engine.take.remote(tensor[:3])) == "Tensor 3.0"


def test_a_killed_actor_releases_its_senders_and_leaves_no_memory(engine: Any, address: str) -> None:
    pid = ray.get(engine.pid.remote())
    before = watch.memfds(os.getpid())
    with blocking.TensorSender(address, max_concurrent_videos=1) as sender:
        sender.ready(timeout=10)
        sender.send(torch.ones(1_000_000), timeout=10)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PeerLostError):
            sender.drain(timeout=10)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(engine.pid.remote())
    assert watch.memfds(os.getpid()) == before
