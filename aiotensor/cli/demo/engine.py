"""The engine process: it owns the model, receives tensors, and answers over ZeroMQ."""

import asyncio
import shutil
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
import torch
import uvloop
import zmq
import zmq.asyncio

from aiotensor import AioTensorError, TensorQueue, TensorReceiver
from aiotensor.cli.demo.fingerprint import fingerprint
from aiotensor.cli.demo.messages import AnalyseVideo, EngineFailure, EngineReply, VideoAnalysis
from aiotensor.cli.demo.processes import parent_gone, report_ready
from aiotensor.cli.demo.scene import SceneCuts

__all__ = ["Engine", "run_engine"]

VIDEOS_AT_ONCE = 2


class Engine:
    """Answer requests, several at a time, each as soon as it is done.

    Args:
        receiver: an open receiver.
        socket: a bound ROUTER socket.
    """

    def __init__(self, receiver: TensorReceiver, socket: zmq.asyncio.Socket) -> None:
        self._receiver = receiver
        self._socket = socket
        self._model = SceneCuts().eval()
        self._turns = anyio.Semaphore(VIDEOS_AT_ONCE)
        self._requests = msgspec.msgpack.Decoder(AnalyseVideo)
        self._replies = msgspec.msgpack.Encoder()

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        async with anyio.create_task_group() as group:
            while True:
                # The envelope (who asks, and which request it is) goes back as it came.
                *envelope, body = await self._socket.recv_multipart()
                group.start_soon(self._answer, envelope, body)

    async def _answer(self, envelope: list[bytes], body: bytes) -> None:
        reply: EngineReply
        try:
            reply = await self._analyse(self._requests.decode(body))
        except (AioTensorError, msgspec.MsgspecError, RuntimeError, ValueError) as error:
            # Discarded, lost, no request at all, or nothing that the model can use (torch raises
            # RuntimeError for much of that): it concerns this request only.
            reply = EngineFailure(type(error).__name__, str(error))
        await self._socket.send_multipart([*envelope, self._replies.encode(reply)])

    async def _analyse(self, request: AnalyseVideo) -> VideoAnalysis:
        asked = time.monotonic()
        # Tensors are taken when their turn comes, not before: until then the sender's permits stay
        # taken, and the server waits instead of decoding more.
        async with self._turns:
            turn = time.monotonic()
            times = await self._receiver.receive(request.times)
            frames = await self._receiver.receive(request.frames)
            received = time.monotonic()
            work = partial(self._work, times, frames, received_at=received, queued_seconds=turn - asked)
            return await anyio.to_thread.run_sync(work)

    def _work(
        self, times: torch.Tensor, frames: torch.Tensor, *, received_at: float, queued_seconds: float
    ) -> VideoAnalysis:
        checkpoint = anyio.from_thread.check_cancelled
        start = time.monotonic()
        cuts = self._model.find(frames, times, checkpoint)
        model_seconds = time.monotonic() - start
        return VideoAnalysis(
            times=fingerprint(times.numpy(), checkpoint),
            frames=fingerprint(frames.numpy(), checkpoint),
            cuts=cuts,
            received_at=received_at,
            queued_seconds=queued_seconds,
            model_seconds=model_seconds,
        )


async def _main(endpoint: TensorQueue | str, socket_path: Path, pipe: Connection) -> None:
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.ROUTER)
        socket.bind(f"ipc://{socket_path}")
        async with TensorReceiver(endpoint) as receiver, anyio.create_task_group() as group:
            group.start_soon(Engine(receiver, socket).serve)
            report_ready(pipe)
            await parent_gone(pipe)
            group.cancel_scope.cancel()
    finally:
        context.destroy(linger=0)
        # The parent does this too, unless it was killed.
        shutil.rmtree(socket_path.parent, ignore_errors=True)


def run_engine(endpoint: TensorQueue | str, socket_path: Path, threads: int, pipe: Connection) -> None:
    """Run the engine until the parent closes the pipe.

    Args:
        endpoint: where tensors arrive.
        socket_path: where the socket for requests is made; the folder goes when the engine ends.
        threads: how many torch may use.
        pipe: the child's end of the pipe to the parent.
    """
    torch.set_num_threads(threads)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(endpoint, socket_path, pipe))
