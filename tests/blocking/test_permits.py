"""A thread acquires a permit before the tensors of its request exist."""

import pytest
import torch

from aiotensor import UsageError
from aiotensor.blocking import MessageClient, MessageServer, TensorReceiver, TensorSender
from tests.blocking.waiting import in_thread, until
from tests.blocking.works import answer
from tests.channel.parties import Answer, Place, Question
from verification.patterns import BIG, pattern


def test_a_permit_bounds_requests_and_sends_its_allocated_tensor(place: Place) -> None:
    with (
        TensorReceiver(place.tensors) as receiver,
        MessageServer(place.messages, Question, receiver=receiver) as server,
        TensorSender(place.tensors, 1) as sender,
        MessageClient(place.messages, sender=sender, reply_type=Answer) as client,
    ):
        serving = in_thread(lambda: server.serve(answer))
        assert client.senders == (sender,)
        with client.permit() as permit:
            with pytest.raises(TimeoutError), client.permit(timeout=0.01):
                pass
            tensor = permit.allocate((BIG,), torch.int64)
            tensor.copy_(pattern(0, BIG))
            asked = client.request(Question(0, tensor), inside=permit)
            assert asked.total == int(tensor.sum())
            with pytest.raises(UsageError, match="already entered"), permit:
                pass
        del tensor
        with client.permit():  # the permit was released
            assert sender.statistics().in_flight == 1
        until(lambda: sender.statistics().in_flight == 0)
        server.close()
        serving.result()


def test_a_client_without_a_sender_has_no_permits(place: Place) -> None:
    with (
        MessageClient(place.messages, reply_type=Answer) as client,
        pytest.raises(UsageError, match="pass sender="),
    ):
        client.permit()
