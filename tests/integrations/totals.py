"""The messages between the servers of these tests and their engine, which adds numbers up."""

import os

import msgspec
import torch

from aiotensor.channel import MessageClient
from aiotensor.types import ClientStatistics

PERMITS = 4
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
    client: ClientStatistics


def client() -> MessageClient[Total]:
    """Create the client of a worker from its environment."""
    return MessageClient(
        os.environ["TOTALS_ADDRESS"],
        Total,
        PERMITS,
        int(os.environ["TOTALS_ARENA_BYTES"]),
        max_wait_s=float(os.environ["TOTALS_MAX_WAIT_S"]),
    )


def numbers(body: bytes) -> Numbers:
    """Decode an upload into a larger tensor, as a video decoder does."""
    return Numbers(torch.frombuffer(bytearray(body), dtype=torch.uint8).repeat(_COPIES))


def held(client: MessageClient[Total]) -> bytes:
    """Encode the resources of a worker."""
    return msgspec.json.encode(Held(os.getpid(), client.statistics()))


def total_of(body: bytes) -> int:
    """Return the correct answer of the engine."""
    return sum(body) * _COPIES
