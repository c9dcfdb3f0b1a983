"""The value types of the public API: handles, deliveries, and the statistics of each kind of object.

They have no behaviour. The declaration of a field of statistics contains its help text and its metric.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

if TYPE_CHECKING:  # not at runtime: modules that do not need torch import this one
    import torch
    import typing_extensions
    from pydantic_core import CoreSchema, SchemaSerializer

if TYPE_CHECKING:
    M = typing_extensions.TypeVar("M", default=Any)  # the type of messages, unless a call states it
else:
    M = TypeVar("M")  # before Python 3.13, only type checkers know defaults

CurveKey: TypeAlias = str | bytes
"""A CURVE key, as `zmq.curve_keypair` makes it."""

# The ranges of numbers and times that are accepted from another process.
MAX_NUMBER = 2**63 - 1
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=2.0**63)]

# The limits of a trace context: the number of fields, and the characters of a name and of a value. A `Put`
# with the longest context and a tensor that is placed inline fits into a record of every receiver.
MAX_TRACE_FIELDS, MAX_TRACE_NAME, MAX_TRACE_VALUE = 6, 64, 1024

# The fields that tracing adds to a message, as they are added to the headers of an HTTP request.
TraceContext: TypeAlias = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=MAX_TRACE_NAME)],
        Annotated[str, msgspec.Meta(max_length=MAX_TRACE_VALUE)],
    ],
    msgspec.Meta(max_length=MAX_TRACE_FIELDS),
]


class TensorHandle(msgspec.Struct, frozen=True):
    """The name of one sent tensor, with which a receiver can receive it.

    A handle takes about 100 bytes as msgpack. msgpack, JSON and pickle preserve it unchanged, so you can send
    it over any channel that you already have. It may reach the receiver before its tensor does.

    It can be a field of a pydantic model, and the response or the body (``Annotated[TensorHandle, Body()]``)
    of a FastAPI endpoint. pydantic also serializes it in fields of type `Any`. ``dict(handle)`` returns its
    fields.

    Attributes:
        sender: the unique id of the sender.
        message: the number of the message, counted by its sender from 0.
        tensor: the number of the tensor in its message, counted from 0.
        dtype: the name of the torch dtype, for example ``"uint8"``.
        shape: the sizes of the tensor's dimensions, in elements.
        device: the torch device that the tensor was sent from, for example ``"cpu"``.
    """

    sender: str
    message: int
    tensor: int
    dtype: str
    shape: tuple[int, ...]
    device: str

    __iter__: ClassVar[None] = None  # `__getitem__` alone would make it iterable as a sequence

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields, so that ``dict(handle)`` works, as FastAPI's encoder expects."""
        return self.__struct_fields__

    def __getitem__(self, name: str) -> str | int | tuple[int, ...]:
        value: str | int | tuple[int, ...] = msgspec.structs.asdict(self)[name]
        return value

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> "CoreSchema":
        """Return the pydantic schema of a handle: an instance, or an object with strictly typed fields."""
        from pydantic_core import core_schema  # installed, because only pydantic calls this method

        number = core_schema.int_schema(strict=True, ge=0, le=MAX_NUMBER)
        schemas: dict[object, CoreSchema] = {
            int: number,
            str: core_schema.str_schema(strict=True),
            tuple[int, ...]: core_schema.tuple_variable_schema(number),
        }
        kinds = {name: schemas[cls.__annotations__[name]] for name in cls.__struct_fields__}
        fields = core_schema.typed_dict_schema(
            {name: core_schema.typed_dict_field(schema) for name, schema in kinds.items()},
            extra_behavior="ignore",  # as msgspec does: a later version may add fields
        )

        def validate(given: object, read: Callable[[object], dict[str, Any]]) -> "TensorHandle":
            return given if isinstance(given, cls) else cls(**read(given))

        return core_schema.no_info_wrap_validator_function(
            validate,
            fields,
            serialization=core_schema.plain_serializer_function_ser_schema(dict, return_schema=fields),
            ref=f"{cls.__module__}.{cls.__qualname__}:{id(cls)}",  # so that other schemas refer to this one
        )

    @property
    def __pydantic_serializer__(self) -> "SchemaSerializer":
        """The serializer that pydantic uses where no type declares a handle, as in a field of type `Any`."""
        try:
            return _serializer()
        except ImportError as error:  # tools that read all attributes expect an AttributeError
            raise AttributeError("pydantic is not installed") from error


