"""The statistics of publishers and subscribers, declared as those in `aiotensor.types.statistics`."""

from typing import Annotated

import msgspec

from aiotensor.types.declaring import Errors, Waits, counter, gauge
from aiotensor.types.values import Number, Seconds

__all__ = ["PublisherStatistics", "SubscriberLag", "SubscriberStatistics"]


class SubscriberLag(msgspec.Struct, frozen=True):
    """How far one subscriber of a publisher is behind, and its totals.

    Attributes:
        subscriber: the id of the subscriber.
        pid: the process id of the subscriber.
        behind: the number of publications that it has not taken.
        behind_s: the seconds since the oldest of these was published; 0 if there is none.
        held_bytes: the bytes of shared memory that it may use, of publications that it has taken or not.
        delivered: the number of publications that it has taken.
        dropped: the number of publications that it has lost because it was slow.
    """

    subscriber: Annotated[str, msgspec.Meta(max_length=64)]
    pid: Number
    behind: Number
    behind_s: Seconds
    held_bytes: Number
    delivered: Number
    dropped: Number


class PublisherStatistics(msgspec.Struct, frozen=True):
    """The current usage of one publisher, and its totals since it was opened.

    The declaration of each field describes it. Fields without `counter` or `gauge` are not exported.
    """

    subscribers: Annotated[Number, gauge("Subscribers that are connected.")]
    max_subscribers: Annotated[
        Number | None, gauge("Limit of connected subscribers.", metric="subscribers_limit")
    ]
    lags: Annotated[
        tuple[SubscriberLag, ...], msgspec.Meta(description="The subscribers, the slowest first.")
    ]
    max_behind: Annotated[
        Number, gauge("Limit of publications that one subscriber may be behind.", metric="behind_limit")
    ]
    behind: Annotated[Number, gauge("Publications that the slowest subscriber has not taken.", largest=True)]
    waiting: Annotated[
        Number, gauge("Calls that wait for subscribers, for memory or for copies.", metric="waiting_calls")
    ]
    longest_wait_s: Annotated[
        Seconds,
        gauge("Time that the longest current wait has lasted.", metric="longest_wait_seconds", largest=True),
    ]
    history: Annotated[Number, gauge("Publications that are kept for later subscribers.")]
    arena_bytes: Annotated[Number, gauge("Limit of shared memory in use.", metric="memory_limit_bytes")]
    bytes_in_use: Annotated[
        Number,
        gauge(
            "Shared memory in use: by subscribers, by the history or by callers.",
            metric="memory_in_use_bytes",
        ),
    ]
    peak_bytes_in_use: Annotated[
        Number,
        gauge(
            "The most shared memory that one publisher used at once.",
            metric="memory_peak_bytes",
            largest=True,
        ),
    ]
    warm_bytes: Annotated[
        Number,
        gauge("Allocated shared memory, in use or kept for the next tensor.", metric="memory_warm_bytes"),
    ]
    largest_free_bytes: Annotated[
        Number,
        gauge(
            "The largest tensor that would get shared memory now if no other call waited.",
            metric="memory_largest_free_bytes",
            largest=True,
        ),
    ]
    published: Annotated[Number, counter("Messages published.", metric="publications")]
    bytes_published: Annotated[
        Number, counter("Bytes of the published messages, counted once.", metric="published_bytes")
    ]
    deliveries: Annotated[Number, counter("Publications taken, counted once for each subscriber.")]
    dropped: Annotated[
        Number, counter("Publications lost by slow subscribers, counted once for each subscriber.")
    ]
    subscribers_lost: Annotated[
        Number, counter("Subscribers that died, broke the protocol, or were disconnected for being slow.")
    ]
    subscribers_refused: Annotated[
        Number,
        counter(
            "Subscribers that were refused because of a limit or their version, and unidentified "
            "connections that newer ones replaced."
        ),
    ]
    subscriber_waits: Annotated[
        Waits,
        counter(
            "Durations of ended waits for slow subscribers and earlier calls.",
            metric="wait_seconds",
            labels={"for": "subscribers"},
        ),
    ]
    memory_waits: Annotated[
        Waits,
        counter("Durations of ended waits for memory.", metric="wait_seconds", labels={"for": "memory"}),
    ]
    tensors_copied: Annotated[Number, counter("Tensors that publishing copied into shared memory.")]
    bytes_copied: Annotated[Number, counter("Bytes of the copied tensors.", metric="copied_bytes")]
    bytes_forwarded: Annotated[
        Number,
        counter("Bytes of received tensors that were published without a copy.", metric="forwarded_bytes"),
    ]
    errors: Annotated[Errors, counter("Calls of publishers that raised an error, by the type of the error.")]


class SubscriberStatistics(msgspec.Struct, frozen=True):
    """The current state of one subscriber, and its totals since it was opened.

    The declaration of each field describes it.
    """

    publishers: Annotated[Number, gauge("Whether a publisher is connected.")]
    waiting: Annotated[
        Number, gauge("Calls and iterations that wait for a publication.", metric="waiting_calls")
    ]
    unclaimed: Annotated[
        Number,
        gauge("Publications that have arrived and have not been taken.", metric="unclaimed_publications"),
    ]
    mapped_bytes: Annotated[
        Number, gauge("Shared memory of publishers that is mapped, or may still be mapped.")
    ]
    leases: Annotated[
        Number, gauge("Tensors that were taken and are alive, and pin shared memory of the publisher.")
    ]
    leased_bytes: Annotated[Number, gauge("Bytes of the tensors that pin shared memory of the publisher.")]
    peak_leased_bytes: Annotated[
        Number,
        gauge(
            "The most bytes that one subscriber had leased at once.", metric="leased_peak_bytes", largest=True
        ),
    ]
    received: Annotated[Number, counter("Publications that were received.", metric="publications")]
    missed: Annotated[Number, counter("Publications that were missed.", metric="missed_publications")]
    publishers_lost: Annotated[
        Number, counter("How often the publisher died, closed or disconnected the subscriber.")
    ]
    errors: Annotated[Errors, counter("Calls of subscribers that raised an error, by the type of the error.")]
