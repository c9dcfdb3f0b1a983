"""The engine process: it owns the model, takes requests with the videos inside, and answers them."""

import asyncio
import shutil
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import torch
import uvloop

from aiotensor import TensorQueue, TensorReceiver
from aiotensor.channel import MessageServer
from aiotensor.cli.demo.fingerprint import fingerprint
from aiotensor.cli.demo.messages import AnalyseVideo, VideoAnalysis
from aiotensor.cli.demo.processes import parent_gone, report_ready
from aiotensor.cli.demo.scene import SceneCuts
from aiotensor.runtime.worker import in_thread

__all__ = ["Engine", "run_engine"]

VIDEOS_AT_ONCE = 2


class Engine:
    """Answer requests, several at a time, each as soon as it is done.

    Args:
        server: an open server with a receiver.
    """

    def __init__(self, server: MessageServer[AnalyseVideo]) -> None:
        self._server = server
        self._threads = anyio.CapacityLimiter(VIDEOS_AT_ONCE)
        self._model = SceneCuts().eval()
        self._busy = 0
        self._free_since = time.monotonic()

    async def serve(self) -> None:
        """Answer requests until cancelled, or until the server is closed."""
        # Tensors are taken when their turn comes, not before: until then the sender's permits stay
        # taken, and the API server waits instead of decoding more.
        await self._server.serve(self._analyse, max_concurrent=VIDEOS_AT_ONCE)

    async def _analyse(self, request: AnalyseVideo) -> VideoAnalysis:
        # A video that waited for its turn was not on its way all that time.
        transport_seconds = time.monotonic() - max(request.sent_at, self._free_since)
        self._busy += 1
        stop = threading.Event()
        work = partial(self._work, request, transport_seconds, stop)
        try:
            return await in_thread(work, limiter=self._threads)
        finally:
            stop.set()  # cancelling does not end the thread
            if self._busy == VIDEOS_AT_ONCE:
                self._free_since = time.monotonic()
            self._busy -= 1

    def _work(self, request: AnalyseVideo, transport_seconds: float, stop: threading.Event) -> VideoAnalysis:
        def checkpoint() -> None:
            if stop.is_set():
                raise asyncio.CancelledError

        start = time.monotonic()
        cuts = self._model.find(request.frames, request.times, checkpoint)
        model_seconds = time.monotonic() - start
        return VideoAnalysis(
            times=fingerprint(request.times.numpy(), checkpoint),
            frames=fingerprint(request.frames.numpy(), checkpoint),
            cuts=cuts,
            transport_seconds=transport_seconds,
            model_seconds=model_seconds,
        )


async def _main(endpoint: TensorQueue | str, address: str, folder: Path, pipe: Connection) -> None:
    try:
        async with (
            TensorReceiver(endpoint) as receiver,
            MessageServer(address, AnalyseVideo, receiver=receiver) as server,
            anyio.create_task_group() as group,
        ):
            group.start_soon(Engine(server).serve)
            report_ready(pipe)
            await parent_gone(pipe)
            group.cancel_scope.cancel()
    finally:
        # The parent does this too, unless it was killed.
        shutil.rmtree(folder, ignore_errors=True)


def run_engine(
    endpoint: TensorQueue | str, address: str, folder: Path, threads: int, pipe: Connection
) -> None:
    """Run the engine until the parent closes the pipe.

    Args:
        endpoint: where tensors arrive.
        address: where requests arrive.
        folder: that the sockets are in; it goes when the engine ends.
        threads: how many torch may use.
        pipe: the child's end of the pipe to the parent.
    """
    torch.set_num_threads(threads)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(endpoint, address, folder, pipe))