@cache
def _serializer() -> "SchemaSerializer":
    from pydantic_core import SchemaSerializer

    return SchemaSerializer(TensorHandle.__get_pydantic_core_schema__(TensorHandle, None))


class Delivery(msgspec.Struct, frozen=True):
    """One tensor and its handle, as returned by iterating over a receiver.

    Attributes:
        handle: the handle of the tensor; `handle.tensor` is its position in the message, counted from 0.
        tensor: the tensor itself.
        tensors: the number of tensors in the message. They are delivered consecutively, so a consumer can
            collect them: all tensors of a message share `handle.sender` and `handle.message`.
        trace_context: the trace context of the sender, such as a ``traceparent``; None unless tracing is
            enabled in both processes.
    """

    handle: TensorHandle
    tensor: "torch.Tensor"
    tensors: int = 1
    trace_context: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Publication(Generic[M]):
    """One publication that a subscriber has received.

    Attributes:
        message: the published message.
        number: the number of the publication, counted by its publisher from 0.
        missed: the number of publications that this subscriber missed immediately before this one, because it
            was slow or not connected.
        trace_context: the trace context of the publisher; None unless tracing is enabled in both processes.
    """

    message: M
    number: int
    missed: int
    trace_context: Mapping[str, str] | None = None


class Published(NamedTuple):
    """The result of publishing a message.

    Attributes:
        number: the number of the publication.
        delivered: the number of subscribers that receive it.
        dropped: the number of subscribers that have lost an older publication in favor of this one.
    """

    number: int
    delivered: int
    dropped: int


class Usage(msgspec.Struct, frozen=True):
    """The usage of a limit, and the amount that a call requested in addition.

    Attributes:
        limit: the maximum amount in use at once; None if there is no limit.
        in_use: the amount in use now.
        requested: the amount that the failed call requested.
    """

    limit: int | None = None
    in_use: int = 0
    requested: int = 0


# Statistics: the means to declare them

# Limits on values that come from another process: the bounds of a `Waits`, and the types of errors.
_MAX_BOUNDS = 64
_MAX_ERROR_NAMES = 32

Errors: TypeAlias = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Number],
    msgspec.Meta(max_length=_MAX_ERROR_NAMES),
]


class Holder(msgspec.Struct, frozen=True):
    """A message or tensor that holds a permit or memory of a sender or of a message client.

    Attributes:
        message: the number of the message, as in the handles of a sender; None for memory from `allocate`
            that was not sent, and for a message of which nothing was sent.
        state: the state of the message, in words.
        bytes: the bytes of shared memory that it holds.
        seconds: the time in seconds for which it has held the permit or the memory.
    """

    message: Number | None
    state: str
    bytes: Number
    seconds: Seconds


class Waits(msgspec.Struct, frozen=True):
    """The durations of all ended waits, including cancelled and failed ones.

    Attributes:
        bounds_s: upper bounds in seconds, in increasing order; each wait is counted at the first bound that
            it did not exceed.
        counts: the number of waits for each bound, followed by the number that exceeded all bounds.
        total_s: the total duration of all waits in seconds.
    """

    bounds_s: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=_MAX_BOUNDS)]
    counts: Annotated[tuple[Number, ...], msgspec.Meta(max_length=_MAX_BOUNDS + 1)]
    total_s: Seconds


