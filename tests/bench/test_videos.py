"""The clips that API servers decode, and the parts of the contenders that send them."""

import io
from multiprocessing import get_context
from queue import Empty

import av
import numpy as np
import pytest
import torch

from bench.clips import clips
from bench.contenders.torch_queue_handles import Buffer, Handle, TensorQueue
from bench.usage import PeakWatch
from tests.sending.test_memory import MIB


def test_a_clip_has_three_lengths_within_the_bytes() -> None:
    shapes = [clip.shape for clip in clips(9 * MIB // 2)]
    assert [frames for frames, *_ in shapes] == [3, 6, 9]
    assert int(np.prod(shapes[-1])) <= 9 * MIB // 2
    assert [clip.shape[0] for clip in clips(1)] == [1, 1, 1]


def test_the_frames_are_those_of_the_file() -> None:
    clip = clips(2 * MIB)[-1]
    frames = np.empty(clip.shape, np.uint8)
    clip.decode(frames)
    with av.open(io.BytesIO(clip.file), "r") as container:
        expected = [
            frame.to_ndarray(format="rgb24")
            for frame, _ in zip(container.decode(video=0), frames, strict=False)
        ]
    assert len(frames) > 1
    assert np.array_equal(frames, expected)


@pytest.fixture
def queue() -> TensorQueue:
    return get_context("spawn").Queue()


def test_tensors_of_several_senders_are_found_by_their_handles_in_any_order(queue: TensorQueue) -> None:
    handles = [Handle(sender, message, 0) for message in (0, 1) for sender in (0, 1)]
    for number, handle in enumerate(handles):
        queue.put((handle, torch.tensor([number])))
    buffer = Buffer(queue)
    assert [int(buffer.take(handles[number])) for number in (2, 1, 3)] == [2, 1, 3]


def test_tensors_of_older_messages_are_dropped_as_stale(
    queue: TensorQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Handle(0, 0, 0), Handle(0, 1, 0)
    for handle in (first, second):
        queue.put((handle, torch.zeros(1)))
    buffer = Buffer(queue)
    buffer.take(second)
    monkeypatch.setattr("bench.contenders.torch_queue_handles._WAIT_S", 0.01)
    with pytest.raises(Empty):
        buffer.take(first)


def test_the_peak_includes_a_sample_at_the_end() -> None:
    samples = iter([3])
    with PeakWatch(lambda: next(samples, 1), every_s=60.0) as watch:
        pass
    assert watch.peak_bytes == 3
    assert watch.cpu_s >= 0
