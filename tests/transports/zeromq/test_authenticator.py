"""The keys of peers, at a receiver that follows another one in the same process."""

import pytest
import torch
import zmq

from aiotensor import PeerLostError, TensorReceiver, TensorSender
from verification.places import free_port

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_a_sender_with_a_key_reaches_the_next_receiver_of_the_same_process() -> None:
    place = f"tcp://127.0.0.1:{free_port()}"
    (receivers_key, receivers_secret), (key, secret) = zmq.curve_keypair(), zmq.curve_keypair()

    def listening() -> TensorReceiver:
        return TensorReceiver(place, secret_key=receivers_secret, client_keys=[key])

    async with TensorSender(place, secret_key=secret, server_key=receivers_key, max_wait_s=10) as sender:
        for number in range(5):
            async with listening() as receiver:
                try:
                    handle = await sender.send(torch.full((3,), number))
                except PeerLostError:  # only now it is notified that the receiver before has closed
                    handle = await sender.send(torch.full((3,), number))
                assert (await receiver.receive(handle)).tolist() == [number] * 3
