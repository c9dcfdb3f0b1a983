"""Tensors that another transport carries: `place` accepts some, and `find` runs any code."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from aiotensor.codec import TensorDecoder, TensorEncoder
from aiotensor.errors import PeerLostError, ProtocolError
from tests.codec.messages import (
    Array,
    anything,
    beside,
    body_of,
    extension,
    large,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_a_handle_may_be_any_msgpack_value() -> None:
    source, found = large(), list[object]()

    def find(there: object) -> torch.Tensor:
        found.append(there)
        return source

    decoder = TensorDecoder(list[torch.Tensor], find)
    for handle in (0, "", b"", False, [], {}, -1, "name", b"id", 0.5, [1, {"a": b"x"}], {"segment": 3}):
        [body] = TensorEncoder(lambda tensor, handle=handle: handle).encode([source])  # type: ignore[misc]
        assert decoder.decode([body])[0] is source
        there = found.pop()
        assert (type(there), there) == (type(handle), handle)
        assert not found


def test_find_can_be_given_for_a_single_message() -> None:
    class Library:
        """A find that has a length, and is false while it is empty."""

        def __len__(self) -> int:
            return 0

        def __call__(self, handle: object) -> torch.Tensor:
            return torch.tensor(2)

    parts = TensorEncoder(lambda tensor: "handle").encode([torch.zeros(1)])
    decoder = TensorDecoder(list[torch.Tensor], lambda handle: torch.tensor(1))

    assert decoder.decode(parts, Library()) == [torch.tensor(2)]
    assert decoder.decode(parts) == [torch.tensor(1)], "for that message alone"
    with pytest.raises(ProtocolError, match="this decoder has no `find`: 'handle'"):
        anything.decode(parts)


# Errors of `place` and `find`

ERRORS = [
    KeyError("gone"),
    TypeError("gone"),
    PeerLostError("gone", pid=3),
    ProtocolError("gone"),
    asyncio.CancelledError(),
    RecursionError("gone"),
    msgspec.DecodeError("gone"),
    msgspec.ValidationError("gone"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "gone"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_exception_of_place_or_find_propagates_unchanged(error: BaseException) -> None:
    def fail(tensor_or_handle: object) -> torch.Tensor:
        raise error

    with pytest.raises(type(error)) as caught:
        TensorEncoder(fail).encode({"a": [torch.zeros(1)]})
    assert caught.value is error
    for type_ in (dict[str, list[torch.Tensor]], dict[str, list[Array]], Any):
        decoder: TensorDecoder[Any] = TensorDecoder(type_, fail)
        for source in (torch.zeros(1), np.zeros(1)):
            with pytest.raises(type(error)) as caught:
                decoder.decode(TensorEncoder(lambda tensor: 1).encode({"a": [source]}))
            assert caught.value is error


# One message does not disturb another


def test_a_decoder_works_after_an_error_and_keeps_no_buffer() -> None:
    memory: Array = np.zeros(3, np.uint8)
    gone = weakref.ref(memory)
    with pytest.raises(ProtocolError, match="buffer 7"):
        anything.decode([body_of([beside(0), beside(7)]), memory.data])
    del memory
    gc.collect()

    assert gone() is None
    with pytest.raises(ProtocolError, match="referred to buffer 0, but sent 0"):
        anything.decode([body_of(beside(0))])
    assert bytes(anything.decode([body_of(beside(0)), b"abc"]).numpy()) == b"abc"


def test_an_error_of_find_frees_its_tensors_without_a_collection(no_collections: None) -> None:
    def decode() -> "weakref.ref[torch.Tensor]":
        tensor = torch.zeros(3)  # the traceback refers to this frame
        body = TensorEncoder(lambda source: 1).encode([tensor])
        with suppress(KeyError):
            TensorDecoder(list[torch.Tensor], {}.__getitem__).decode(body)
            pytest.fail("it found a tensor")
        return weakref.ref(tensor)

    assert decode()() is None


def test_find_can_decode_another_message_with_the_same_decoder() -> None:
    messages: dict[int, list[bytes]] = {
        1: [body_of([beside(0), extension("T", ["at", 2, 1]), beside(1)]), b"bbb", b"ddd"],
        2: [body_of([beside(0)]), b"ccc"],
    }

    def find(handle: int) -> torch.Tensor:
        return torch.cat(decoder.decode(messages[handle]))

    decoder: TensorDecoder[list[torch.Tensor]] = TensorDecoder(list[torch.Tensor], find)
    outer = [body_of([beside(0), extension("T", ["at", 1, 1]), beside(1)]), b"aaa", b"eee"]

    assert bytes(torch.cat(decoder.decode(outer)).numpy()) == b"aaabbbcccdddeee"
    with pytest.raises(KeyError):
        decoder.decode([body_of([extension("T", ["at", 0, 0])])])


def test_two_threads_can_share_a_decoder() -> None:
    both_are_inside = threading.Barrier(2)

    def find(handle: int) -> torch.Tensor:
        both_are_inside.wait(10)
        return torch.full((3,), handle, dtype=torch.uint8)

    decoder: TensorDecoder[list[torch.Tensor]] = TensorDecoder(list[torch.Tensor], find)

    def decode(number: int) -> list[bytes]:
        first, second = [extension("T", ["at", number, each]) for each in range(2)]
        body = body_of([beside(0), first, beside(1), second])
        received = decoder.decode([body, bytes([number + 10] * 3), bytes([number + 20] * 3)])
        return [bytes(tensor.numpy()) for tensor in received]

    with ThreadPoolExecutor(2) as threads:
        received = list(threads.map(decode, (1, 2)))

    assert received == [
        [bytes([n] * 3) for n in (number + 10, number, number + 20, number)] for number in (1, 2)
    ]
