"""Small tensors beyond a limit are packed into one buffer beside the body."""

from typing import Any

import msgspec
import pytest
import torch

from aiotensor.codec import Encoding
from aiotensor.codec.placeholders import LENGTH_BYTES, PACKED
from aiotensor.errors import ProtocolError
from aiotensor.memory.inline import MAX_INLINE_BYTES
from tests.codec.messages import anything, body_of, extension, plain
from verification.patterns import pattern

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

HERE = ["in", ["uint8", [3]], b"abc", 0]
NEXT = msgspec.msgpack.Ext(ord("T"), PACKED)
NAMED = extension("T", ["by", ["uint8", [3]], 0, 0])


def packed(*placeholders: object) -> bytes:
    written = [msgspec.msgpack.encode(placeholder) for placeholder in placeholders]
    return b"".join(len(data).to_bytes(LENGTH_BYTES, "big") + data for data in written)


def test_a_packed_tensor_needs_only_a_few_bytes_in_the_body() -> None:
    message = {
        "a": [pattern(number, 4) for number in range(1000)],
        "b": [torch.zeros(0) for _ in range(1000)],
    }
    body, pack = Encoding(lambda _: None, max_inline_bytes=0).encode(message)

    assert len(body) < 2000 * 7
    assert isinstance(pack, bytes)
    assert plain(anything.decode([body, pack])) == plain(message)


def test_the_buffers_of_large_tensors_precede_the_pack() -> None:
    large = torch.arange(MAX_INLINE_BYTES + 1).to(torch.uint8)
    message = [pattern(1, 4), large, pattern(2, 4), large.clone()]
    body, *buffers, pack = Encoding(lambda _: None, max_inline_bytes=0).encode(message)

    assert [type(buffer) for buffer in buffers] == [memoryview, memoryview]
    assert plain(anything.decode([body, *buffers, pack])) == plain(message)


def test_tensors_are_packed_only_beyond_max_inline_bytes() -> None:
    message = [pattern(number, 4) for number in range(10)]
    [whole] = Encoding(lambda _: None).encode(message)
    each = (len(whole) - 1) // 10 - 3  # the list, and the head of each extension

    assert len(Encoding(lambda _: None, max_inline_bytes=10 * each).encode(message)) == 1
    assert len(Encoding(lambda _: None, max_inline_bytes=10 * each - 1).encode(message)) == 2


WRONG: dict[str, tuple[Any, list[bytes]]] = {
    "no pack": ([NEXT], []),
    "an empty pack": ([NEXT], [b""]),
    "half a length": ([NEXT], [b"\x00"]),
    "a placeholder that is cut off": ([NEXT], [packed(HERE)[:-1]]),
    "a tensor too few": ([NEXT, NEXT], [packed(HERE)]),
    "a tensor too many": ([NEXT], [packed(HERE, HERE)]),
    "a byte too many": ([NEXT], [packed(HERE) + b"\x00"]),
    "a pack that is a tensor too": ([NEXT, NAMED], [packed(HERE)]),
    "a tensor that is a pack too": ([NAMED, NEXT], [packed(HERE)]),
    "a handle in the pack": ([NEXT], [packed(["at", [1] * 1000, 0])]),
    "a buffer in the pack": ([NEXT], [packed(["by", ["uint8", [3]], 0, 0])]),
    "a pack in the pack": ([NEXT], [packed("pk")]),
    "too few bytes of a tensor": ([NEXT], [packed(["in", ["uint8", [4]], b"abc", 0])]),
    "a buffer that nothing names": ([NEXT], [b"abc", packed(HERE)]),
}


def test_a_wrong_pack_is_refused() -> None:
    for name, (message, buffers) in WRONG.items():
        with pytest.raises(ProtocolError):
            print(name, anything.decode([body_of(message), *buffers]))
