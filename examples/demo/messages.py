"""The records that are sent between processes."""

from typing import Annotated

import msgspec
import torch

from aiotensor.channel import ClientStatistics
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
    """The type, shape and checksum of a tensor, which must be equal on both sides.

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
        distance: the distance of its colours from those of the previous frame, from 0 to 1.
    """

    frame: int
    seconds: float
    distance: float


class AnalyseVideo(msgspec.Struct, frozen=True):
    """A request for the scene cuts of a video.

    Attributes:
        times: the timestamp of each frame, in seconds.
        frames: (frames, height, width, 3), in RGB order.
        sent_at: the time at which the worker began to send this, in seconds of the monotonic clock.
    """

    times: Annotated[torch.Tensor, TensorMeta(dtype=torch.float64, shape=(None,))]
    frames: Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8, shape=(None, None, None, 3))]
    sent_at: float


class VideoAnalysis(msgspec.Struct, frozen=True):
    """The answer of the engine.

    Attributes:
        times: the fingerprint of the received timestamps.
        frames: the fingerprint of the received frames.
        cuts: the scene cuts, in order.
        transport_seconds: the time until the engine had both tensors. It starts when the worker began to send
            them, or when the engine could take another video, whichever is later, so it does not include the
            wait for a busy engine.
        model_seconds: the time in the model.
    """

    times: Fingerprint
    frames: Fingerprint
    cuts: list[Cut]
    transport_seconds: float
    model_seconds: float


class VideoAnswer(msgspec.Struct, frozen=True):
    """The response to a successful `POST /videos`.

    Attributes:
        name: the name of the uploaded file.
        worker: the process id of the worker that served the request.
        bytes: the size of both tensors.
        decode_seconds: the time for decoding.
        memory_seconds: the time for allocating shared memory for the frames.
        transport_seconds: the time that the engine measured, see `VideoAnalysis`.
        model_seconds: the time in the model.
        sent: the fingerprints of the timestamps and the frames before they were sent.
        received: their fingerprints in the engine.
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
    """A worker of the API server serves requests from now on.

    Attributes:
        pid: its process id.
    """

    pid: int


class WorkerReport(msgspec.Struct, frozen=True, tag="report"):
    """The counts of a worker of the API server, and the last record that it sends.

    Attributes:
        pid: its process id.
        videos: the number of videos that the engine answered.
        videos_in_place: the number of videos whose frames were decoded directly into shared memory.
        bytes_in_place: the size of these frames, which were not copied.
        client: the statistics of its client.
    """

    pid: int
    videos: int
    videos_in_place: int
    bytes_in_place: int
    client: ClientStatistics


WorkerMessage = WorkerStarted | WorkerReport
