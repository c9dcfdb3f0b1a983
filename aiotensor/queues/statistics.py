"""The statistics of producers and consumers."""

import msgspec

__all__ = ["ConsumerStatistics", "ProducerStatistics"]


class ProducerStatistics(msgspec.Struct, frozen=True):
    """The current usage of one producer, and its totals since it was opened.

    Attributes:
        max_messages: the limit of accepted messages that no consumer has taken.
        messages: the accepted messages that no consumer has taken.
        peak_messages: the most such messages at once.
        waiting: the calls of `put` that wait.
        taken: the messages that consumers have taken.
        redelivered: how often a message was sent again because its consumer was lost.
    """

    max_messages: int
    messages: int
    peak_messages: int
    waiting: int
    taken: int
    redelivered: int


class ConsumerStatistics(msgspec.Struct, frozen=True):
    """The current usage of one consumer, and its totals since it was opened.

    Attributes:
        messages: the messages that have arrived and were not taken.
        taken: the messages that `get` and the iteration have returned.
    """

    messages: int
    taken: int
