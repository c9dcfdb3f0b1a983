"""Messages, as a type checker sees them: checked by mypy, never run."""

from collections.abc import Iterator
from typing import Annotated, assert_type

import msgspec
import torch

from aiotensor import OpenMessage, TensorReceiver, TensorSender, blocking
from aiotensor.channel import (
    ClientStatistics,
    MessageClient,
    MessageServer,
    Request,
    ServerStatistics,
)
from aiotensor.codec import TensorDecoder, TensorEncoder, TensorMeta


class Video(msgspec.Struct):
    """A request."""

    frames: Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8, shape=(None, None, None, 3))]
    fps: float = 30.0


class Answer(msgspec.Struct):
    """The answer to it."""

    vector: torch.Tensor


async def ask(address: str, sender: TensorSender, receiver: TensorReceiver, video: Video) -> torch.Tensor:
    async with MessageClient(address, sender=sender, receiver=receiver, reply_type=Answer) as client:
        assert_type(client, MessageClient[Answer])
        assert_type(await client.ready(), None)
        answer = await client.request(video)
        assert_type(answer, Answer)
        await client.request(video, target=1)
        await client.send(video)
        async with sender.message() as permit:
            assert_type(permit, OpenMessage)
            await client.request(video, inside=permit)
        assert_type(client.statistics(), ClientStatistics)
        assert_type(client.statistics().in_flight, tuple[int, ...])
        assert_type(client.statistics().errors, dict[str, int])

        await client.request(video, 1)  # type: ignore[call-arg]
        await client.request(video, target="first")  # type: ignore[arg-type]
    MessageClient([address, address], sender=[sender, sender], reply_type=Answer)
    MessageClient(address, reply_type=dict[str, torch.Tensor])
    MessageClient(address)  # type: ignore[call-arg]
    return answer.vector


async def answer_all(address: str, receiver: TensorReceiver, sender: TensorSender) -> None:
    async with MessageServer(address, Video, receiver=receiver, sender=sender, max_clients=None) as server:
        assert_type(server, MessageServer[Video])
        assert_type(server.address, str)
        assert_type(await server.arrived(), None)
        async for request in server:
            assert_type(request, Request[Video])
            assert_type(request.message.frames, torch.Tensor)
            assert_type(request.client_pid, int)
            if request.is_wanted:
                assert_type(await request.reply(Answer(request.message.frames)), bool)
            else:
                await request.fail(ValueError("too late"))
            await request.fail(5)  # type: ignore[arg-type]
            async with request:
                pass
        await server.serve(work, max_concurrent=2)
        assert_type(server.statistics(), ServerStatistics)
    MessageServer(address, Video, receiver)  # type: ignore[call-arg]


async def work(video: Video) -> Answer:
    return Answer(video.frames)


def encode_and_decode(video: Video) -> Video:
    encoder = TensorEncoder(lambda tensor: None if tensor.nbytes < 10 else tensor.dim())
    decoder = TensorDecoder(Video, find=lambda handle: torch.zeros(int(handle)))
    parts = encoder.encode(video)
    assert_type(parts, list[bytes | memoryview])
    assert_type(decoder.decode(parts), Video)
    TensorMeta(dtype="uint8")  # type: ignore[arg-type]
    return decoder.decode(parts)


def in_a_thread(address: str, videos: Iterator[Video]) -> None:
    with (
        blocking.TensorSender(address) as sender,
        blocking.TensorReceiver(address) as receiver,
        blocking.MessageClient(address, sender=sender, reply_type=Answer) as client,
        blocking.MessageServer(address, Video, receiver=receiver) as server,
    ):
        assert_type(client, blocking.MessageClient[Answer])
        for video in videos:
            assert_type(client.request(video, timeout=5.0), Answer)
            with sender.message(timeout=1.0) as message:
                message.send(video.frames, timeout=1.0)
        for request in server:
            assert_type(request, blocking.Request[Video])
            with request:
                assert_type(request.reply(Answer(request.message.frames)), bool)
        assert_type(server.next(timeout=0), blocking.Request[Video])
        server.serve(lambda video: Answer(video.frames))
        assert_type(sender.allocate((2, 3), torch.uint8, timeout=1), torch.Tensor)
