"""Messages between machines, whose tensors move over `tcp://`."""

import asyncio
from typing import Any

import pytest
import torch
import zmq

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Question, answer
from verification.patterns import BIG, pattern
from verification.places import free_port

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_the_tensors_of_requests_and_answers_use_the_senders_with_the_same_keys() -> None:
    public, secret = zmq.curve_keypair()
    listening: dict[str, Any] = {"secret_key": secret, "client_keys": [public]}
    connecting: dict[str, Any] = {"secret_key": secret, "server_key": public}
    messages, there, back = (f"tcp://127.0.0.1:{free_port()}" for _ in range(3))

    async with (
        TensorReceiver(there, **listening) as at_server,
        TensorReceiver(back, **listening) as at_client,
        TensorSender(there, **connecting) as to_server,
        TensorSender(back, **connecting) as to_client,
        MessageServer(messages, Question, receiver=at_server, sender=to_client, **listening) as server,
        MessageClient(
            messages, sender=to_server, receiver=at_client, reply_type=Answer, **connecting
        ) as client,
    ):
        serving = asyncio.create_task(server.serve(answer))
        await to_client.ready()  # until then, answers contain their tensors
        for seed in range(3):
            request = Question(seed, pattern(seed, BIG), wish=str(BIG + seed))
            answered = await client.request(request)
            assert answered.total == int(pattern(seed, BIG).sum())
            assert answered.tensor is not None
            assert torch.equal(answered.tensor, pattern(seed, BIG + seed))
            del answered
        assert (to_server.statistics().tensors_sent, to_client.statistics().tensors_sent) == (3, 3)
        serving.cancel()
        await asyncio.wait([serving])
