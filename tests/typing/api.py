"""A sample of the public API, with the errors that a type checker must report; no test runs it."""

import multiprocessing.queues
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, assert_type

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from opentelemetry import trace
from prometheus_client import REGISTRY

import aiotensor
from aiotensor import (
    AioTensorError,
    Delivery,
    Holder,
    MessageClient,
    MessageQueue,
    MessageServer,
    OpenMessage,
    Permit,
    Publisher,
    Request,
    SenderStatistics,
    Subscriber,
    TensorHandle,
    TensorQueue,
    TensorReceiver,
    TensorSender,
    Usage,
    Waits,
    blocking,
)
from aiotensor.broadcast import (
    Publication,
    Published,
    SlowPolicy,
    SubscriberLag,
)
from aiotensor.codec import TensorDecoder, TensorEncoder, TensorMeta
from aiotensor.integrations.opentelemetry import instrument, processing
from aiotensor.integrations.prometheus import AioTensorCollector, MultiprocessPublisher
from aiotensor.queues import (
    QueueConsumer,
    QueueProducer,
)


class Box:
    """Something of another library that shares its memory."""

    def __dlpack__(self, *, stream: object = None) -> object:
        return None

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Video(msgspec.Struct):
    """A message."""

    frames: Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8, shape=(None, None, None, 3))]
    fps: float = 30.0


class Answer(msgspec.Struct):
    """The answer to it."""

    vector: torch.Tensor


# Tensors by handle


async def send(address: str, tensor: torch.Tensor, array: npt.NDArray[np.uint8], box: Box) -> None:
    async with TensorSender(address, 8, 1 << 30, keep_warm_s=None, long_wait_s=2.5) as sender:
        assert_type(await sender.send(tensor), TensorHandle)
        await sender.send(array)
        sender.send_nowait(torch.nn.Parameter(tensor))
        assert_type(handle := sender.post(box), TensorHandle)
        assert_type(await sender.copied(handle), None)
        assert_type(await sender.allocate((120, 720, 1280, 3), torch.uint8), torch.Tensor)
        async with sender.message() as message:
            assert_type(message, OpenMessage)
            assert_type(await message.send(tensor), TensorHandle)

        await sender.send([tensor])  # type: ignore[arg-type]
        await sender.send(b"bytes")  # type: ignore[arg-type]
        await sender.allocate((2, 3), np.uint8)  # type: ignore[arg-type]
    TensorSender(TensorQueue(), max_concurrent_videos=8)
    TensorSender()  # type: ignore[call-arg]
    TensorSender(42)  # type: ignore[arg-type]
    TensorSender(address, 8, 1 << 30, 30.0)  # type: ignore[call-arg]
    TensorSender(address, max_concurrent_videos="8")  # type: ignore[arg-type]


async def receive(plain: "multiprocessing.queues.Queue[object]", handle: TensorHandle) -> None:
    async with TensorReceiver(plain, max_senders=None, max_mapped_bytes=None, max_wait_s=2.5) as receiver:
        assert_type(await receiver.receive(handle, copy=True), torch.Tensor)
        async for delivery in receiver:
            assert_type(delivery, Delivery)
            assert_type((delivery.handle, delivery.tensor), tuple[TensorHandle, torch.Tensor])

        await receiver.receive(handle, True)  # type: ignore[call-arg]
        await receiver.receive("a name")  # type: ignore[arg-type]
    TensorReceiver("unix:///tmp/s", 4)  # type: ignore[call-arg]


def read_a_handle(handle: TensorHandle) -> bytes:
    assert_type((handle.sender, handle.message, handle.tensor), tuple[str, int, int])
    assert_type((handle.dtype, handle.shape, handle.device), tuple[str, tuple[int, ...], str])
    assert_type(dict(handle), dict[str, str | int | tuple[int, ...]])
    handle.message = 3  # type: ignore[misc]
    return msgspec.msgpack.encode(handle)


def read_statistics(sender: TensorSender, holder: Holder) -> None:
    sent = sender.statistics()
    assert_type(sent, SenderStatistics)
    assert_type((sent.holders, sent.permit_waits), tuple[tuple[Holder, ...], Waits])
    assert_type((holder.message, holder.bytes, holder.seconds), tuple[int | None, int, float])
    sent.in_flight = 0  # type: ignore[misc]
    holder.bytes = 0  # type: ignore[misc]


async def distinguish_errors(receiver: TensorReceiver, sender: TensorSender, handle: TensorHandle) -> str:
    try:
        sender.send_nowait(await receiver.receive(handle))
    except (aiotensor.PeerLostError, aiotensor.RefusedError) as error:
        assert_type(error.pid, int | None)
    except aiotensor.WouldBlockError as error:
        assert_type(error.messages, Usage)
        assert_type((error.bytes.limit, error.bytes.in_use), tuple[int | None, int])
    except aiotensor.UnsupportedTensorError as error:
        mistake: TypeError = error
        return str(mistake)
    except aiotensor.UsageError as error:
        wrong_place: RuntimeError = error
        return str(wrong_place)
    except AioTensorError:
        return "something else of aiotensor's own"
    return "sent on"


