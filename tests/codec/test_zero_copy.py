"""Large tensors are not copied if their memory is suitable, and decoded tensors are writable."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from aiotensor.codec import TensorDecoder, TensorEncoder
from tests.codec.messages import LARGE, Array, address_of, anything, encoded, large, plain, sent
from tests.memory.test_source import read_only
from tests.selection import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_a_buffer_refers_to_the_memory_of_its_tensor() -> None:
    for source in (
        large(),
        large()[10:290],
        large(torch.float32).requires_grad_(),
        Parameter(large(torch.bfloat16)),
        large(torch.complex128),
        large().numpy(),
        read_only(large().numpy()),
    ):
        [_, buffer] = encoded({"frames": [source]})
        assert address_of(buffer) == address_of(source)
        assert buffer.nbytes == source.nbytes


def test_a_buffer_keeps_its_memory_alive() -> None:
    source: Array = np.full(1 << 20, 7, np.uint8)
    owner = weakref.ref(source)
    [_, buffer] = encoded(source)
    del source
    gc.collect()

    assert owner() is not None
    del buffer
    gc.collect()
    assert owner() is None


def test_a_read_only_array_is_not_copied_and_never_written_to() -> None:
    # It may be that of an immutable object, or of a file mapped for reading, where a write ends the process.
    source = np.frombuffer(bytes(1 << 20), np.uint8)
    body, buffer = encoded(source)
    assert address_of(buffer) == address_of(source)

    anything.decode([body, buffer])[:] = 7
    assert not source.any()


def test_decoded_tensors_use_the_memory_of_their_buffers() -> None:
    types: list[Any] = [torch.Tensor, np.ndarray, Any]
    for type_ in types:
        for source in (large(torch.complex64), large(torch.float16).numpy()):
            [body, buffer] = sent(TensorEncoder().encode(source))
            received: Any = TensorDecoder(type_).decode([body, buffer])
            assert address_of(received) == address_of(buffer)
            received.reshape(-1)[:] = 3
            assert np.all(np.frombuffer(buffer, np.asarray(received).dtype) == 3), "which is written to"
    leaves = [Parameter(large(torch.float32)), large(torch.float32).requires_grad_()]
    body, *buffers = sent(TensorEncoder().encode(leaves))
    assert [tensor.data_ptr() for tensor in anything.decode([body, *buffers])] == [*map(address_of, buffers)]


def test_a_decoded_tensor_keeps_its_buffer_alive_until_it_is_freed() -> None:
    for type_ in (torch.Tensor, np.ndarray, Any):
        decoder: TensorDecoder[Any] = TensorDecoder(type_)
        body, shown = encoded(large().numpy())
        memory = np.array(shown)
        alive = weakref.ref(memory)
        received = decoder.decode([body, memory.data])
        del memory
        gc.collect()

        assert alive() is not None
        assert np.array_equal(received, large().numpy())
        del received
        gc.collect()
        assert alive() is None


def test_inline_tensors_do_not_keep_the_body_alive() -> None:
    [shown] = TensorEncoder().encode([torch.arange(3), np.arange(3)])
    memory = np.frombuffer(bytearray(shown), np.uint8)
    gone = weakref.ref(memory)
    received = anything.decode([memory.data])
    del memory
    gc.collect()

    assert gone() is None
    assert [item.tolist() for item in received] == [[0, 1, 2]] * 2


# Where it has to be copied


def test_a_tensor_in_a_read_only_buffer_is_decoded_as_a_writable_copy() -> None:
    body, shown = encoded(large(torch.float32))
    before = bytes(shown)
    for type_ in (torch.Tensor, np.ndarray):
        for buffer in (before, shown.toreadonly()):
            received: Any = TensorDecoder(type_).decode([body, buffer])
            assert address_of(received) != address_of(buffer)
            assert plain(torch.as_tensor(received)) == plain(large(torch.float32))
            received[:] = 0
            assert bytes(buffer) == before


def test_only_tensors_in_misaligned_buffers_are_copied() -> None:
    memory: Array = np.zeros(LARGE[0] * LARGE[1] * 16 + 32, np.uint8)
    for offset in (0, 1, 2, 4, 8):
        start = offset - memory.ctypes.data % 16 + 16
        for dtype in DTYPES.values():
            body, shown = encoded(large(dtype))
            buffer = memory[start : start + shown.nbytes]
            buffer[:] = shown
            received = anything.decode([body, buffer.data])

            assert (received.data_ptr() == address_of(buffer)) is (offset % dtype.itemsize == 0)
            assert plain(received) == plain(large(dtype))
