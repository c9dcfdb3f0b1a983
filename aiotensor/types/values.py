"""The value types of the public API except statistics, such as handles and deliveries."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

if TYPE_CHECKING:  # not at runtime: modules that do not need torch import this one
    import torch
    from pydantic_core import CoreSchema, SchemaSerializer

__all__ = [
    "MAX_NUMBER",
    "MAX_TRACE_FIELDS",
    "MAX_TRACE_NAME",
    "MAX_TRACE_VALUE",
    "CurveKey",
    "Delivery",
    "Number",
    "Publication",
    "Published",
    "Seconds",
    "TensorHandle",
    "TraceContext",
    "Usage",
]

T = TypeVar("T")

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
        if name not in self.__struct_fields__:
            raise KeyError(name)
        value: str | int | tuple[int, ...] = getattr(self, name)
        return value

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> "CoreSchema":
        """Return the pydantic schema of a handle: an instance, or an object with strictly typed fields."""
        from pydantic_core import core_schema  # installed, because only pydantic calls this method

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
class Publication(Generic[T]):
    """One publication that a subscriber has received.

    Attributes:
        message: the published message.
        number: the number of the publication, counted by its publisher from 0.
        missed: the number of publications that this subscriber missed immediately before this one, because it
            was slow or not connected.
        trace_context: the trace context of the publisher; None unless tracing is enabled in both processes.
    """

    message: T
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
