"""The engine process: it owns the model, and answers requests that contain videos."""

import asyncio
import shutil
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import torch
import uvloop

from aiotensor import MessageServer, TensorQueue
from demo.fingerprint import fingerprint
from demo.messages import AnalyseVideo, VideoAnalysis
from demo.processes import parent_gone, report_ready
from demo.scene import SceneCuts
from demo.threads import Checkpoint, in_thread

__all__ = ["Engine", "run_engine"]

VIDEOS_AT_ONCE = 2


class Engine:
    """Answer several requests at once, each as soon as its analysis is complete.

    Args:
        server: an open server.
    """

    def __init__(self, server: MessageServer[AnalyseVideo]) -> None:
        self._server = server
        self._model = SceneCuts().eval()
        self._busy = 0
        self._free_since = time.monotonic()

    async def serve(self) -> None:
        """Answer requests until this is cancelled or the server is closed."""
        # A request is taken only when its analysis begins. Until then it keeps its permit, and the API server
        # waits instead of decoding more videos.
        await self._server.serve(self._analyse, max_concurrent=VIDEOS_AT_ONCE)

    async def _analyse(self, request: AnalyseVideo) -> VideoAnalysis:
        # The wait for a busy engine does not count as transport.
        transport_seconds = time.monotonic() - max(request.sent_at, self._free_since)
        self._busy += 1
        try:
            return await in_thread(partial(self._work, request, transport_seconds))
        finally:
            if self._busy == VIDEOS_AT_ONCE:
                self._free_since = time.monotonic()
            self._busy -= 1

    def _work(self, request: AnalyseVideo, transport_seconds: float, checkpoint: Checkpoint) -> VideoAnalysis:
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


async def _main(endpoint: TensorQueue | str, folder: Path, pipe: Connection) -> None:
    try:
        async with (
            MessageServer(endpoint, AnalyseVideo) as server,
            anyio.create_task_group() as group,
        ):
            group.start_soon(Engine(server).serve)
            report_ready(pipe)
            await parent_gone(pipe)
            group.cancel_scope.cancel()
    finally:
        # The parent does the same, unless it was killed.
        shutil.rmtree(folder, ignore_errors=True)


def run_engine(endpoint: TensorQueue | str, folder: Path, threads: int, pipe: Connection) -> None:
    """Run the engine until the parent closes the pipe.

    Args:
        endpoint: the address or queue at which requests arrive.
        folder: the folder of the sockets, which is deleted when the engine ends.
        threads: the number of threads of torch.
        pipe: the child's end of the pipe to the parent.
    """
    torch.set_num_threads(threads)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(endpoint, folder, pipe))
