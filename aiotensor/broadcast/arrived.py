"""One publication at a subscriber, from its arrival until the application has taken it."""

import asyncio
from collections.abc import Mapping

import torch

from aiotensor.broadcast.session import Session
from aiotensor.errors import ProtocolError
from aiotensor.protocol.broadcast import Content, PlacedTensor, Publish
from aiotensor.protocol.frames import ARENA
from aiotensor.protocol.subscriber import read_content
from aiotensor.receiving.mappings import Mappings
from aiotensor.runtime import tracing
from aiotensor.runtime.worker import in_thread
from aiotensor.tensors.placement import open_tensor
from aiotensor.tensors.views import with_attributes

__all__ = ["Arrived"]

# Longer content has many tensors or a long body, so decoding it may take a millisecond.
_QUICK_CONTENT_BYTES = 64 << 10

# The maximum number of tensors opened in one iteration of the event loop. Each takes a few microseconds.
_QUICK_TENSORS = 64


class Arrived:
    """A publication that has arrived.

    Opening a publication answers it and leases its memory. After a cancellation, the next call continues.

    Args:
        session: the session in which the publication arrived.
        publish: its announcement.
        mappings: leases its memory.
        order: its position in the order of arrival.

    Attributes:
        number: the number of the publication.
        missed: the number of publications missed before it; None until the application begins to take it.
        is_taken: whether the publication was answered as taken.
        tensors: the tensors that were opened so far.
        trace_context: the trace context of the publisher; None without tracing.
    """

    def __init__(self, session: Session, publish: Publish, mappings: Mappings, order: int) -> None:
        self.session = session
        self.order = order
        self.number = publish.number
        self.missed: int | None = None
        self.is_taken = False
        self.tensors: list[torch.Tensor] = []
        self.trace_context: Mapping[str, str] | None = None
        if publish.trace is not None and (tracer := tracing.tracer) is not None:
            self.trace_context = tracer.arrived(publish.trace)
        self._publish = publish
        self._mappings = mappings
        self._data: memoryview | None = None
        self._content: Content | None = None

    @property
    def body(self) -> memoryview:
        """The encoded message; empty until the publication was opened."""
        return memoryview(b"") if self._content is None else self._content.body

    async def open(self) -> None:
        """Open the content and all tensors; a cancelled call loses nothing.

        Raises:
            ProtocolError: the publisher broke the protocol.
            OSError: no thread can be started.
        """
        content = self._content
        if content is None:
            data = self._take()
            if len(data) > _QUICK_CONTENT_BYTES:
                content = await in_thread(read_content, data)
            else:
                content = read_content(data)
            self._content = content
        while len(self.tensors) < len(content.tensors):
            self._open_next(content)
            if len(self.tensors) % _QUICK_TENSORS == 0:
                await asyncio.sleep(0)

    def open_now(self) -> None:
        """Open the content and all tensors on this thread; errors are those of `open`."""
        if self._content is None:
            self._content = read_content(self._take())
        while len(self.tensors) < len(self._content.tensors):
            self._open_next(self._content)

    def finish(self) -> None:
        """Forget the publication after it was received; drop it if it was not taken."""
        # Tracebacks of errors refer to this object, so it must not keep its tensors alive.
        self.tensors, self._data, self._content = [], None, None
        if self.is_taken:
            self.session.finished()
        else:
            self.session.dropped(self.number)

    def _take(self) -> memoryview:
        """Answer the publication, and return its encoded content."""
        if self._data is not None:
            return self._data
        publish = self._publish
        self.session.taken(self.number)
        self.is_taken = True
        if publish.block is None:
            if len(publish.payload) != publish.nbytes:
                raise ProtocolError(f"it sent {len(publish.payload)} bytes, but announced {publish.nbytes}")
            data = memoryview(publish.payload)
        else:
            placed = PlacedTensor("uint8", (publish.nbytes,), ARENA, publish.payload, publish.block)
            data = self._open_tensor(placed).numpy().data
        self._data = data
        return data

    def _open_next(self, content: Content) -> None:
        placed = content.tensors[len(self.tensors)]
        if placed.placement != ARENA:
            raise ProtocolError(f"it used the unknown placement {placed.placement!r} for a tensor")
        tensor = self._open_tensor(placed)
        if placed.attributes is not None:
            tensor = with_attributes(tensor, placed.attributes)
        self.tensors.append(tensor)

    def _open_tensor(self, placed: PlacedTensor) -> torch.Tensor:
        memory = self.session.memory
        arrived = open_tensor(placed.placement, placed.payload, placed.dtype, placed.shape, memory.mapped)
        self._mappings.lease(memory, arrived, placed.block)
        return arrived.tensor
