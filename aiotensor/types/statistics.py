"""The statistics of each kind of object. Each declaration defines a field, its help text and its metric."""

from typing import Annotated, TypeAlias

import msgspec

from aiotensor.types.declaring import Errors, Holder, Waits, counter, gauge
from aiotensor.types.values import Number, Seconds

__all__ = [
    "ClientStatistics",
    "EngineStatistics",
    "PipeStatistics",
    "PublisherStatistics",
    "ReceiverStatistics",
    "SenderStatistics",
    "ServerStatistics",
    "Statistics",
    "SubscriberLag",
    "SubscriberStatistics",
]

_LongestWait: TypeAlias = Annotated[
    Seconds,
    gauge("Time that the longest current wait has lasted.", metric="longest_wait_seconds", largest=True),
]
_WarmBytes: TypeAlias = Annotated[
    Number,
    gauge("Allocated shared memory, in use or kept for the next tensor.", metric="memory_warm_bytes"),
]
_MappedBytes: TypeAlias = Annotated[
    Number, gauge("Shared memory of peers that is mapped, or may still be mapped.")
]
_MaxMappedBytes: TypeAlias = Annotated[
    Number | None, gauge("Limit of the mapped shared memory.", metric="mapped_limit_bytes")
]
_Leases: TypeAlias = Annotated[
    Number, gauge("Tensors of peers, taken or not, that pin blocks of shared memory.")
]
_LeasedBytes: TypeAlias = Annotated[Number, gauge("Bytes of the tensors that pin blocks of shared memory.")]
_PeakLeasedBytes: TypeAlias = Annotated[
    Number,
    gauge("The most bytes that one object had leased at once.", metric="leased_peak_bytes", largest=True),
]
_Errors: TypeAlias = Annotated[Errors, counter("Calls that raised an error, by the type of the error.")]


class _Copying(msgspec.Struct, frozen=True):
    """The tensors that an object has copied to its shared memory, or forwarded."""

    tensors_copied: Annotated[Number, counter("Tensors that were copied into shared memory.")]
    bytes_copied: Annotated[Number, counter("Bytes of the copied tensors.", metric="copied_bytes")]
    bytes_forwarded: Annotated[
        Number,
        counter("Bytes of received tensors that were sent on without a copy.", metric="forwarded_bytes"),
    ]


class _Waiting(_Copying, frozen=True):
    """The shared memory of an object, and the calls that wait for it; see `Memory.usage`."""

    waiting: Annotated[
        Number,
        gauge("Calls that wait for a permit, for memory, or for a peer.", metric="waiting_calls"),
    ]
    longest_wait_s: _LongestWait
    arena_bytes: Annotated[Number, gauge("Limit of shared memory in use.", metric="memory_limit_bytes")]
    bytes_in_use: Annotated[
        Number, gauge("Shared memory in use, here or by peers.", metric="memory_in_use_bytes")
    ]
    peak_bytes_in_use: Annotated[
        Number,
        gauge(
            "The most shared memory that one object used at once.", metric="memory_peak_bytes", largest=True
        ),
    ]
    warm_bytes: _WarmBytes
    largest_free_bytes: Annotated[
        Number,
        gauge(
            "The largest tensor that would get shared memory now if no other call waited.",
            metric="memory_largest_free_bytes",
            largest=True,
        ),
    ]
    memory_waits: Annotated[
        Waits,
        counter("Durations of ended waits for memory.", metric="wait_seconds", labels={"for": "memory"}),
    ]
    errors: _Errors


class _Sending(_Waiting, frozen=True):
    """The permits of an object."""

    max_concurrent_videos: Annotated[Number, gauge("Limit of messages in flight.", metric="permits_limit")]
    in_flight: Annotated[
        Number, gauge("Messages with a permit: begun, and neither taken nor ended.", metric="permits_in_use")
    ]
    peak_in_flight: Annotated[
        Number,
        gauge(
            "The most messages that one object had in flight at once.", metric="permits_peak", largest=True
        ),
    ]
    holders: Annotated[
        tuple[Holder, ...],
        msgspec.Meta(description="Holders of permits and memory, longest first."),
    ]
    permit_waits: Annotated[
        Waits,
        counter("Durations of ended waits for a permit.", metric="wait_seconds", labels={"for": "permit"}),
    ]


