"""Objects that lost their last reference while they were open: reported, and released in their event loop."""

import asyncio
import gc
import os
import re
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from aiotensor import TensorQueue, TensorReceiver, TensorSender, blocking
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.channel import MessageClient, MessageServer
from tests.blocking import waiting
from tests.channel.parties import Answer, Question, key_options, place
from verification import loops
from verification.patterns import BIG, pattern
from verification.places import free_port
from verification.processes import peers, watch


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


@pytest.mark.promise(5)
def test_a_tensor_freed_after_its_loop_was_closed_returns_its_memory(no_collections: None) -> None:
    async def receive(at: str) -> torch.Tensor:
        async with TensorReceiver(at) as receiver, TensorSender(at) as sender:
            return await receiver.receive(await sender.send(pattern(1, BIG)))

    with place() as here:
        tensor = asyncio.run(receive(here))
    assert torch.equal(tensor, pattern(1, BIG))
    assert watch.memfds(os.getpid())
    del tensor
    assert not watch.memfds(os.getpid())


_MAKE: dict[str, Callable[[TensorQueue], Any]] = {
    "TensorReceiver": TensorReceiver,
    "TensorSender": TensorSender,
    "Publisher": Publisher,
    "Subscriber": Subscriber,
    "MessageClient": lambda at: MessageClient(at, Answer),
    "MessageServer": lambda at: MessageServer(at, Question),
}


@pytest.mark.promise(4)
@pytest.mark.parametrize("name", _MAKE)
def test_an_object_that_was_left_open_warns_when_its_loop_is_gone(name: str) -> None:
    async def leave_open() -> None:
        await opened(_MAKE[name](TensorQueue()))

    with unclosed() as texts:  # also of its sockets, which Python closes
        asyncio.run(leave_open())
        gc.collect()
    assert any(text.startswith(f"unclosed <{name} open, at queue") for text in texts)


@pytest.mark.parametrize("has_keys", [False, True])
def test_connected_objects_dropped_after_their_loop_was_closed_leak_nothing(has_keys: bool) -> None:
    # In a separate process, which can be killed if it hangs.
    process = peers.contexts["forkserver"].Process(target=_leave_open_repeatedly, args=(has_keys,))
    process.start()
    process.join(100)
    process.kill()
    process.join()
    assert process.exitcode == 0


def _leave_open_repeatedly(has_keys: bool) -> None:
    gc.freeze()  # later collections skip the imported modules
    before: tuple[list[str], int] | None = None
    for _ in range(3):
        with place() as here, loops.complaints(), unclosed() as texts:  # also of sockets
            left = asyncio.run(_left_open(here, has_keys))
            left.append(left)
            del left
            waiting.until(partial(_have_warned, texts))  # a thread may keep one alive for a moment
        gc.collect()
        if before is None:
            before = _held()  # objects created once remain, and perhaps a thread that is still ending
        waiting.until(partial(_is_released, before))


def _have_warned(texts: list[str]) -> bool:
    gc.collect()
    names = {text.split()[1] for text in texts}
    return names >= {"<TensorReceiver", "<TensorSender", "<MessageServer", "<MessageClient"}


async def _left_open(here: str, has_keys: bool) -> list[Any]:
    """Leave connected objects open that have exchanged tensors, one of them also for an absent server."""
    (listening, connecting) = key_options() if has_keys else ({}, {})
    first, second, nowhere = (
        f"tcp://127.0.0.1:{free_port()}" if has_keys else f"{here}{number}" for number in range(3)
    )
    receiver = await opened(TensorReceiver(first, **listening))
    sender = await opened(TensorSender(first, **connecting))
    await receiver.receive(await sender.send(pattern(1, BIG)))
    server = await opened(MessageServer(second, Question, **listening))
    client = await opened(MessageClient([second, nowhere], Answer, **connecting))
    asking = asyncio.create_task(client.request(Question(1, pattern(1, BIG))))
    async with await anext(server) as request:
        await request.answer(Answer(1))
    await asking
    return [receiver, sender, server, client]


def _held() -> tuple[list[str], int]:
    return watch.targets(os.getpid()), len(os.listdir("/proc/self/task"))


def _is_released(before: tuple[list[str], int]) -> bool:
    left = _held()
    return left[0] == before[0] and left[1] <= before[1]


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


def test_dropping_the_last_blocking_object_ends_the_loop_thread() -> None:
    with place() as here:
        receiver = blocking.TensorReceiver(here).__enter__()
        client = blocking.MessageClient(f"{here}2", Answer).__enter__()
        gc.collect()
        with blocking.MessageServer(f"{here}2", Question) as server:
            thread = threading.Thread(target=server.serve, args=[lambda question: Answer(question.seed)])
            thread.start()
            assert client.request(Question(7, pattern(1, BIG))).seed == 7
        thread.join()
        with unclosed() as texts:
            del receiver, client, server
        assert {text.split()[1] for text in texts} == {
            "<aiotensor.blocking.TensorReceiver",
            "<aiotensor.blocking.MessageClient",
        }
        waiting.until(lambda: not _loop_threads())


def _loop_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiotensor")]
