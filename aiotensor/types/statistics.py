"""The statistics of each kind of object. Each declaration defines a field, its help text and its metric.

`aiotensor.types.broadcast_statistics` contains those of publishers and subscribers.
"""

from typing import Annotated, TypeAlias

import msgspec

from aiotensor.types.broadcast_statistics import PublisherStatistics, SubscriberStatistics
from aiotensor.types.declaring import Errors, Holder, Waits, counter, gauge
from aiotensor.types.values import Number, Seconds

__all__ = [
    "ClientStatistics",
    "EngineStatistics",
    "PipeStatistics",
    "ReceiverStatistics",
    "SenderStatistics",
    "ServerStatistics",
    "Statistics",
]


class SenderStatistics(msgspec.Struct, frozen=True):
    """The current usage of one sender, and its totals since it was opened.

    The declaration of each field describes it. Fields without `counter` or `gauge` are not exported.
    """

    max_concurrent_videos: Annotated[Number, gauge("Limit of messages in flight.", metric="permits_limit")]
    in_flight: Annotated[
        Number,
        gauge("Messages with a permit: begun, and neither taken nor discarded.", metric="permits_in_use"),
    ]
    peak_in_flight: Annotated[
        Number,
        gauge(
            "The most messages that one sender had in flight at once.", metric="permits_peak", largest=True
        ),
    ]
    waiting: Annotated[
        Number,
        gauge(
            "Calls that wait for a permit, for memory, or for other copies to end.", metric="waiting_calls"
        ),
    ]
    longest_wait_s: Annotated[
        Seconds,
        gauge("Time that the longest current wait has lasted.", metric="longest_wait_seconds", largest=True),
    ]
    holders: Annotated[
        tuple[Holder, ...],
        msgspec.Meta(description="Holders of permits and memory, longest first."),
    ]
    arena_bytes: Annotated[Number, gauge("Limit of shared memory in use.", metric="memory_limit_bytes")]
    bytes_in_use: Annotated[
        Number, gauge("Shared memory in use, taken by the receiver or not.", metric="memory_in_use_bytes")
    ]
    peak_bytes_in_use: Annotated[
        Number,
        gauge(
            "The most shared memory that one sender used at once.", metric="memory_peak_bytes", largest=True
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
    messages_sent: Annotated[Number, counter("Messages announced in full to the receiver.")]
    messages_discarded: Annotated[Number, counter("Messages discarded by either side.")]
    tensors_sent: Annotated[Number, counter("Tensors announced to the receiver.")]
    bytes_sent: Annotated[Number, counter("Bytes of the announced tensors.", metric="sent_bytes")]
    receivers_lost: Annotated[Number, counter("How often the receiver died, closed or refused the sender.")]
    permit_waits: Annotated[
        Waits,
        counter("Durations of ended waits for a permit.", metric="wait_seconds", labels={"for": "permit"}),
    ]
    memory_waits: Annotated[
        Waits,
        counter("Durations of ended waits for memory.", metric="wait_seconds", labels={"for": "memory"}),
    ]
    tensors_copied: Annotated[Number, counter("Tensors that sending copied into shared memory.")]
    bytes_copied: Annotated[Number, counter("Bytes of the copied tensors.", metric="copied_bytes")]
    bytes_forwarded: Annotated[
        Number,
        counter("Bytes of received tensors that were sent on without a copy.", metric="forwarded_bytes"),
    ]
    errors: Annotated[Errors, counter("Calls of senders that raised an error, by the type of the error.")]


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
    mapped_bytes: Annotated[Number, gauge("Shared memory of senders that is mapped, or may still be mapped.")]
    max_mapped_bytes: Annotated[
        Number | None, gauge("Limit of the mapped shared memory.", metric="mapped_limit_bytes")
    ]
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
    leases: Annotated[
        Number, gauge("Tensors at the receiver, taken or not, that pin blocks of shared memory.")
    ]
    leased_bytes: Annotated[Number, gauge("Bytes of the tensors that pin blocks of shared memory.")]
    peak_leased_bytes: Annotated[
        Number,
        gauge(
            "The most bytes that one receiver had leased at once.", metric="leased_peak_bytes", largest=True
        ),
    ]
    tensors_taken: Annotated[Number, counter("Tensors that were received.")]
    bytes_taken: Annotated[Number, counter("Bytes of the received tensors.", metric="taken_bytes")]
    messages_discarded: Annotated[Number, counter("Messages discarded by either side.")]
    tensors_copied: Annotated[Number, counter("Tensors that were received as copies.")]
    bytes_copied: Annotated[Number, counter("Bytes of tensors received as copies.", metric="copied_bytes")]
    errors: Annotated[Errors, counter("Calls of receivers that raised an error, by the type of the error.")]


class EngineStatistics(msgspec.Struct, frozen=True):
    """The current messages of one message client at one of its servers, and their totals.

    The declaration of each field describes it. Fields without `counter` or `gauge` are not exported.
    """

    address: Annotated[
        str, msgspec.Meta(description="Address of the server; metrics have it in the label `endpoint`.")
    ]
    connected: Annotated[Number, gauge("Clients that are connected to the engine.")]
    in_flight: Annotated[Number, gauge("Messages that are being sent, or wait for an answer.")]
    messages_sent: Annotated[Number, counter("Messages handed to ZeroMQ.")]
    answers: Annotated[Number, counter("Requests that were answered.")]
    failures: Annotated[Number, counter("Requests that the engine answered with an error.")]
    requests_lost: Annotated[Number, counter("Requests that were lost with the engine.")]
    losses: Annotated[Number, counter("How often the engine died or closed.")]
    refusals: Annotated[Number, counter("How often the engine refused the client.")]
    replies: Annotated[
        Waits, counter("Durations from the start of requests until their answers.", metric="reply_seconds")
    ]


class ClientStatistics(msgspec.Struct, frozen=True):
    """The current messages of one message client, and its totals since it was opened.

    The declaration of each field describes it. `in_flight` contains one number for each server, and `engines`
    the statistics of each.
    """

    servers: Annotated[Number, gauge("Servers that are connected.")]
    in_flight: Annotated[tuple[Number, ...], gauge("Messages that are being sent, or wait for an answer.")]
    waiting: Annotated[Number, gauge("Messages that wait until one of several servers can accept them.")]
    messages_sent: Annotated[Number, counter("Messages handed to ZeroMQ.")]
    answers: Annotated[Number, counter("Requests that were answered.")]
    failures: Annotated[Number, counter("Requests that ended with an error.")]
    cancelled: Annotated[Number, counter("Requests that were cancelled at the client.")]
    servers_lost: Annotated[Number, counter("How often a server died, closed or refused the client.")]
    retries: Annotated[
        Number, counter("Idempotent requests that were sent once more, because their server was lost.")
    ]
    errors: Annotated[Errors, counter("Calls of clients that raised an error, by the type of the error.")]
    engines: Annotated[
        tuple[EngineStatistics, ...], msgspec.Meta(description="The statistics of each server.")
    ] = ()


class ServerStatistics(msgspec.Struct, frozen=True):
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
    waiting_bytes: Annotated[
        Number, gauge("Bytes of the waiting messages, without the tensors that a sender transfers.")
    ]
    max_waiting_bytes: Annotated[Number, msgspec.Meta(description="Limit of waiting bytes for each client.")]
    in_hand: Annotated[Number, gauge("Messages that were taken, and neither answered nor cancelled.")]
    messages_received: Annotated[Number, counter("Messages that have arrived.")]
    answers: Annotated[Number, counter("Messages that were answered.")]
    failures: Annotated[Number, counter("Messages that were answered with an error.")]
    cancelled: Annotated[
        Number, counter("Messages that their clients cancelled, or that were lost with their clients.")
    ]
    clients_lost: Annotated[Number, counter("Clients that died, closed or broke the protocol.")]
    clients_refused: Annotated[
        Number, counter("Clients that were refused because of a limit or their version.")
    ]
    messages_taken: Annotated[Number, counter("Messages that the application has taken.")] = 0


class PipeStatistics(msgspec.Struct, frozen=True):
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
    longest_wait_s: Annotated[
        Seconds,
        gauge("Time that the longest current wait has lasted.", metric="longest_wait_seconds", largest=True),
    ]
    warm_bytes: Annotated[
        Number,
        gauge("Allocated shared memory, in use or kept for the next tensor.", metric="memory_warm_bytes"),
    ]
    waiting_receives: Annotated[Number, gauge("Calls that wait for a message.")]
    unclaimed: Annotated[
        Number,
        gauge("Messages that have arrived and were not received.", metric="unclaimed_messages"),
    ]
    leases: Annotated[
        Number, gauge("Tensors that have arrived, received or not, and pin shared memory of the other rank.")
    ]
    leased_bytes: Annotated[Number, gauge("Bytes of the tensors that pin shared memory of the other rank.")]
    messages_sent: Annotated[Number, counter("Messages sent.")]
    bytes_sent: Annotated[Number, counter("Bytes of the sent tensors.", metric="sent_bytes")]
    messages_received: Annotated[Number, counter("Messages received.")]
    bytes_received: Annotated[Number, counter("Bytes of the received tensors.", metric="received_bytes")]
    tensors_copied: Annotated[Number, counter("Tensors that sending copied into shared memory.")]
    bytes_copied: Annotated[Number, counter("Bytes of the copied tensors.", metric="copied_bytes")]
    bytes_forwarded: Annotated[
        Number,
        counter("Bytes of received tensors that were sent on without a copy.", metric="forwarded_bytes"),
    ]
    peers_lost: Annotated[Number, counter("How often the other rank died, closed or broke the protocol.")]
    send_waits: Annotated[
        Waits, counter("Durations of ended waits for bytes.", metric="wait_seconds", labels={"for": "bytes"})
    ]
    errors: Annotated[Errors, counter("Calls of pipes that raised an error, by the type of the error.")]


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
