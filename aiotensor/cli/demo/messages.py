"""Every record that crosses a process border, so that both ends read the same definition."""

import msgspec

from aiotensor import SenderStatistics, TensorHandle

__all__ = [
    "AnalyseVideo",
    "Cut",
    "EngineFailure",
    "EngineReply",
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
    """Ask the engine for the scene cuts of one video, whose two tensors are on their way."""

    times: TensorHandle
    frames: TensorHandle


class VideoAnalysis(msgspec.Struct, frozen=True, tag="analysis"):
    """What the engine found.

    Attributes:
        times: what the timestamps look like on the engine's side.
        frames: the same for the frames.
        cuts: the scene cuts, in order.
        received_at: when the engine held both tensors, in seconds of this machine's monotonic clock.
        queued_seconds: how long the request waited for its turn before the engine asked for the tensors.
        model_seconds: how long the model ran.
    """

    times: Fingerprint
    frames: Fingerprint
    cuts: list[Cut]
    received_at: float
    queued_seconds: float
    model_seconds: float


class EngineFailure(msgspec.Struct, frozen=True, tag="failure"):
    """The engine could not answer this one request."""

    type_name: str
    text: str


EngineReply = VideoAnalysis | EngineFailure


class VideoAnswer(msgspec.Struct, frozen=True):
    """The body of a successful `POST /videos`.

    Attributes:
        name: the name of the uploaded file.
        worker: the process id of the worker that served it.
        bytes: the bytes of both tensors.
        decode_seconds: how long decoding took.
        memory_seconds: how long it took to get shared memory for the frames.
        transport_seconds: from the start of the first send until the engine held both tensors, without
            the time that the request waited for its turn there.
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
        videos: videos that it sent.
        videos_in_place: those that the decoder wrote straight into the shared memory that the engine read.
        bytes_in_place: bytes of their tensors, none of which were copied.
        sender: what its sender counted.
    """

    pid: int
    videos: int
    videos_in_place: int
    bytes_in_place: int
    sender: SenderStatistics


WorkerMessage = WorkerStarted | WorkerReport
