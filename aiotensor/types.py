"""The small values that users hold: handles, deliveries and statistics. No behaviour."""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import msgspec

if TYPE_CHECKING:  # these records hold tensors and make none: the pure modules import this one
    import torch
    from pydantic_core import CoreSchema, SchemaSerializer

__all__ = [
    "MAX_BOUNDS",
    "MAX_ERROR_NAMES",
    "MAX_NUMBER",
    "ClientStatistics",
    "Delivery",
    "Export",
    "Holder",
    "Number",
    "ReceiverStatistics",
    "Seconds",
    "SenderStatistics",
    "ServerStatistics",
    "Statistics",
    "TensorHandle",
    "Usage",
    "Waits",
    "counter",
    "gauge",
]


class TensorHandle(msgspec.Struct, frozen=True):
    """Name one tensor on its way.

    A handle is a few dozen bytes and survives msgpack, JSON and pickle unchanged, so it travels over
    any channel that you already have. It may reach the receiver before its tensor does.

    It can be a field of a pydantic model, and the response or the body (``Annotated[TensorHandle, Body()]``)
    of a FastAPI endpoint. pydantic also writes it in fields of type `Any`. ``dict(handle)`` gives its fields.

    Attributes:
        sender: the sender's id, unique for each opened sender.
        message: counts up per sender, from 0.
        tensor: counts up per message, from 0.
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
        if name not in self.__struct_fields__:
            raise KeyError(name)
        value: str | int | tuple[int, ...] = getattr(self, name)
        return value

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> "CoreSchema":
        """Describe a handle to pydantic: an instance, or an object with exactly typed fields."""
        from pydantic_core import core_schema  # only pydantic calls this

        text = core_schema.str_schema(strict=True)
        number = core_schema.int_schema(strict=True, ge=0, le=MAX_NUMBER)
        fields = core_schema.typed_dict_schema(
            {
                "sender": core_schema.typed_dict_field(text),
                "message": core_schema.typed_dict_field(number),
                "tensor": core_schema.typed_dict_field(number),
                "dtype": core_schema.typed_dict_field(text),
                "shape": core_schema.typed_dict_field(core_schema.tuple_variable_schema(number)),
                "device": core_schema.typed_dict_field(text),
            },
            extra_behavior="ignore",  # as msgspec does: a later version may add fields
        )

        def validate(given: object, read: Callable[[object], dict[str, Any]]) -> "TensorHandle":
            return given if isinstance(given, cls) else cls(**read(given))

        return core_schema.no_info_wrap_validator_function(
            validate,
            fields,
            serialization=core_schema.plain_serializer_function_ser_schema(dict, return_schema=fields),
            ref=f"{cls.__module__}.{cls.__qualname__}:{id(cls)}",  # one schema, which others refer to by name
        )

    @property
    def __pydantic_serializer__(self) -> "SchemaSerializer":
        """The serializer that pydantic uses where no type declares a handle, as in a field of type `Any`."""
        try:
            return _serializer()
        except ImportError as error:  # for tools that inspect all attributes
            raise AttributeError("pydantic is not installed") from error


@cache
def _serializer() -> "SchemaSerializer":
    from pydantic_core import SchemaSerializer

    return SchemaSerializer(TensorHandle.__get_pydantic_core_schema__(TensorHandle, None))


class Delivery(msgspec.Struct, frozen=True):
    """One tensor, as returned by the receiver's iterator.

    Attributes:
        handle: identifies it; `handle.tensor` is its position in the message, from 0.
        tensor: the tensor itself.
        tensors: the number of tensors in the message. They are delivered consecutively, so a consumer can
            collect them: all tensors of a message share `handle.sender` and `handle.message`.
    """

    handle: TensorHandle
    tensor: "torch.Tensor"
    tensors: int = 1


class Usage(msgspec.Struct, frozen=True):
    """How much of a limit is used, and how much more was requested.

    Attributes:
        limit: the maximum amount in use at once; None if there is no limit.
        in_use: the amount in use now.
        requested: the amount that the refused call requested.
    """

    limit: int | None = None
    in_use: int = 0
    requested: int = 0


# The ranges of numbers and times that are accepted from another process.
MAX_NUMBER = 2**63 - 1
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=2.0**63)]

# Limits for values that come from another process: the bounds of a `Waits`, the types of errors, and holders.
# A sender names far fewer holders to an inspector, but users may store the statistics of any sender.
MAX_BOUNDS = 64
MAX_ERROR_NAMES = 32
_MAX_HOLDERS = 1024

Errors: TypeAlias = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Number],
    msgspec.Meta(max_length=MAX_ERROR_NAMES),
]


class Holder(msgspec.Struct, frozen=True):
    """A message or tensor that holds a permit or memory of a sender.

    Attributes:
        message: the number of the message, as in its handles; None for memory from `allocate` that was
            not sent, and for a message without a sent tensor.
        state: the state of the message, in words.
        bytes: bytes of shared memory that it holds.
        seconds: the time that it has held them.
    """

    message: Number | None
    state: Annotated[str, msgspec.Meta(max_length=64)]
    bytes: Number
    seconds: Seconds


class Waits(msgspec.Struct, frozen=True):
    """The durations of all ended waits, including cancelled and failed ones.

    Attributes:
        bounds_s: seconds, increasing; each wait is counted at the first bound that it did not exceed.
        counts: the number of waits for each bound, and at the end the number that exceeded all bounds.
        total_s: the total seconds of all waits.

    Raises:
        ValueError: the bounds do not increase, or there is not exactly one more count than bounds.
    """

    bounds_s: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=MAX_BOUNDS)]
    counts: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_BOUNDS + 1)]
    total_s: Seconds

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds_s) + 1:
            raise ValueError(
                f"waits are counted for each bound and beyond the last: {len(self.bounds_s)} bounds have one "
                f"count more, got {len(self.counts)}"
            )
        if any(bound >= following for bound, following in pairwise(self.bounds_s)):
            raise ValueError(f"the bounds of waits grow, got {self.bounds_s}")


class Export(NamedTuple):
    """How a field of statistics is exported; made by `counter` and `gauge`.

    Attributes:
        kind: a ``"counter"`` only grows and outlasts its object; a ``"gauge"`` is a current value.
        metric: the name of the metric after the name of the role, for example after ``aiotensor_sender_``;
            "" for the name of the field.
        labels: the labels that distinguish fields with the same metric, and their values.
        is_largest: at each endpoint the largest value of all objects is exported, not the sum.
    """

    kind: Literal["counter", "gauge"]
    metric: str
    labels: tuple[tuple[str, str], ...] = ()
    is_largest: bool = False


def counter(text: str, *, metric: str = "", labels: Mapping[str, str] | None = None) -> msgspec.Meta:
    """Declare a field that only grows: a number, the durations of waits, or errors by type.

    The statistics frame, the Prometheus metrics, the counts of closed objects and the tables of
    docs/metrics.md derive from the declaration.

    Args:
        text: the help text, one or more sentences.
        metric: the name of the metric; see `Export`.
        labels: the same.
    """
    export = Export("counter", metric, tuple((labels or {}).items()))
    return msgspec.Meta(description=text, extra={"export": export})


def gauge(text: str, *, metric: str = "", largest: bool = False) -> msgspec.Meta:
    """Declare a field with a current value; arguments as for `counter`, and `largest` as in `Export`."""
    return msgspec.Meta(description=text, extra={"export": Export("gauge", metric, is_largest=largest)})


class SenderStatistics(msgspec.Struct, frozen=True):
    """The current usage of one sender, and its totals since it was opened.

    The declaration of each field explains it. A field without `counter` or `gauge` is not exported.
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
        msgspec.Meta(max_length=_MAX_HOLDERS, description="Holders of permits and memory, longest first."),
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
    errors: Annotated[Errors, counter("Calls of senders that raised an error, by the type of the error.")]


