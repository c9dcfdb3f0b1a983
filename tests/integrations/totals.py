"""The messages between the servers of these tests and their engine, which adds numbers up."""

import os

import msgspec
import torch

from aiotensor import TensorSender
from aiotensor.channel import MessageClient

__all__ = ["PERMITS", "Held", "Numbers", "Total", "client", "held", "numbers", "sender", "total_of"]

PERMITS = 4
DRAIN_S = float(os.environ.get("TOTALS_DRAIN_S", "1"))
UPLOAD_GRACE_S = float(os.environ.get("TOTALS_UPLOAD_GRACE_S", "10"))
_MAX_WAIT_S = float(os.environ.get("TOTALS_MAX_WAIT_S", "20"))
_COPIES = 16


class Numbers(msgspec.Struct):
    """A request."""

    values: torch.Tensor


class Total(msgspec.Struct):
    """The answer."""

    total: int


class Held(msgspec.Struct):
    """The resources of a worker, as the worker reports them."""

    pid: int
    in_flight: int
    peak_in_flight: int
    waiting: int
    bytes_in_use: int
    peak_bytes_in_use: int
    requests: int
    servers: int


def sender() -> TensorSender:
    """Create the sender of a worker from its environment."""
    return TensorSender(
        os.environ["TOTALS_TENSORS"],
        PERMITS,
        int(os.environ["TOTALS_ARENA_BYTES"]),
        max_wait_s=_MAX_WAIT_S,
    )


def client() -> MessageClient[Total]:
    """Create the client of a worker from its environment."""
    return MessageClient(
        os.environ["TOTALS_MESSAGES"], sender=sender(), reply_type=Total, max_wait_s=_MAX_WAIT_S
    )


def numbers(body: bytes) -> Numbers:
    """Decode an upload into a larger tensor, as a video decoder does."""
    return Numbers(torch.frombuffer(bytearray(body), dtype=torch.uint8).repeat(_COPIES))


def held(client: MessageClient[Total]) -> Held:
    """Return the resources of a worker."""
    [sender] = client.senders
    sent, asked = sender.statistics(), client.statistics()
    return Held(
        pid=os.getpid(),
        in_flight=sent.in_flight,
        peak_in_flight=sent.peak_in_flight,
        waiting=sent.waiting,
        bytes_in_use=sent.bytes_in_use,
        peak_bytes_in_use=sent.peak_bytes_in_use,
        requests=asked.in_flight[0],
        servers=asked.servers,
    )


def total_of(body: bytes) -> int:
    """Return the correct answer of the engine."""
    return sum(body) * _COPIES