class SenderStatistics(_Sending, frozen=True):
    """The current usage of one sender, and its totals since it was opened.

    The declaration of each field describes it. Fields without `counter` or `gauge` are not exported.
    """

    messages_sent: Annotated[Number, counter("Messages announced in full to the receiver.")]
    messages_discarded: Annotated[Number, counter("Messages discarded by either side.")]
    tensors_sent: Annotated[Number, counter("Tensors announced to the receiver.")]
    bytes_sent: Annotated[Number, counter("Bytes of the announced tensors.", metric="sent_bytes")]
    receivers_lost: Annotated[Number, counter("How often the receiver died, closed or refused the sender.")]


class ReceiverStatistics(msgspec.Struct, frozen=True):
    """The current usage of one receiver, and its totals since it was opened.

    The declaration of each field describes it.
    """

    senders: Annotated[Number, gauge("Senders that are connected.")]
    max_senders: Annotated[Number | None, gauge("Limit of connected senders.", metric="senders_limit")]
    senders_lost: Annotated[Number, counter("Senders that died or broke the connection.")]
    senders_refused: Annotated[
        Number,
        counter(
            "Senders that were refused because of a limit or their version, and unidentified connections "
            "that newer ones replaced."
        ),
    ]
    waiting: Annotated[Number, gauge("Calls and iterations that wait for a tensor.", metric="waiting_calls")]
    unclaimed_tensors: Annotated[Number, gauge("Tensors that have arrived and have not been taken.")]
    unclaimed_bytes: Annotated[Number, gauge("Bytes of the tensors that have not been taken.")]
    mapped_bytes: _MappedBytes
    max_mapped_bytes: _MaxMappedBytes
    promised_messages: Annotated[
        Number,
        gauge(
            "Messages that connected senders may have unclaimed at the receiver at once, and messages that "
            "closed senders left there."
        ),
    ]
    max_unclaimed_messages: Annotated[
        Number | None, gauge("Limit of the promised messages.", metric="promised_messages_limit")
    ]
    leases: _Leases
    leased_bytes: _LeasedBytes
    peak_leased_bytes: _PeakLeasedBytes
    tensors_taken: Annotated[Number, counter("Tensors that were received.")]
    bytes_taken: Annotated[Number, counter("Bytes of the received tensors.", metric="taken_bytes")]
    messages_discarded: Annotated[Number, counter("Messages discarded by either side.")]
    tensors_copied: Annotated[Number, counter("Tensors that were received as copies.")]
    bytes_copied: Annotated[Number, counter("Bytes of tensors received as copies.", metric="copied_bytes")]
    errors: _Errors


class EngineStatistics(msgspec.Struct, frozen=True):
    """The current messages of one message client at one of its servers, and their totals.

    The declaration of each field describes it. Fields without `counter` or `gauge` are not exported.
    """

    address: Annotated[
        str, msgspec.Meta(description="Address of the server; metrics have it in the label `endpoint`.")
    ]
    connected: Annotated[Number, gauge("Clients that are connected to the engine.")]
    in_flight: Annotated[Number, gauge("Messages that were announced, or wait for an answer.")]
    messages_sent: Annotated[Number, counter("Messages announced to the engine.")]
    answers: Annotated[Number, counter("Requests that were answered.")]
    failures: Annotated[Number, counter("Requests that the engine answered with an error.")]
    requests_lost: Annotated[Number, counter("Requests that were lost with the engine.")]
    losses: Annotated[Number, counter("How often the engine died or closed.")]
    refusals: Annotated[Number, counter("How often the engine refused the client.")]
    answer_times: Annotated[
        Waits, counter("Durations from the start of requests until their answers.", metric="answer_seconds")
    ]


class ClientStatistics(_Sending, frozen=True):
    """The current usage of one message client, and its totals since it was opened.

    The declaration of each field describes it. `engines` contains the statistics of each server.
    """

    servers: Annotated[Number, gauge("Servers that are connected.")]
    messages_sent: Annotated[Number, counter("Messages announced to servers.")]
    answers: Annotated[Number, counter("Requests that were answered.")]
    failures: Annotated[Number, counter("Requests that ended with an error.")]
    cancelled: Annotated[Number, counter("Requests that were cancelled at the client.")]
    servers_lost: Annotated[Number, counter("How often a server died, closed or refused the client.")]
    retries: Annotated[Number, counter("Requests that were sent once more, because their server was lost.")]
    engines: Annotated[
        tuple[EngineStatistics, ...], msgspec.Meta(description="The statistics of each server.")
    ] = ()


