"""Large messages are encoded, decoded and freed in threads, and small ones on the event loop."""

import asyncio
import dataclasses
import enum
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import msgspec
import numpy as np
import pytest
import torch
import zmq

from aiotensor import ProtocolError, RemoteError
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.protocol.exchange import VERSION, Ask, ServerHello, write
from aiotensor.protocol.parts import BODY_BYTES
from tests.channel.parties import Places, place, said
from tests.channel.rogues import hear, raw
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

encoded_in: list[int] = []  # the threads, one for each probe
decoded_in: list[int] = []
freed_in: list[int] = []


@pytest.fixture(autouse=True)
def nothing_recorded() -> None:
    for threads in (encoded_in, decoded_in, freed_in):
        threads.clear()


class Probe(np.ndarray[Any, Any]):
    """An array that records in which thread it is encoded."""

    @property
    def __array_interface__(self) -> Any:  # which the encoder needs for an array that is read-only
        encoded_in.append(threading.get_ident())
        return super().__array_interface__


def probe() -> Probe:
    array = np.zeros(2).view(Probe)
    array.setflags(write=False)
    return array


class Unknown:
    """An object with nothing but DLPack: its size is not known beforehand."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> object:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()


class Mark(msgspec.Struct, weakref=True):
    """An object that records the threads in which it is made and freed."""

    note: str = ""

    def __post_init__(self) -> None:
        decoded_in.append(threading.get_ident())
        weakref.finalize(self, lambda: freed_in.append(threading.get_ident())).atexit = False


class Envelope(msgspec.Struct):
    data: Any = None
    mark: Mark | None = None
    probe: torch.Tensor | Any = None


class Colour(enum.StrEnum):
    RED = "red"


class Point(NamedTuple):
    x: Any
    y: int


class Plain(msgspec.Struct):
    value: Any


@dataclasses.dataclass
class Data:
    value: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any


@attrs.define
class Attrs:
    value: Any


MANY = list(range(50_000))
LARGE: dict[str, Callable[[], object]] = {
    "bytes": lambda: bytes(1 << 20),
    "a bytearray": lambda: bytearray(1 << 20),
    "a memoryview": lambda: memoryview(bytes(1 << 20)),
    "a text": lambda: "x" * (1 << 20),
    "many short texts": lambda: ["x" * 1000] * 1000,
    "long keys": lambda: {"x" * 1000 + str(number): 1 for number in range(1000)},
    "floats": lambda: [0.5] * 50_000,
    "a tuple": lambda: tuple(MANY),
    "a set": lambda: set(MANY),
    "a dict": lambda: dict.fromkeys(map(str, MANY), 1),
    "an OrderedDict": lambda: OrderedDict.fromkeys(map(str, MANY), 1),
    "a named tuple": lambda: Point(MANY, 1),
    "deep in lists and dicts": lambda: [{"a": [{"b": [MANY]}]}],
    "many small lists": lambda: [[1]] * 20_000,
    "many structs": lambda: [Plain(1)] * 5_000,
    "a struct": lambda: Plain(MANY),
    "a dataclass": lambda: Data(MANY),
    "a dataclass with slots": lambda: Slotted(MANY),
    "an attrs class": lambda: Attrs(MANY),
    "raw msgpack": lambda: msgspec.Raw(msgspec.msgpack.encode(MANY)),
    "an extension": lambda: msgspec.msgpack.Ext(1, bytes(1 << 20)),
    "many tiny tensors": lambda: [torch.zeros(1)] * 300,
    "a tensor that has to be gathered": lambda: torch.zeros(2000, 1000).t(),
    "an array with negative strides": lambda: np.zeros((2000, 1000), np.float32)[:, ::-1],
    "what has only DLPack": lambda: Unknown(torch.zeros(2000, 1000).t()),
}
SMALL: dict[str, Callable[[], object]] = {
    "a number": lambda: 1,
    "nothing": lambda: None,
    "a short text": lambda: "some words",
    "an enumeration": lambda: Colour.RED,
    "some floats": lambda: [0.5] * 100,
    "a dict": lambda: {"a": 1, "b": {"c": [1.0, None, True]}},
    "a dataclass": lambda: Data(Slotted(Attrs(Plain(Point(1, 2))))),
    "some tensors": lambda: [torch.zeros(3)] * 20,
    "a large tensor": lambda: torch.zeros(200_000),
    "a large array": lambda: np.zeros(200_000),
}


async def exchange(question: object, reply: object) -> None:
    """Send a message in each direction, and a message without an answer."""
    with place() as here:
        async with (
            MessageServer(here.messages, Envelope, max_body_bytes=None) as server,
            MessageClient(here.messages, reply_type=Envelope, max_body_bytes=None) as client,
        ):
            for number in range(2):
                sending = asyncio.create_task((client.send if number else client.request)(question))
                async with await anext(server) as request:
                    if not number:
                        await request.reply(reply)
                await sending


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
async def test_a_large_message_is_encoded_in_a_thread(make: Callable[[], object]) -> None:
    await exchange(Envelope(make(), None, probe()), Envelope(make(), None, probe()))
    assert len(encoded_in) == 3
    assert threading.get_ident() not in encoded_in


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
async def test_a_small_message_is_encoded_on_the_loop(make: Callable[[], object]) -> None:
    await exchange(Envelope(make(), None, probe()), Envelope(make(), None, probe()))
    assert encoded_in == [threading.get_ident()] * 3


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
async def test_a_large_message_is_decoded_in_a_thread(make: Callable[[], object]) -> None:
    question, reply = Envelope(make(), Mark()), Envelope(make(), Mark())
    decoded_in.clear()
    await exchange(question, reply)
    assert len(decoded_in) == 3
    assert threading.get_ident() not in decoded_in


async def test_a_body_of_many_tiny_tensors_is_decoded_in_a_thread() -> None:
    empty = torch.zeros(0, dtype=torch.uint8)  # 20 bytes in a body
    question = Envelope([empty] * 120, Mark())
    many = Envelope([empty] * 128, Mark())
    decoded_in.clear()
    await exchange(question, question)
    assert decoded_in == [threading.get_ident()] * 3
    decoded_in.clear()
    await exchange(many, many)
    assert len(decoded_in) == 3
    assert threading.get_ident() not in decoded_in


async def test_a_small_message_is_decoded_on_the_loop() -> None:
    message = Envelope([torch.zeros(2000), {"a": [1, 2.0, "b"]}], Mark())
    decoded_in.clear()
    await exchange(message, message)
    assert decoded_in == [threading.get_ident()] * 3


async def test_large_messages_without_other_references_are_freed_in_threads() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Envelope) as server,
            MessageClient(here.messages, reply_type=Envelope) as client,
        ):

            async def answer(message: Envelope) -> Envelope:
                return Envelope(MANY, Mark("answer"))

            serving = asyncio.create_task(server.serve(answer))
            got = await client.request(Envelope(MANY, Mark("question")))
            # The question, its decoded copy, and the answer; the caller has the decoded answer.
            await until(lambda: len(freed_in) == 3)
            assert threading.get_ident() not in freed_in
            del got
            assert freed_in[3:] == [threading.get_ident()]
            await server.aclose()
            await serving


async def test_a_large_message_that_cannot_be_encoded_or_decoded_is_freed_in_a_thread() -> None:
    with place() as here, said():
        async with (
            MessageServer(here.messages, dict[str, Mark]) as server,
            MessageClient(here.messages, reply_type=list[Mark]) as client,
        ):
            with pytest.raises(TypeError, match="cannot contain") as refused:
                await client.request([MANY, Mark(), object()])
            assert len(freed_in) == 1  # although the error is still here
            decoding = asyncio.create_task(anext(server))
            with pytest.raises(RemoteError, match="ProtocolError"):
                await client.request({**{str(number): Mark() for number in range(2000)}, "wrong": 1})
            await until(lambda: len(freed_in) == 4001)
            decoding.cancel()
            asking = asyncio.create_task(client.request({}))
            async with await anext(server) as request:
                await request.reply([*[Mark() for _ in range(2000)], 1])
            with pytest.raises(ProtocolError) as unreadable:
                await asking
            await until(lambda: len(freed_in) == 8001)
            assert threading.get_ident() not in freed_in
            del refused, unreadable
    await asyncio.wait([decoding])


async def test_a_message_that_contains_itself_raises_recursion_error() -> None:
    endless: list[object] = []
    endless.append(endless)
    with place() as here:
        async with (
            MessageServer(here.messages, Any),
            MessageClient(here.messages, reply_type=Any) as client,
        ):
            with pytest.raises(RecursionError):
                await client.request(endless)


@pytest.mark.parametrize("nbytes", [1000, BODY_BYTES, 1 << 20])
async def test_a_large_body_is_sent_as_a_separate_part(nbytes: int) -> None:
    assert Places.scheme == "ipc"
    with place() as here:
        async with (
            raw(zmq.ROUTER, here.messages, binds=True) as rogue,
            MessageClient(here.messages, reply_type=Any) as client,
        ):
            identity, _ = await hear(rogue)
            await rogue.send_multipart([identity, write(ServerHello(VERSION, 77, "", 64, 1 << 30))])
            asking = asyncio.create_task(client.request(bytes(nbytes)))
            _, header, *parts = await rogue.recv_multipart()
            question = msgspec.msgpack.decode(header, type=Ask)
            if nbytes < BODY_BYTES:
                assert not parts
                assert question.body is not None
                assert bytes(question.body) == msgspec.msgpack.encode(bytes(nbytes))
            else:
                assert question.body is None
                assert parts == [msgspec.msgpack.encode(bytes(nbytes))]
            asking.cancel()
            await asyncio.wait([asking])
