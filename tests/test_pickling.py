"""Open objects cannot be pickled or copied, and the values that they return can."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiotensor import TensorReceiver, TensorSender, UsageError, blocking
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.queues import MessageQueue

DUPLICATIONS = [pickle.dumps, copy.copy, copy.deepcopy]


@pytest.mark.parametrize("duplicate", DUPLICATIONS)
def test_no_object_can_be_pickled_or_copied(duplicate: Callable[[Any], Any], folder: Path) -> None:
    address = f"unix://{folder}/s"
    with MessageQueue(folder=folder, producers=1, consumers=1) as queue:
        for one in (
            TensorSender(address),
            TensorReceiver(address),
            MessageClient(address, answer_type=dict),
            MessageServer(address, dict),
            Publisher(address),
            Subscriber(address, dict),
            queue.producer(),
            queue.consumer(),
            blocking.TensorSender(address),
            blocking.MessageClient(address, answer_type=dict),
        ):
            with pytest.raises(UsageError, match=f"a {type(one).__name__} cannot be pickled or copied"):
                duplicate(one)


def test_a_received_tensor_is_pickled_with_its_own_bytes_only(folder: Path) -> None:
    address = f"unix://{folder}/s"
    with blocking.TensorReceiver(address) as receiver, blocking.TensorSender(address) as sender:
        handles = [sender.send(torch.full((50_000,), number)) for number in range(3)]
        tensors = [receiver.receive(pickle.loads(pickle.dumps(handle))) for handle in handles]
        pickled = pickle.dumps(tensors[1])

        assert len(pickled) < tensors[1].nbytes + 2000
        assert torch.equal(pickle.loads(pickled), tensors[1])