class ServerStatistics(_Copying, frozen=True):
    """The current messages of one message server, and its totals since it was opened.

    The declaration of each field describes it. Fields without `counter` or `gauge` are not exported.
    """

    clients: Annotated[Number, gauge("Clients that are connected.")]
    max_clients: Annotated[
        Number | None,
        gauge(
            "Limit of clients, including disconnected clients with waiting messages.", metric="clients_limit"
        ),
    ]
    waiting: Annotated[Number, gauge("Messages that have not been taken.", metric="waiting_messages")]
    max_waiting: Annotated[Number, msgspec.Meta(description="Limit of waiting messages for each client.")]
    in_hand: Annotated[Number, gauge("Messages that were taken, and neither answered nor cancelled.")]
    mapped_bytes: _MappedBytes
    max_mapped_bytes: _MaxMappedBytes
    leases: _Leases
    arena_bytes: Annotated[
        Number, gauge("Limit of shared memory in use for answers.", metric="memory_limit_bytes")
    ]
    bytes_in_use: Annotated[Number, gauge("Shared memory in use for answers.", metric="memory_in_use_bytes")]
    messages_received: Annotated[Number, counter("Messages that have arrived.")]
    messages_taken: Annotated[Number, counter("Messages that the application has taken.")]
    answers: Annotated[Number, counter("Messages that were answered.")]
    failures: Annotated[Number, counter("Messages that were answered with an error.")]
    cancelled: Annotated[
        Number, counter("Messages that their clients cancelled, or that were lost with their clients.")
    ]
    clients_lost: Annotated[Number, counter("Clients that died, closed or broke the protocol.")]
    clients_refused: Annotated[
        Number, counter("Clients that were refused because of a limit or their version.")
    ]


class PipeStatistics(_Copying, frozen=True):
    """The current usage of one end of a pipe between ranks, and its totals since it was opened.

    The declaration of each field describes it.
    """

    connected: Annotated[Number, gauge("Whether the other rank is connected.")]
    in_flight: Annotated[
        Number,
        gauge(
            "Messages that were sent, or are being sent, and were not received.", metric="messages_in_flight"
        ),
    ]
    max_bytes: Annotated[Number, gauge("Limit of bytes in flight.", metric="bytes_limit")]
    bytes_in_flight: Annotated[
        Number,
        gauge("Bytes of messages that were not received, and of received tensors in shared memory."),
    ]
    peak_bytes_in_flight: Annotated[
        Number,
        gauge("The most bytes that one end had in flight at once.", metric="bytes_peak", largest=True),
    ]
    waiting_sends: Annotated[Number, gauge("Calls that wait for bytes.")]
    longest_wait_s: _LongestWait
    warm_bytes: _WarmBytes
    waiting_receives: Annotated[Number, gauge("Calls that wait for a message.")]
    unclaimed: Annotated[
        Number,
        gauge("Messages that have arrived and were not received.", metric="unclaimed_messages"),
    ]
    leases: _Leases
    leased_bytes: _LeasedBytes
    messages_sent: Annotated[Number, counter("Messages sent.")]
    bytes_sent: Annotated[Number, counter("Bytes of the sent tensors.", metric="sent_bytes")]
    messages_received: Annotated[Number, counter("Messages received.")]
    bytes_received: Annotated[Number, counter("Bytes of the received tensors.", metric="received_bytes")]
    peers_lost: Annotated[Number, counter("How often the other rank died, closed or broke the protocol.")]
    send_waits: Annotated[
        Waits, counter("Durations of ended waits for bytes.", metric="wait_seconds", labels={"for": "bytes"})
    ]
    errors: _Errors


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


class PublisherStatistics(_Waiting, frozen=True):
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
    history: Annotated[Number, gauge("Publications that are kept for later subscribers.")]
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
    mapped_bytes: _MappedBytes
    leases: _Leases
    leased_bytes: _LeasedBytes
    peak_leased_bytes: _PeakLeasedBytes
    received: Annotated[Number, counter("Publications that were received.", metric="publications")]
    missed: Annotated[Number, counter("Publications that were missed.", metric="missed_publications")]
    publishers_lost: Annotated[
        Number, counter("How often the publisher died, closed or disconnected the subscriber.")
    ]
    errors: _Errors


Statistics: TypeAlias = (
    SenderStatistics
    | ReceiverStatistics
    | PublisherStatistics
    | SubscriberStatistics
    | ClientStatistics
    | EngineStatistics
    | ServerStatistics
    | PipeStatistics
)
