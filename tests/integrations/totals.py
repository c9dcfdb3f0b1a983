"""What the servers of these tests ask their engine: to add numbers up."""

import logging
import os

import msgspec
import torch

from aiotensor import TensorSender
from aiotensor.channel import MessageClient

__all__ = [
    "PERMITS",
    "UPLOAD_GRACE_S",
    "Held",
    "Numbers",
    "Total",
    "client",
    "held",
    "log_errors",
    "numbers",
    "sender",
    "total_of",
]

PERMITS = 4
UPLOAD_GRACE_S = float(os.environ.get("TOTALS_UPLOAD_GRACE_S", "10"))
_COPIES = 16


class Numbers(msgspec.Struct):
    """What is asked."""

    values: torch.Tensor


class Total(msgspec.Struct):
    """What is answered."""

    total: int


class Held(msgspec.Struct):
    """What a worker has, as it says itself."""

    pid: int
    in_flight: int
    peak_in_flight: int
    waiting: int
    bytes_in_use: int
    peak_bytes_in_use: int
    requests: int
    servers: int


def log_errors() -> None:
    """Write warnings and errors of all loggers, with their levels, to standard error if the test wants it."""
    if "TOTALS_LOG" in os.environ:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")


def sender() -> TensorSender:
    """Make the sender of a worker, as its environment says."""
    return TensorSender(
        os.environ["TOTALS_TENSORS"],
        PERMITS,
        int(os.environ["TOTALS_ARENA_BYTES"]),
        max_wait_s=float(os.environ["TOTALS_MAX_WAIT_S"]),
    )


def client(sender: TensorSender) -> MessageClient[Total]:
    """Make the client of a worker."""
    return MessageClient(
        os.environ["TOTALS_MESSAGES"],
        sender=sender,
        reply_type=Total,
        max_wait_s=float(os.environ["TOTALS_MAX_WAIT_S"]),
    )


def numbers(body: bytes) -> Numbers:
    """Decode an upload: it has less bytes than what comes of it, as a video has."""
    return Numbers(torch.frombuffer(bytearray(body), dtype=torch.uint8).repeat(_COPIES))


def held(sender: TensorSender, client: MessageClient[Total]) -> Held:
    """Say what a worker has."""
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
    """Say what the engine is to answer."""
    return sum(body) * _COPIES
