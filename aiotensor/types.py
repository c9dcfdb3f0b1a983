"""The small values that users hold: handles, deliveries and statistics. No behaviour."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

if TYPE_CHECKING:  # these records hold tensors and make none: the pure modules import this one
    import torch
    from pydantic_core import CoreSchema, SchemaSerializer

__all__ = [
    "MAX_BOUNDS",
    "MAX_NUMBER",
    "ClientStatistics",
    "Delivery",
    "Holder",
    "Number",
    "ReceiverStatistics",
    "Seconds",
    "SenderStatistics",
    "ServerStatistics",
    "TensorHandle",
    "Usage",
    "Waits",
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


class Holder(msgspec.Struct, frozen=True):
    """A message or tensor that holds a permit or memory of a sender.

    Attributes:
        message: the number of the message, as in its handles; None for memory from `allocate` that was
            not sent, and for a message without a sent tensor.
        state: the state of the message, in words.
        bytes: bytes of shared memory that it holds.
        seconds: the time that it has held them.
    """

    message: int | None
    state: str
    bytes: int
    seconds: float


# The ranges of numbers and times that are accepted from another process.
MAX_NUMBER = 2**63 - 1
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=2.0**63)]

# The limit for a `Waits`, which also comes from another process.
MAX_BOUNDS = 64


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


class SenderStatistics(msgspec.Struct, frozen=True):
    """The current usage of one sender, and its totals since it was opened.

    Attributes:
        max_concurrent_videos: the limit on messages in flight.
        in_flight: messages that hold a permit: begun, and neither fully taken nor discarded.
        peak_in_flight: the most messages that were in flight at once.
        waiting: calls that wait now: for a permit, for bytes, or for other copies to end.
        longest_wait_s: seconds that the longest of these waits has lasted.
        holders: the holders of permits and memory, longest first.
        arena_bytes: the limit on bytes of shared memory.
        bytes_in_use: bytes of shared memory in use, taken by the receiver or not.
        peak_bytes_in_use: the most bytes that were in use at once.
        warm_bytes: bytes of shared memory that the system has provided, in use or kept for the next tensor.
        largest_free_bytes: bytes of the largest tensor that would get shared memory now if no call waited.
        messages_sent: messages announced in full to the receiver.
        messages_discarded: messages discarded by either side.
        tensors_sent: tensors announced to the receiver.
        bytes_sent: bytes of those tensors.
        receivers_lost: how often the receiver died, closed or refused this sender.
        permit_waits: the waits for a permit that have ended.
        memory_waits: the waits for bytes of shared memory that have ended.
        tensors_copied: tensors that sending copied into shared memory.
        bytes_copied: bytes of those tensors.
        errors: how often a call raised an error, by the name of its type: the types of
            `aiotensor`, ``"OSError"``, and ``"other"``. Cancellation is not counted.
    """

    max_concurrent_videos: int
    in_flight: int
    peak_in_flight: int
    waiting: int
    longest_wait_s: float
    holders: tuple[Holder, ...]
    arena_bytes: int
    bytes_in_use: int
    peak_bytes_in_use: int
    warm_bytes: int
    largest_free_bytes: int
    messages_sent: int
    messages_discarded: int
    tensors_sent: int
    bytes_sent: int
    receivers_lost: int
    permit_waits: Waits
    memory_waits: Waits
    tensors_copied: int
    bytes_copied: int
    errors: dict[str, int]


class ReceiverStatistics(msgspec.Struct, frozen=True):
    """The current usage of the receiver, and its totals since it was opened.

    Attributes:
        senders: senders that are connected now.
        max_senders: the limit on them.
        senders_lost: senders that died or broke the link.
        senders_refused: senders that were refused, because of a limit or of their version, and unidentified
            connections that newer ones replaced.
        waiting: `receive` calls and iterations that wait now.
        unclaimed_tensors: tensors that arrived and were not taken.
        unclaimed_bytes: bytes of those tensors.
        mapped_bytes: bytes of senders' arenas that are mapped by the receiver or may still be mapped.
        max_mapped_bytes: the limit on them.
        promised_messages: messages that connected senders may have unclaimed at the receiver at once, plus
            messages left at the receiver by closed senders.
        max_unclaimed_messages: the limit on them.
        leases: blocks of shared memory pinned by tensors that were received and are still alive.
        leased_bytes: bytes of the tensors that pin them.
        peak_leased_bytes: the most bytes that were leased at once.
        tensors_taken: tensors that were received.
        bytes_taken: bytes of those tensors.
        messages_discarded: messages discarded by either side.
        tensors_copied: tensors that were received with ``copy=True``.
        bytes_copied: bytes of those tensors.
        errors: how often a call raised an error, by the name of its type, as `SenderStatistics` has it.
    """

    senders: Number
    max_senders: Number | None
    senders_lost: Number
    senders_refused: Number
    waiting: Number
    unclaimed_tensors: Number
    unclaimed_bytes: Number
    mapped_bytes: Number
    max_mapped_bytes: Number | None
    promised_messages: Number
    max_unclaimed_messages: Number | None
    leases: Number
    leased_bytes: Number
    peak_leased_bytes: Number
    tensors_taken: Number
    bytes_taken: Number
    messages_discarded: Number
    tensors_copied: Number
    bytes_copied: Number
    errors: dict[str, Number]


class ClientStatistics(msgspec.Struct, frozen=True):
    """The current messages of a messaging client, and its totals since it was opened.

    Attributes:
        servers: servers that are connected now.
        in_flight: messages that are being sent, or wait for an answer, at each server.
        waiting: messages that wait until one of several servers can take them.
        messages_sent: messages that were handed to ZeroMQ.
        answers: requests that were answered.
        failures: requests that ended with an error.
        cancelled: requests that were cancelled at the client.
        servers_lost: how often a server died, closed or refused this client.
        errors: how often a call raised an error, by the name of its type, as `SenderStatistics` has it.
    """

    servers: int
    in_flight: tuple[int, ...]
    waiting: int
    messages_sent: int
    answers: int
    failures: int
    cancelled: int
    servers_lost: int
    errors: dict[str, int]


class ServerStatistics(msgspec.Struct, frozen=True):
    """The current messages of a messaging server, and its totals since it was opened.

    Attributes:
        clients: clients that are connected now.
        max_clients: the limit on them.
        waiting: messages that have arrived and were not taken.
        max_waiting: the limit on them, for each client.
        waiting_bytes: bytes of these messages, without the tensors that travel by a sender.
        max_waiting_bytes: the limit on them, for each client.
        in_hand: messages that were taken, and neither answered nor abandoned.
        messages_received: messages that have arrived.
        answers: messages that were answered.
        failures: messages that were answered with an error.
        cancelled: messages that their clients cancelled, or that were lost together with their clients.
        clients_lost: clients that died, closed or broke the protocol.
        clients_refused: clients that were refused, because of a limit or of their version.
    """

    clients: int
    max_clients: int | None
    waiting: int
    max_waiting: int
    waiting_bytes: int
    max_waiting_bytes: int
    in_hand: int
    messages_received: int
    answers: int
    failures: int
    cancelled: int
    clients_lost: int
    clients_refused: int
