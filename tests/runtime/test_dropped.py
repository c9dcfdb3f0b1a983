"""Objects that lost their last reference while they were open: reported, and released in their event loop."""

# ruff: noqa: F821 - earlier conditions use the deleted names
import asyncio
import gc
import itertools
import os
import re
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zmq

from aiotensor import PeerLostError, TensorQueue, TensorReceiver, TensorSender, blocking
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.channel import MessageClient, MessageServer
from tests.blocking import waiting
from tests.channel.parties import Answer, Place, Question, answer, place
from tests.selection import COMPLETE
from verification import loops
from verification.patterns import BIG, pattern
from verification.processes import peers, watch
from verification.waiting import settled, until

ARENA = 1 << 20

_LOOPS = [*loops.FACTORIES] if COMPLETE else ["uvloop"]


@pytest.fixture(autouse=True)
async def everything_is_released(nothing_left_behind: None) -> AsyncIterator[None]:
    """Wait until dropped objects are closed, before the check for leftovers."""
    yield
    await asyncio.sleep(0)


async def opened(one: Any) -> Any:
    return await one.__aenter__()


@contextmanager
def unclosed(text: str = "") -> Iterator[list[str]]:
    """Drop objects in a block, and check that there are warnings, each with this text."""
    texts: list[str] = []

    def note(message: Warning | str, category: type[Warning], *_: object) -> None:
        assert category is ResourceWarning
        texts.append(str(message))

    # Not by recording: a record keeps the object that was dropped.
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        yield texts
        gc.collect()
    assert texts
    assert all(re.search(text, one) for one in texts)


async def test_a_dropped_client_warns_and_disconnects_from_its_server() -> None:
    with place() as here:
        async with MessageServer(here.messages, Question) as server:
            serving = asyncio.create_task(server.serve(answer))
            client = await opened(MessageClient(here.messages, reply_type=Answer))
            await client.request(Question(1))
            assert server.statistics().clients == 1
            with unclosed("unclosed <MessageClient open, at ") as texts:
                del client
            assert here.messages in texts[0]
            await until(lambda: server.statistics().clients == 0)
        await serving


async def test_a_dropped_server_warns_and_disconnects_its_clients() -> None:
    with place() as here:
        async with (
            TensorReceiver(here.tensors) as receiver,
            TensorSender(here.tensors) as sender,
            MessageClient(here.messages, sender=sender, reply_type=Answer) as client,
        ):
            server = await opened(MessageServer(here.messages, Question, receiver=receiver))
            asking = asyncio.create_task(client.request(Question(1, pattern(1, BIG))))
            await until(lambda: server.statistics().waiting == 1)
            with unclosed("unclosed <MessageServer open, at ") as texts:
                del server
            assert here.messages in texts[0]
            with pytest.raises(PeerLostError):
                await asking
            await settled(sender)
            async with MessageServer(here.messages, Question, receiver=receiver) as following:
                serving = asyncio.create_task(following.serve(answer))
                assert (await client.request(Question(1, pattern(1, BIG)))).total == pattern(1, BIG).sum()
            await serving


@pytest.mark.promise(5)
def test_a_tensor_freed_after_its_loop_was_closed_returns_its_memory(no_collections: None) -> None:
    async def receive(at: str) -> torch.Tensor:
        async with TensorReceiver(at) as receiver, TensorSender(at) as sender:
            return await receiver.receive(await sender.send(pattern(1, BIG)))

    with place() as here:
        tensor = asyncio.run(receive(here.tensors))
    assert torch.equal(tensor, pattern(1, BIG))
    assert watch.memfds(os.getpid())
    del tensor
    assert not watch.memfds(os.getpid())


@pytest.mark.promise(4)
@pytest.mark.parametrize("make", [TensorReceiver, TensorSender, Publisher, Subscriber])
def test_an_object_that_was_left_open_warns_when_its_loop_is_gone(make: Callable[[TensorQueue], Any]) -> None:
    async def leave_open() -> None:
        await opened(make(TensorQueue()))

    with unclosed() as texts:  # also of its sockets, which Python closes
        asyncio.run(leave_open())
        gc.collect()
    assert any(text.startswith(f"unclosed <{make.__name__} open, at queue") for text in texts)


@pytest.mark.parametrize("make", [TensorReceiver, TensorSender])
def test_an_object_dropped_after_its_loop_was_closed_leaks_no_descriptor(make: Callable[[str], Any]) -> None:
    with place() as here:  # the file of a socket stays, as that of a process that was killed
        at = here.tensors

        async def leave_open() -> Any:
            async with TensorReceiver(at) as receiver:
                if make is TensorReceiver:
                    return await opened(TensorReceiver(here.answers))
                sender = await opened(TensorSender(at))
                await receiver.receive(await sender.send(pattern(1, BIG)))
                return sender

        left = asyncio.run(leave_open())
        with unclosed() as texts:  # also of its sockets, which Python closes
            del left
        assert texts[0].startswith(f"unclosed <{make.__name__} open, at unix://")


