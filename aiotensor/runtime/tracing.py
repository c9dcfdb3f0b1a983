"""The interface between the library and a tracing system, which `integrations` implements.

While `tracer` is None, no trace context is sent, and the steps of a message take the same calls as without
this module. Another thread may set `tracer` at any time, so each function reads it once.
"""

from collections.abc import Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias, TypeVar

from aiotensor.types import TraceContext

T = TypeVar("T")

# The calls of an application, the steps in them that may take long, and the items that a peer receives.
Operation: TypeAlias = Literal["send tensor", "send message", "request", "publish"]
Step: TypeAlias = Literal[
    "wait for a permit",
    "wait for memory",
    "wait for a turn",
    "wait for a receiver",
    "wait for a server",
    "provide memory",
    "copy",
    "move",
]
Item: TypeAlias = Literal["tensor", "message", "answer", "publication"]


class Span(Protocol):
    """A span that is current in the context of the caller until it ends."""

    def end(self, error: BaseException | None = None, *, name: str = "", nbytes: int = 0) -> None:
        """End the span.

        Args:
            error: the error of the operation, or its cancellation; None if it has succeeded.
            name: the name of the tensor or publication that was sent; "" if there is none.
            nbytes: its size in bytes; 0 if it is unknown.
        """


class Tracer(Protocol):
    """Create spans, and exchange their context with peers.

    All methods can be called from any thread. Neither they nor the methods of spans raise an error of the
    tracing system: callers hold permits, memory and requests.
    """

    def begin(self, operation: Operation, destination: str) -> Span:
        """Begin the span of a call, and make it current.

        Args:
            operation: the call.
            destination: the address or the name of the endpoint.
        """

    def step(self, step: Step, awaitable: Awaitable[T], nbytes: int = 0) -> Awaitable[T]:
        """Return an awaitable with the same result, which creates a span for the wait.

        Args:
            step: the reason for the wait.
            awaitable: completes at the end of the step.
            nbytes: the bytes that are waited for, copied or moved; 0 if there are none.
        """

    def context(self) -> TraceContext | None:
        """Return the current trace context as fields to send to a peer; None if there is no trace."""

    def arrived(self, context: TraceContext) -> Mapping[str, str]:
        """Return the trace context of an item that has just arrived, with the time of its arrival."""

    def delivered(self, item: Item, context: Mapping[str, str], *, name: str = "", nbytes: int = 0) -> None:
        """Create the span of an item from its arrival until now, when the application takes it.

        Args:
            item: the kind of the item.
            context: a result of `arrived`.
            name: the name of the item; "" if it has none.
            nbytes: its size in bytes; 0 if it is unknown.
        """

    def answer(self, context: Mapping[str, str] | None) -> Span:
        """Begin the span of the work on a request, and make it current.

        Args:
            context: a result of `arrived`; None if the client sent no trace context.
        """

    def answer_batch(self, contexts: Sequence[Mapping[str, str] | None]) -> Span:
        """Begin the span of the work on a batch of requests, and make it current."""


# The tracer of this process; None while tracing is not enabled.
tracer: Tracer | None = None


class Traced:
    """Trace a call of an application, as a context manager around it, if tracing is enabled.

    Args:
        operation: the call.
        destination: the address or the name of the endpoint.

    Attributes:
        name: set by the call to the name of the tensor or publication that was sent.
        nbytes: set by the call to its size in bytes.
    """

    def __init__(self, operation: Operation, destination: str) -> None:
        self.name, self.nbytes = "", 0
        self._span = None if tracer is None else tracer.begin(operation, destination)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._span is not None:
            self._span.end(error, name=self.name, nbytes=self.nbytes)


class TracedBatch(Traced):
    """Trace the work on a batch of requests in the same way; `contexts` are those of the requests."""

    def __init__(self, contexts: Sequence[Mapping[str, str] | None]) -> None:
        self.name, self.nbytes = "", 0
        self._span = None if tracer is None else tracer.answer_batch(contexts)


def step(step: Step, awaitable: Awaitable[T], nbytes: int = 0) -> Awaitable[T]:
    """Return `awaitable`, with a span for the wait if tracing is enabled; see `Tracer.step`."""
    return awaitable if (current := tracer) is None else current.step(step, awaitable, nbytes)