# Messages


async def ask(address: str, video: Video) -> torch.Tensor:
    async with MessageClient(address, Answer, 8, 1 << 30, max_wait_s=2.5) as client:
        assert_type(client, MessageClient[Answer])
        assert_type(answer := await client.request(video, target=1), Answer)
        await client.send(video)
        async with client.permit() as permit:
            assert_type(permit, Permit)
            await client.request(video, inside=permit)

        await client.request(video, 1)  # type: ignore[call-arg]
    MessageClient([address, TensorQueue()], answer_type=dict[str, torch.Tensor])
    MessageClient(address)  # type: ignore[call-arg]
    return answer.vector


async def respond(address: str) -> None:
    async def work(video: Video) -> Answer:
        return Answer(video.frames)

    async with MessageServer(address, Video, arena_bytes=1 << 30, max_clients=None) as server:
        assert_type(server, MessageServer[Video])
        async for request in server:
            assert_type(request, Request[Video])
            assert_type(request.message.frames, torch.Tensor)
            async with request:
                assert_type(await request.answer(Answer(request.message.frames)), bool)
            await request.fail(5)  # type: ignore[arg-type]
        await server.serve(work, max_concurrent=2)
    MessageServer(address, Video, 1 << 30)  # type: ignore[call-arg]


def encode_and_decode(video: Video) -> Video:
    encoder = TensorEncoder(lambda tensor: None if tensor.nbytes < 10 else tensor.dim())
    decoder = TensorDecoder(Video, find=lambda handle: torch.zeros(int(handle)))
    assert_type(parts := encoder.encode(video), list[bytes | memoryview])
    TensorMeta(dtype="uint8")  # type: ignore[arg-type]
    return decoder.decode(parts)


# Broadcast and queues


async def publish(address: str, slow: SlowPolicy, video: Video) -> None:
    async with Publisher(address, arena_bytes=1 << 30, max_behind=8, slow=slow) as publisher:
        assert_type(await publisher.publish(video), Published)
        assert_type(publisher.statistics().lags, tuple[SubscriberLag, ...])
    Publisher(TensorQueue(), slow="sometimes")  # type: ignore[arg-type]
    Publisher(address, 1 << 30)  # type: ignore[call-arg]


async def subscribe(address: str) -> None:
    async with Subscriber(address, Video, max_wait_s=1.0) as subscriber:
        assert_type(subscriber, Subscriber[Video])
        async for publication in subscriber:
            assert_type(publication, Publication[Video])
        assert_type(await subscriber.receive(), Publication[Video])
    assert_type(Subscriber(TensorQueue()), Subscriber[Any])
    Subscriber(address, max_wait_s="long")  # type: ignore[arg-type]


async def queue(video: Video) -> None:
    with MessageQueue(Video, producers=3, consumers=2, redeliver=False, grace_s=None) as queue:
        assert_type(queue, MessageQueue[Video])
        assert_type(MessageQueue(folder="/run/user/1000/frames"), MessageQueue[Any])
        async with queue.producer() as producer, queue.consumer() as consumer:
            assert_type((producer, consumer), tuple[QueueProducer, QueueConsumer[Video]])
            await producer.put(video, timeout=5)
            assert_type(await consumer.get(timeout=5), Video)


# Threads


def in_threads(address: str, videos: Iterator[Video], tensors: Sequence[torch.Tensor]) -> None:
    with (
        blocking.TensorSender(address) as sender,
        blocking.MessageClient(address, Answer) as client,
        blocking.MessageServer(address, Video) as server,
        blocking.Subscriber(address, Video) as subscriber,
        blocking.MessageQueue(Video).consumer() as consumer,
    ):
        assert_type(client, blocking.MessageClient[Answer])
        for video in videos:
            assert_type(client.request(video, timeout=5.0), Answer)
        with sender.message(timeout=1.0) as message:
            assert_type([message.send(tensor, timeout=1.0) for tensor in tensors], list[TensorHandle])
        for request in server:
            assert_type(request, blocking.Request[Video])
            with request:
                assert_type(request.answer(Answer(request.message.frames)), bool)
        assert_type(subscriber.receive(timeout=1), Publication[Video])
        assert_type(consumer.get(timeout=5), Video)


# Integrations


def trace_calls(tracers: trace.TracerProvider, delivery: Delivery, request: blocking.Request[int]) -> None:
    instrument(tracers)
    assert_type(delivery.trace_context, Mapping[str, str] | None)
    with processing(delivery, request) as span:
        assert_type(span, trace.Span)


async def export_metrics() -> None:
    REGISTRY.register(AioTensorCollector(timeout_s=0.5))
    AioTensorCollector(0.5)  # type: ignore[call-arg]
    async with MultiprocessPublisher(interval_s=2.5) as publisher:
        assert_type(publisher, MultiprocessPublisher)