@pytest.mark.parametrize("loop", _LOOPS)
def test_clients_and_servers_dropped_without_a_running_loop_are_released(loop: str) -> None:
    # In a separate process, which can be killed if it hangs.
    process = peers.contexts["forkserver"].Process(target=_drop_clients_and_servers, args=(loop,))
    process.start()
    process.join(100)
    process.kill()
    process.join()
    assert process.exitcode == 0


def _drop_clients_and_servers(loop: str) -> None:
    gc.freeze()  # later collections skip the imported modules

    def drop(*, has_keys: bool, is_connected: bool, is_closed: bool, is_cycle: bool) -> None:
        with place() as here, loops.complaints():  # of the authenticator's task
            running = loops.FACTORIES[loop]()
            left = running.run_until_complete(_left_open(here, has_keys, is_connected))
            if is_cycle:
                left.append(left)
            if is_closed:
                running.close()
            with unclosed() as texts:  # also of ZeroMQ's sockets
                del left
            assert {text.split()[1] for text in texts} >= {"<MessageClient", "<MessageServer"}
            running.close()
        for _ in range(3):
            gc.collect()

    drop(has_keys=True, is_connected=True, is_closed=True, is_cycle=False)  # objects created once remain
    descriptors, threads = _held()  # perhaps with a thread that is still ending

    def is_released() -> bool:
        left = _held()
        return left[0] == descriptors and left[1] <= threads

    for has_keys, is_connected, is_closed, is_cycle in itertools.product((False, True), repeat=4):
        drop(has_keys=has_keys, is_connected=is_connected, is_closed=is_closed, is_cycle=is_cycle)
        waiting.until(is_released)


async def _left_open(here: Place, has_keys: bool, is_connected: bool) -> list[Any]:
    keys: list[dict[str, Any]] = [{}, {}]
    if has_keys:
        (public, secret), (server_key, server_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        keys = [
            {"secret_key": server_secret, "client_keys": [public]},
            {"secret_key": secret, "server_key": server_key},
        ]
    at = "tcp://127.0.0.1:0" if has_keys else here.messages
    server = await opened(MessageServer(at, Question, **keys[0]))
    addresses = [server.address, here.answers.replace("unix:", "ipc:")]  # no process listens at the second
    client = await opened(
        MessageClient(addresses if is_connected else addresses[1:], reply_type=Answer, **keys[1])
    )
    if is_connected:
        asking = asyncio.create_task(client.request(Question(1)))
        async with await anext(server) as request:
            await request.reply(Answer(1))
        await asking
    return [client, server]


def _held() -> tuple[list[str], int]:
    return watch.targets(os.getpid()), len(os.listdir("/proc/self/task"))


async def test_closed_and_unopened_objects_emit_no_warning(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        async with sender.message() as message:
            await message.send(pattern(1, 3))
        await receiver.receive(await sender.send(pattern(1, 3)))
    del receiver, sender, message
    TensorSender(address)
    with pytest.raises(ValueError, match="address"):
        TensorSender("nowhere")
    with pytest.raises(TypeError):
        TensorReceiver()  # type: ignore[call-arg]
    gc.collect()


def test_dropped_blocking_objects_warn_and_are_released() -> None:
    with place() as here:
        with blocking.TensorReceiver(here.tensors) as receiver:
            sender = blocking.TensorSender(here.tensors, arena_bytes=ARENA).__enter__()
            receiver.receive(sender.send(pattern(1, BIG)))
            name = f"unclosed <aiotensor.blocking.TensorSender open, at {here.tensors}"
            with unclosed() as texts:
                del sender
            [text] = texts
            assert text.startswith(name)
            waiting.until(lambda: receiver.statistics().senders == 0)
            assert receiver.statistics().mapped_bytes == 0
        waiting.until(lambda: not _loop_threads())  # threads of the dropped object may still be ending


def test_dropping_the_last_blocking_object_ends_the_loop_thread() -> None:
    with place() as here:
        receiver = blocking.TensorReceiver(here.tensors).__enter__()
        client = blocking.MessageClient(
            here.messages,
            sender=blocking.TensorSender(here.tensors).__enter__(),  # which the client keeps
            reply_type=Answer,
        ).__enter__()
        gc.collect()
        with blocking.MessageServer(here.messages, Question, receiver=receiver) as server:
            thread = threading.Thread(target=server.serve, args=[lambda question: Answer(question.seed)])
            thread.start()
            assert client.request(Question(7, pattern(1, BIG))).seed == 7
        thread.join()
        with unclosed() as texts:
            del receiver, client, server
        assert {text.split()[1] for text in texts} == {
            "<aiotensor.blocking.TensorReceiver",
            "<aiotensor.blocking.MessageClient",
            "<aiotensor.blocking.TensorSender",
        }
        waiting.until(lambda: not _loop_threads())


def _loop_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiotensor")]
