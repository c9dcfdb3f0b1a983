"""The hooks carry the tensors of an encoder's messages to its decoder; `tests/vllm` uses those of vLLM."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from aiotensor import DiscardedError, ProtocolError, TensorQueue, blocking
from aiotensor.integrations.vllm import TensorConsumer, TensorProvider
from tests.blocking.waiting import until
from verification.patterns import BIG, pattern

Buffers = Sequence[Any]


class Request(msgspec.Struct):
    """A message with tensors in several places, most of which are not those of a video."""

    name: str
    frames: torch.Tensor | None = None
    more: list[torch.Tensor] = []
    number: int = 0


class Encoder:
    """Encode structures with tensors, which it offers to a consumer."""

    def __init__(self, consumer: TensorConsumer) -> None:
        self._consumer = consumer
        self._buffers: list[Any] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_tensor)

    def encode(self, obj: Any) -> Buffers:
        self._consumer.new_message()
        self._buffers = [b""]
        self._buffers[0] = self._encoder.encode(obj)
        return self._buffers

    def _encode_tensor(self, tensor: torch.Tensor) -> object:
        data: object = self._consumer(tensor)
        if data is None:
            data = len(self._buffers)
            self._buffers.append(tensor.view(torch.uint8).numpy().data)
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


class Decoder:
    """Decode a `Request`, whose tensors a provider returns."""

    def __init__(self, provider: TensorProvider) -> None:
        self._provider = provider
        self._buffers: Buffers = []
        self._decoder = msgspec.msgpack.Decoder(Request, dec_hook=self._decode_tensor)

    def decode(self, bufs: Buffers) -> Request:
        self._buffers = bufs
        return self._decoder.decode(bufs[0])

    def _decode_tensor(self, kind: type, value: Any) -> object:
        dtype, shape, data = value
        if isinstance(data, dict):
            return self._provider(dtype, tuple(shape), data)
        return torch.frombuffer(bytearray(self._buffers[data]), dtype=getattr(torch, dtype)).view(shape)


class Ends(NamedTuple):
    """Both ends of the transport, in this process."""

    consumer: TensorConsumer
    provider: TensorProvider
    sender: blocking.TensorSender
    receiver: blocking.TensorReceiver


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Open a receiver and an admitted sender, with 8 permits unless a test has another number."""
    queue = TensorQueue()
    with (
        blocking.TensorReceiver(queue) as receiver,
        blocking.TensorSender(queue, getattr(request, "param", 8), arena_bytes=64 << 20) as sender,
    ):
        sender.ready()
        yield Ends(TensorConsumer(sender), TensorProvider(receiver), sender, receiver)


SMALL = 100  # elements of int64: sent in a frame


def videos(seed: int, *counts: int) -> Request:
    """Return a request with a video and further tensors."""
    first, *more = (pattern(seed + index, count) for index, count in enumerate(counts))
    return Request(f"request {seed}", first, more, seed)


def same(one: Request, other: Request) -> bool:
    tensors, others = [one.frames, *one.more], [other.frames, *other.more]
    assert all(
        a is not None and b is not None and torch.equal(a, b) for a, b in zip(tensors, others, strict=True)
    )
    return (one.name, one.number) == (other.name, other.number)


def released(ends: Ends) -> bool:
    seen = ends.sender.statistics()
    return (seen.in_flight, seen.bytes_in_use) == (0, 0)


@pytest.mark.parametrize("counts", [(SMALL,), (BIG, SMALL, 2 * BIG)])
def test_tensors_of_a_message_arrive_as_they_were(ends: Ends, counts: tuple[int, ...]) -> None:
    encoder, decoder = Encoder(ends.consumer), Decoder(ends.provider)
    for seed in range(5):
        message = videos(seed, *counts)
        with ends.consumer.message():
            buffers = encoder.encode(message)
        assert len(buffers) == 1  # no tensor was serialized
        assert same(decoder.decode(buffers), message)
    until(lambda: released(ends))
    seen = ends.sender.statistics()
    assert (seen.messages_sent, seen.tensors_sent) == (5, 5 * len(counts))


