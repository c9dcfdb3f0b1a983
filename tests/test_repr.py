"""The `repr` of each public object shows its state and its address, in any thread, and no secrets."""

import asyncio
import os
from functools import partial
from typing import Any

import pytest
import torch
import zmq

from aiotensor import TensorReceiver, TensorSender, blocking
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Question, place
from tests.runtime.test_affinity import forks, in_a_fork
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def parties(here: str) -> dict[str, Any]:
    """Return an object of each kind, by its address in words."""
    return {
        f"at {here}": TensorReceiver(here),
        f"at {here}0": TensorSender(f"{here}0", 3),
        f"at {here}1": MessageServer(f"{here}1", Question),
        f"at {here}1,{here}2": MessageClient([f"{here}1", f"{here}2"], Answer),
    }


async def test_an_object_shows_its_state_and_its_address() -> None:
    with place() as here:
        for address, one in parties(here).items():
            name = type(one).__name__
            assert repr(one) == f"<{name} new, {address}>"
            async with one:
                assert repr(one).startswith(f"<{name} open, {address}, ")
                assert await asyncio.to_thread(repr, one) == repr(one)
            assert repr(one) == f"<{name} closed, {address}>"


async def test_an_open_object_shows_its_messages_and_peers() -> None:
    with place() as here:
        async with (
            TensorReceiver(here) as receiver,
            TensorSender(here, 3) as sender,
            MessageServer(f"{here}s", Question) as server,
            MessageClient(f"{here}s", Answer) as client,
        ):
            await sender.send(torch.ones(3))
            asking = asyncio.create_task(client.request(Question(1)))
            await until(lambda: server.statistics().waiting == 1)
            assert repr(sender).endswith(", 1 of 3 messages in flight>")
            assert repr(receiver).endswith(", 1 senders connected>")
            assert repr(client).endswith(", 1 of 8 messages in flight>")
            assert repr(server).endswith(", 1 clients, 1 messages waiting>")
            request = await anext(server)
            assert repr(request) == f"<Request unanswered, of process {os.getpid()}>"
            await request.answer(Answer(1))
            assert repr(request) == f"<Request answered, of process {os.getpid()}>"
            await asking
            message = sender.message()
            assert repr(message) == f"<OpenMessage new, of {sender!r}>"
            async with message:
                await message.send(pattern(1, BIG))
                assert repr(message) == f"<OpenMessage being sent, 1 tensors, of {sender!r}>"
            assert repr(message) == f"<OpenMessage waiting to be taken, 1 tensors, of {sender!r}>"
            sender.discard_all()
            assert repr(message) == f"<OpenMessage discarded, 1 tensors, of {sender!r}>"


def say(one: object) -> None:
    raise LookupError(repr(one))


@forks
async def test_an_object_shows_that_it_is_unusable_after_a_fork() -> None:
    with place() as here:
        for address, one in parties(here).items():
            async with one:
                said = in_a_fork(partial(say, one))
                assert said.startswith(f"LookupError: <{type(one).__name__} unusable after a fork, {address}")


def test_an_object_shows_no_keys() -> None:
    public, secret = zmq.curve_keypair()
    server = MessageServer("tcp://127.0.0.1:7000", int, secret_key=secret, client_keys=[public])
    client = MessageClient("tcp://127.0.0.1:7000", answer_type=int, secret_key=secret, server_key=public)
    assert repr(server) == "<MessageServer new, at tcp://127.0.0.1:7000>"
    assert repr(client) == "<MessageClient new, at tcp://127.0.0.1:7000>"


def test_an_object_for_threads_shows_the_same() -> None:
    with place() as here:
        receiver = blocking.TensorReceiver(here)
        sender = blocking.TensorSender(here)
        assert repr(sender) == f"<aiotensor.blocking.TensorSender new, at {here}>"
        with receiver, sender:
            assert repr(sender).startswith(f"<aiotensor.blocking.TensorSender open, at {here}, ")
            with sender.message() as message:
                message.send(pattern(1, 3))
                assert repr(message).startswith("<aiotensor.blocking.OpenMessage being sent, 1 tensors, of <")
        assert repr(sender) == f"<aiotensor.blocking.TensorSender closed, at {here}>"