def counter(text: str, *, metric: str = "", waits_for: str = "") -> msgspec.Meta:
    """Declare a field that only grows: a number, the durations of waits, or errors by type.

    The statistics frame, the Prometheus metrics and the counts of closed objects are derived from the
    declaration. `aiotensor.statistics.counters.Field` describes the arguments.
    """
    extra = {"type": "counter", "metric": metric, "waits_for": waits_for, "is_largest": False}
    return msgspec.Meta(description=text, extra=extra)


def gauge(text: str, *, metric: str = "", largest: bool = False) -> msgspec.Meta:
    """Declare a field with a current value."""
    extra = {"type": "gauge", "metric": metric, "waits_for": "", "is_largest": largest}
    return msgspec.Meta(description=text, extra=extra)


# The statistics of each kind of object

_MappedBytes: TypeAlias = Annotated[Number, gauge("Mapped shared memory of peers.")]
_MaxMappedBytes: TypeAlias = Annotated[
    Number | None, gauge("Limit of the mapped shared memory.", metric="mapped_limit_bytes")
]
_Leases: TypeAlias = Annotated[Number, gauge("Tensors of peers that pin blocks of shared memory.")]
_LeasedBytes: TypeAlias = Annotated[Number, gauge("Bytes of the tensors that pin blocks of shared memory.")]
_PeakLeasedBytes: TypeAlias = Annotated[
    Number, gauge("The most leased bytes at once.", metric="leased_peak_bytes", largest=True)
]
_Errors: TypeAlias = Annotated[Errors, counter("Calls that raised an error, by the type of the error.")]


class _Copying(msgspec.Struct, frozen=True):
    """The tensors that an object has copied to its shared memory, or forwarded."""

    tensors_copied: Annotated[Number, counter("Tensors that were copied into shared memory.")]
    bytes_copied: Annotated[Number, counter("Bytes of the copied tensors.", metric="copied_bytes")]
    bytes_forwarded: Annotated[
        Number, counter("Bytes that were sent on without a copy.", metric="forwarded_bytes")
    ]


class _Waiting(_Copying, frozen=True):
    """The shared memory of an object, and the calls that wait for it; see `Memory.usage`."""

    waiting: Annotated[
        Number, gauge("Calls that wait for a permit, memory or a peer.", metric="waiting_calls")
    ]
    longest_wait_s: Annotated[
        Seconds, gauge("Duration of the longest current wait.", metric="longest_wait_seconds", largest=True)
    ]
    arena_bytes: Annotated[Number, gauge("Limit of shared memory in use.", metric="memory_limit_bytes")]
    bytes_in_use: Annotated[
        Number, gauge("Shared memory in use, here or by peers.", metric="memory_in_use_bytes")
    ]
    peak_bytes_in_use: Annotated[
        Number, gauge("The most shared memory in use at once.", metric="memory_peak_bytes", largest=True)
    ]
    warm_bytes: Annotated[
        Number, gauge("Allocated shared memory, in use or idle.", metric="memory_warm_bytes")
    ]
    largest_free_bytes: Annotated[
        Number, gauge("The largest tensor that fits now.", metric="memory_largest_free_bytes", largest=True)
    ]
    memory_waits: Annotated[
        Waits,
        counter("Durations of ended waits for memory.", metric="wait_seconds", waits_for="memory"),
    ]
    errors: _Errors


class _Sending(_Waiting, frozen=True):
    """The permits of an object."""

    max_concurrent_videos: Annotated[Number, gauge("Limit of messages in flight.", metric="permits_limit")]
    in_flight: Annotated[Number, gauge("Messages with a permit.", metric="permits_in_use")]
    peak_in_flight: Annotated[
        Number, gauge("The most messages in flight at once.", metric="permits_peak", largest=True)
    ]
    holders: Annotated[
        tuple[Holder, ...], msgspec.Meta(description="Holders of permits and memory, longest first.")
    ]
    permit_waits: Annotated[
        Waits,
        counter("Durations of ended waits for a permit.", metric="wait_seconds", waits_for="permit"),
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
        Number, counter("Senders that were refused, and silent connections that newer ones replaced.")
    ]
    waiting: Annotated[Number, gauge("Calls and iterations that wait for a tensor.", metric="waiting_calls")]
    unclaimed_tensors: Annotated[Number, gauge("Tensors that have arrived and were not taken.")]
    unclaimed_bytes: Annotated[Number, gauge("Bytes of the tensors that have not been taken.")]
    mapped_bytes: _MappedBytes
    max_mapped_bytes: _MaxMappedBytes
    promised_messages: Annotated[Number, gauge("Messages that senders may leave unclaimed, or have left.")]
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
    retries: Annotated[Number, counter("Requests that were repeated, because their server was lost.")]
    engines: Annotated[
        tuple[EngineStatistics, ...], msgspec.Meta(description="The statistics of each server.")
    ] = ()


