"""Senders, receivers, publishers and subscribers with the arguments that the link of an endpoint needs."""

from typing import Any, TypeVar

from aiotensor import TensorReceiver, TensorSender
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.transports.endpoints import Endpoint
from verification.places import arguments_of

__all__ = ["publisher_at", "receiver_at", "sender_at", "subscriber_at"]

T = TypeVar("T")


def sender_at(
    endpoint: Endpoint, max_concurrent_videos: int = 8, arena_bytes: int = 1 << 30, **kwargs: Any
) -> TensorSender:
    """Return a sender for an endpoint of a link."""
    return TensorSender(endpoint, max_concurrent_videos, arena_bytes, **kwargs, **arguments_of(endpoint))


def receiver_at(endpoint: Endpoint, **kwargs: Any) -> TensorReceiver:
    """Return a receiver for an endpoint of a link."""
    return TensorReceiver(endpoint, **kwargs, **arguments_of(endpoint))


def publisher_at(endpoint: Endpoint, **kwargs: Any) -> Publisher:
    """Return a publisher for an endpoint of a link."""
    return Publisher(endpoint, **kwargs, **arguments_of(endpoint))


def subscriber_at(endpoint: Endpoint, type_: type[T], **kwargs: Any) -> Subscriber[T]:
    """Return a subscriber for an endpoint of a link."""
    return Subscriber(endpoint, type_, **kwargs, **arguments_of(endpoint))
