"""Every record that crosses a process border, so that both ends read the same definition."""

from typing import Annotated

import msgspec
import torch

from aiotensor import SenderStatistics
from aiotensor.codec import TensorMeta

__all__ = [
    "AnalyseVideo",
    "Cut",
    "Fingerprint",
    "VideoAnalysis",
    "VideoAnswer",
    "WorkerMessage",
    "WorkerReport",
    "WorkerStarted",
]


class Fingerprint(msgspec.Struct, frozen=True):
    """What one tensor looked like on one side: equal on both sides, or the transport is broken.

    Attributes:
        dtype: the name of the data type.
        shape: the sizes of the dimensions, in elements.
        crc32: the checksum of all bytes in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    crc32: int


class Cut(msgspec.Struct, frozen=True):
    """The first frame of a new scene.

    Attributes:
        frame: its index in the video, from 0.
        seconds: its timestamp.
        distance: how far its colours are from the frame before, from 0 to 1.
    """

    frame: int
    seconds: float
    distance: float


class AnalyseVideo(msgspec.Struct, frozen=True):
    """Ask the engine for the scene cuts of one video.

    Attributes:
        times: the timestamp of each frame, in seconds.
        frames: (frames, height, width, 3), red before green before blue.
        sent_at: when the worker began to send this, in seconds of this machine's monotonic clock.
    """

    times: Annotated[torch.Tensor, TensorMeta(dtype=torch.float64, shape=(None,))]
    frames: Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8, shape=(None, None, None, 3))]
    sent_at: float


class VideoAnalysis(msgspec.Struct, frozen=True):
    """What the engine found.

    Attributes:
        times: what the timestamps look like on the engine's side.
        frames: the same for the frames.
        cuts: the scene cuts, in order.
        transport_seconds: from when the worker began to send, or from when the engine was free to take
            another video if that was later, until the engine had both tensors. What was on its way while the
            engine was busy is not in it, nor is the waiting for that.
        model_seconds: how long the model ran.
    """

    times: Fingerprint
    frames: Fingerprint
    cuts: list[Cut]
    transport_seconds: float
    model_seconds: float


class VideoAnswer(msgspec.Struct, frozen=True):
    """The body of a successful `POST /videos`.

    Attributes:
        name: the name of the uploaded file.
        worker: the process id of the worker that served it.
        bytes: the bytes of both tensors.
        decode_seconds: how long decoding took.
        memory_seconds: how long it took to get shared memory for the frames.
        transport_seconds: as the engine measured it, see `VideoAnalysis`.
        model_seconds: how long the model ran.
        sent: what the timestamps and the frames looked like before they were sent.
        received: what they looked like in the engine.
        cuts: the scene cuts, in order.
    """

    name: str
    worker: int
    bytes: int
    decode_seconds: float
    memory_seconds: float
    transport_seconds: float
    model_seconds: float
    sent: tuple[Fingerprint, Fingerprint]
    received: tuple[Fingerprint, Fingerprint]
    cuts: list[Cut]


class WorkerStarted(msgspec.Struct, frozen=True, tag="started"):
    """A worker of the API server serves requests now.

    Attributes:
        pid: its process id.
    """

    pid: int


class WorkerReport(msgspec.Struct, frozen=True, tag="report"):
    """What a worker of the API server has done. It sends nothing after this.

    Attributes:
        pid: its process id.
        videos: videos that the engine answered.
        videos_in_place: those whose frames the decoder wrote straight into the shared memory that the engine
            read.
        bytes_in_place: bytes of these frames, none of which were copied.
        sender: what its sender counted.
    """

    pid: int
    videos: int
    videos_in_place: int
    bytes_in_place: int
    sender: SenderStatistics


WorkerMessage = WorkerStarted | WorkerReport