class ServerStatistics(_Copying, frozen=True):
    """The current messages of one message server, and its totals since it was opened.

    The declaration of each field describes it. Fields without `counter` or `gauge` are not exported.
    """

    clients: Annotated[Number, gauge("Clients that are connected.")]
    max_clients: Annotated[
        Number | None, gauge("Limit of clients, with lost ones whose messages wait.", metric="clients_limit")
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
    cancelled: Annotated[Number, counter("Messages cancelled by clients, or lost with them.")]
    clients_lost: Annotated[Number, counter("Clients that died, closed or broke the protocol.")]
    clients_refused: Annotated[Number, counter("Clients that were refused.")]


class PipeStatistics(_Waiting, frozen=True):
    """The current usage of one end of a pipe between ranks, and its totals since it was opened.

    The declaration of each field describes it.
    """

    connected: Annotated[Number, gauge("Whether the other rank is connected.")]
    in_flight: Annotated[Number, gauge("Messages that were not received yet.", metric="messages_in_flight")]
    waiting_receives: Annotated[Number, gauge("Calls that wait for a message.")]
    unclaimed: Annotated[
        Number, gauge("Messages that have arrived and were not received.", metric="unclaimed_messages")
    ]
    leases: _Leases
    leased_bytes: _LeasedBytes
    messages_sent: Annotated[Number, counter("Messages sent.")]
    bytes_sent: Annotated[Number, counter("Bytes of the sent tensors.", metric="sent_bytes")]
    messages_received: Annotated[Number, counter("Messages received.")]
    bytes_received: Annotated[Number, counter("Bytes of the received tensors.", metric="received_bytes")]
    peers_lost: Annotated[Number, counter("How often the other rank died, closed or broke the protocol.")]


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
        Number, gauge("Limit of publications that a subscriber may be behind.", metric="behind_limit")
    ]
    behind: Annotated[Number, gauge("Publications that the slowest subscriber has not taken.", largest=True)]
    history: Annotated[Number, gauge("Publications that are kept for later subscribers.")]
    published: Annotated[Number, counter("Messages published.", metric="publications")]
    bytes_published: Annotated[Number, counter("Bytes of the published messages.", metric="published_bytes")]
    deliveries: Annotated[Number, counter("Publications taken, counted for each subscriber.")]
    dropped: Annotated[Number, counter("Publications lost by slow subscribers, counted for each.")]
    subscribers_lost: Annotated[
        Number, counter("Subscribers that died, broke the protocol or were too slow.")
    ]
    subscribers_refused: Annotated[
        Number, counter("Subscribers that were refused, and silent connections that newer ones replaced.")
    ]
    subscriber_waits: Annotated[
        Waits,
        counter(
            "Durations of ended waits for slow subscribers.",
            metric="wait_seconds",
            waits_for="subscribers",
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
        Number, gauge("Publications that have arrived and were not taken.", metric="unclaimed_publications")
    ]
    mapped_bytes: _MappedBytes
    leases: _Leases
    leased_bytes: _LeasedBytes
    peak_leased_bytes: _PeakLeasedBytes
    received: Annotated[Number, counter("Publications that were received.", metric="publications")]
    missed: Annotated[Number, counter("Publications that were missed.", metric="missed_publications")]
    publishers_lost: Annotated[Number, counter("How often the publisher was lost.")]
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
