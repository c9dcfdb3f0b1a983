"""The engine answers requests of a channel within one process, with a model that the tests control."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
import torch

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from demo import engine as module
from demo.engine import VIDEOS_AT_ONCE, Engine
from demo.fingerprint import fingerprint
from demo.messages import AnalyseVideo, Cut, VideoAnalysis
from demo.scene import SceneCuts

TIMES = torch.arange(8, dtype=torch.float64) / 25


class Model:
    """Analyse each video until it is released. The value of all its pixels identifies a video."""

    def __init__(self) -> None:
        self.begun: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.let_go: dict[int, threading.Event] = defaultdict(threading.Event)
        self.at_work = self.peak = 0
        self._loop = asyncio.get_running_loop()

    def find(
        self, frames: torch.Tensor, times: torch.Tensor, checkpoint: Callable[[], None] = lambda: None
    ) -> list[Cut]:
        video = int(frames[0, 0, 0, 0])
        self._loop.call_soon_threadsafe(self._begin, video)
        try:
            while not self.let_go[video].is_set():
                checkpoint()
        finally:
            self._loop.call_soon_threadsafe(self._end)
        return []

    def _begin(self, video: int) -> None:
        self.at_work += 1
        self.peak = max(self.peak, self.at_work)
        self.begun[video].set()

    def _end(self) -> None:
        self.at_work -= 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
async def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model()
    monkeypatch.setattr(SceneCuts, "find", lambda _, *arguments: model.find(*arguments))
    return model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@dataclass
class Ends:
    client: MessageClient[VideoAnalysis]
    sender: TensorSender
    server: MessageServer[AnalyseVideo]

    def ask(self, video: int, *, sent_at: float = 0.0) -> asyncio.Task[VideoAnalysis]:
        request = AnalyseVideo(times=TIMES, frames=frames_of(video), sent_at=sent_at)
        return asyncio.create_task(self.client.request(request))


def frames_of(video: int) -> torch.Tensor:
    return torch.full((8, 48, 64, 3), video, dtype=torch.uint8)


@asynccontextmanager
async def engine(folder: Path) -> AsyncIterator[Ends]:
    tensors, requests = f"unix://{folder}/tensors.sock", f"ipc://{folder}/engine.sock"
    async with (
        TensorReceiver(tensors) as receiver,
        TensorSender(tensors) as sender,
        MessageServer(requests, AnalyseVideo, receiver=receiver) as server,
        MessageClient(requests, sender=sender, reply_type=VideoAnalysis) as client,
        anyio.create_task_group() as group,
    ):
        group.start_soon(Engine(server).serve)
        yield Ends(client, sender, server)
        group.cancel_scope.cancel()


async def test_requests_are_answered_in_order_of_completion(tmp_path: Path, model: Model) -> None:
    async with engine(tmp_path) as ends:
        first = ends.ask(1)
        await model.begun[1].wait()
        model.let_go[2].set()
        second = await ends.ask(2)
        assert not first.done()
        model.let_go[1].set()

        assert second.frames == fingerprint(frames_of(2).numpy())
        assert (await first).frames == fingerprint(frames_of(1).numpy())
        assert (await first).times == fingerprint(TIMES.numpy())


async def test_tensors_are_taken_only_when_the_work_for_them_begins(tmp_path: Path, model: Model) -> None:
    async with engine(tmp_path) as ends:
        at_work = [ends.ask(video) for video in range(VIDEOS_AT_ONCE)]
        for video in range(VIDEOS_AT_ONCE):
            await model.begun[video].wait()
        waiting = [ends.ask(VIDEOS_AT_ONCE + number) for number in range(4)]
        while ends.server.statistics().waiting < len(waiting):
            await asyncio.sleep(0)
        # The engine receives the cancellation last: by then it would have taken the others, if it did.
        waiting.pop().cancel()
        while ends.server.statistics().cancelled == 0:
            await asyncio.sleep(0)

        assert ends.server.statistics().waiting == len(waiting)
        assert ends.sender.statistics().in_flight == len(waiting)
        for video in range(VIDEOS_AT_ONCE + len(waiting)):
            model.let_go[video].set()
        await asyncio.gather(*at_work, *waiting)

    assert model.peak == VIDEOS_AT_ONCE


async def test_cancelling_a_request_ends_its_work_and_starts_another(tmp_path: Path, model: Model) -> None:
    async with engine(tmp_path) as ends:
        given_up = ends.ask(0)
        others = [ends.ask(video) for video in range(1, VIDEOS_AT_ONCE)]
        for video in range(VIDEOS_AT_ONCE):
            await model.begun[video].wait()
        others.append(ends.ask(VIDEOS_AT_ONCE))
        given_up.cancel()
        await model.begun[VIDEOS_AT_ONCE].wait()
        for video in range(1, VIDEOS_AT_ONCE + 1):
            model.let_go[video].set()
        await asyncio.gather(*others)

        assert given_up.cancelled()
        assert ends.server.statistics().cancelled == 1


async def test_the_transport_of_a_video_lasts_from_its_sending_until_the_engine_has_it(
    tmp_path: Path, model: Model, clock: Clock
) -> None:
    for video in (1, 2):
        model.let_go[video].set()
    async with engine(tmp_path) as ends:
        clock.now = 100.0
        first = await ends.ask(1, sent_at=97.0)
        clock.now = 160.0
        second = await ends.ask(2, sent_at=98.0)  # the end of the first one changes nothing

    assert first.transport_seconds == 3.0
    assert second.transport_seconds == 62.0


async def test_waiting_for_other_videos_does_not_count_as_transport_time(
    tmp_path: Path, model: Model, clock: Clock
) -> None:
    async with engine(tmp_path) as ends:
        clock.now = 100.0
        at_work = [ends.ask(video, sent_at=99.0) for video in range(VIDEOS_AT_ONCE)]
        for video in range(VIDEOS_AT_ONCE):
            await model.begun[video].wait()
        waiting = ends.ask(VIDEOS_AT_ONCE, sent_at=100.0)
        clock.now = 150.0
        model.let_go[0].set()
        await model.begun[VIDEOS_AT_ONCE].wait()
        model.let_go[VIDEOS_AT_ONCE].set()
        await waiting
        clock.now = 160.0
        model.let_go[VIDEOS_AT_ONCE + 1].set()
        after = await ends.ask(VIDEOS_AT_ONCE + 1, sent_at=158.0)
        for video in range(1, VIDEOS_AT_ONCE):
            model.let_go[video].set()
        before = await asyncio.gather(*at_work)

    assert [analysis.transport_seconds for analysis in before] == [1.0] * VIDEOS_AT_ONCE
    assert (await waiting).transport_seconds == 0.0
    assert after.transport_seconds == 2.0