class ReceiverStatistics(msgspec.Struct, frozen=True):
    """The current usage of the receiver, and its totals since it was opened.

    The declaration of each field explains it.
    """

    senders: Annotated[Number, gauge("Senders that are connected.")]
    max_senders: Annotated[Number | None, gauge("Limit of connected senders.", metric="senders_limit")]
    senders_lost: Annotated[Number, counter("Senders that died or broke the connection.")]
    senders_refused: Annotated[
        Number,
        counter(
            "Senders that were refused, because of a limit or of their version, and unidentified connections "
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
        Number, gauge("Blocks of shared memory pinned by tensors that were taken and are alive.")
    ]
    leased_bytes: Annotated[Number, gauge("Bytes of the tensors that pin these blocks.")]
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
    bytes_copied: Annotated[Number, counter("Bytes of the received copies.", metric="copied_bytes")]
    errors: Annotated[Errors, counter("Calls of receivers that raised an error, by the type of the error.")]


class ClientStatistics(msgspec.Struct, frozen=True):
    """The current messages of a messaging client, and its totals since it was opened.

    The declaration of each field explains it. `in_flight` has a number for each server.
    """

    servers: Annotated[Number, gauge("Servers that are connected.")]
    in_flight: Annotated[tuple[Number, ...], gauge("Messages that are being sent, or wait for an answer.")]
    waiting: Annotated[Number, gauge("Messages that wait until one of several servers can accept them.")]
    messages_sent: Annotated[Number, counter("Messages handed to ZeroMQ.")]
    answers: Annotated[Number, counter("Requests that were answered.")]
    failures: Annotated[Number, counter("Requests that ended with an error.")]
    cancelled: Annotated[Number, counter("Requests that were cancelled at the client.")]
    servers_lost: Annotated[Number, counter("How often a server died, closed or refused the client.")]
    errors: Annotated[Errors, counter("Calls of clients that raised an error, by the type of the error.")]


class ServerStatistics(msgspec.Struct, frozen=True):
    """The current messages of a messaging server, and its totals since it was opened.

    The declaration of each field explains it. A field without `counter` or `gauge` is not exported.
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
    max_waiting_bytes: Annotated[Number, msgspec.Meta(description="Limit of these bytes for each client.")]
    in_hand: Annotated[Number, gauge("Messages that were taken, and neither answered nor cancelled.")]
    messages_received: Annotated[Number, counter("Messages that have arrived.")]
    answers: Annotated[Number, counter("Messages that were answered.")]
    failures: Annotated[Number, counter("Messages that were answered with an error.")]
    cancelled: Annotated[
        Number, counter("Messages that their clients cancelled, or that were lost with their clients.")
    ]
    clients_lost: Annotated[Number, counter("Clients that died, closed or broke the protocol.")]
    clients_refused: Annotated[
        Number, counter("Clients that were refused, because of a limit or of their version.")
    ]


Statistics: TypeAlias = SenderStatistics | ReceiverStatistics | ClientStatistics | ServerStatistics
