"""Publish messages to any number of subscribers, with one copy of each tensor in shared memory."""

from aiotensor.broadcast.publisher import Publisher
from aiotensor.broadcast.subscriber import Subscriber
from aiotensor.protocol.audience import SlowPolicy
from aiotensor.types import Publication, Published, PublisherStatistics, SubscriberLag, SubscriberStatistics

__all__ = [
    "Publication",
    "Published",
    "Publisher",
    "PublisherStatistics",
    "SlowPolicy",
    "Subscriber",
    "SubscriberLag",
    "SubscriberStatistics",
]