@pytest.mark.parametrize("ends", [1], indirect=True)
def test_a_tensor_without_a_permit_is_serialized_and_logged_once(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    encoder, decoder = Encoder(ends.consumer), Decoder(ends.provider)
    messages = [videos(seed, BIG) for seed in range(3)]
    encoded = []
    with caplog.at_level(logging.WARNING, "vllm.aiotensor"):
        for message in messages:
            with ends.consumer.message():
                encoded.append([bytes(buffer) for buffer in encoder.encode(message)])
    assert [len(buffers) for buffers in encoded] == [1, 2, 2]
    assert ends.consumer.declined == {"WouldBlockError": 2}
    assert [record.event for record in caplog.records] == ["tensor_declined"]  # type: ignore[attr-defined]
    assert ends.sender.statistics().errors == {"WouldBlockError": 2}
    for buffers, message in zip(encoded, messages, strict=True):
        assert same(decoder.decode(buffers), message)
    until(lambda: released(ends))
    with ends.consumer.message():
        assert len(encoder.encode(messages[0])) == 1  # there is a permit again


def test_an_unsupported_tensor_is_declined_and_so_is_one_for_a_lost_engine(ends: Ends) -> None:
    with ends.consumer.message():
        assert ends.consumer(torch.ones(3, 100).to_sparse()) is None
    assert ends.consumer.declined == {"UnsupportedTensorError": 1}
    assert released(ends)
    ends.receiver.close()
    until(lambda: ends.sender.statistics().receivers_lost == 1)
    with ends.consumer.message():
        assert ends.consumer(pattern(9, BIG)) is None
    assert ends.consumer.declined == {"UnsupportedTensorError": 1, "UnavailableError": 1}


def test_tensors_outside_of_a_message_are_serialized(ends: Ends) -> None:
    buffers = Encoder(ends.consumer).encode(videos(1, BIG))
    assert len(buffers) == 2
    assert (ends.consumer.declined, ends.sender.statistics().tensors_sent) == ({"UsageError": 1}, 0)


def test_a_message_that_cannot_be_encoded_is_discarded(ends: Ends) -> None:
    with pytest.raises(TypeError, match="complex"), ends.consumer.message():
        Encoder(ends.consumer).encode(videos(1, BIG))
        raise TypeError("Encoding objects of type complex is unsupported")
    until(lambda: released(ends))


@pytest.mark.parametrize("at", ["consumer", "provider"])
def test_an_aborted_message_is_discarded_at_either_end(ends: Ends, at: str) -> None:
    with ends.consumer.message():
        ends.consumer.new_message()
        kept = ends.consumer(pattern(1, BIG))
    with ends.consumer.message():
        ends.consumer.new_message()
        aborted = [ends.consumer(pattern(2, BIG)), ends.consumer(pattern(3, SMALL))]
    assert kept is not None
    assert aborted[0] is not None
    (ends.consumer if at == "consumer" else ends.provider).discard(aborted[0])
    until(lambda: ends.sender.statistics().in_flight == 1)
    for data, count in zip(aborted, (BIG, SMALL), strict=True):
        assert data is not None
        with pytest.raises(DiscardedError):
            ends.provider("int64", (count,), data)
    assert torch.equal(ends.provider("int64", (BIG,), kept), pattern(1, BIG))
    until(lambda: released(ends))
    ends.consumer.discard(kept)  # it was received already


def test_each_message_goes_to_its_engine() -> None:
    with ExitStack() as stack:
        senders, providers = [], []
        for _ in range(2):
            queue = TensorQueue()
            receiver = stack.enter_context(blocking.TensorReceiver(queue))
            senders.append(stack.enter_context(blocking.TensorSender(queue)))
            senders[-1].ready()
            providers.append(TensorProvider(receiver))
        consumer = TensorConsumer(*senders)
        encoder = Encoder(consumer)
        for seed, engine in enumerate((0, 1, 1, 0)):
            with consumer.message(engine):
                buffers = encoder.encode(videos(seed, BIG, SMALL))
            assert same(Decoder(providers[engine]).decode(buffers), videos(seed, BIG, SMALL))


@pytest.mark.parametrize("data", [{"sender_id": "a"}, {"sender": "a", "message": -1, "tensor": 0}, {}])
def test_a_placeholder_of_another_implementation_is_an_error(ends: Ends, data: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="TensorConsumer"):
        ends.provider("int64", (3,), data)
