"""An engine in a child process, whose model is slow and traced."""

import asyncio

import msgspec
import torch

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageServer
from verification.processes.peers import State

__all__ = ["Sum", "Video", "open_engine", "serve"]


class Video(msgspec.Struct):
    """A request."""

    frames: torch.Tensor


class Sum(msgspec.Struct):
    """The answer, with a tensor of the same size."""

    total: int
    frames: torch.Tensor


async def open_engine(state: State, messages: str, answers: str) -> None:
    """Open the engine, with a sender to the receiver of its client."""
    enter = state.stack.enter_async_context
    receiver = await enter(TensorReceiver(state.endpoint))
    sender = await enter(TensorSender(answers, max_concurrent_videos=1))
    state.others["server"] = await enter(MessageServer(messages, Video, receiver=receiver, sender=sender))
    await sender.ready()


async def serve(state: State) -> None:
    """Begin to answer."""
    server: MessageServer[Video] = state.others["server"]

    async def model(video: Video) -> Sum:
        if video.frames.numel() == 0:
            raise ValueError("the video has no frames")
        with state.others["recorder"].tracer.start_as_current_span("forward"):
            await asyncio.sleep(0)
            return Sum(int(video.frames.sum()), video.frames + 1)

    state.others["serving"] = asyncio.create_task(server.serve(model))
