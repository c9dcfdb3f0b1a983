"""Blocking senders and receivers."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

import aiotensor
from aiotensor.blocking.portal import Block, BlockingObject, UntilClosed, parameters_of
from aiotensor.memory.source import Sendable
from aiotensor.types import Delivery, ReceiverStatistics, SenderStatistics, TensorHandle


class TensorSender(BlockingObject[aiotensor.TensorSender, SenderStatistics]):
    """Send tensors from threads; open it with ``with``, and share it between the threads.

    Arguments and errors are those of `aiotensor.TensorSender`.
    """

    @parameters_of(aiotensor.TensorSender)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(aiotensor.TensorSender(*args, **kwargs))

    @property
    def id(self) -> str:
        """The id of this sender, which its handles contain."""
        return self.inner.id

    @property
    def receiver_id(self) -> str | None:
        """The id of the connected receiver; None while none is connected, or before it has answered."""
        return self.inner.receiver_id

    def ready(self, *, nbytes: int | None = None, timeout: float | None = None) -> None:
        """Wait until a receiver has admitted this sender, or until a tensor can be sent without waiting."""
        self.wait_for(self.inner.ready, nbytes=nbytes, timeout=timeout)

    def send(self, tensor: Sendable, *, timeout: float | None = None) -> TensorHandle:
        """Send a message of one tensor, and return the handle that names it for the receiver."""
        return self.wait_for(self.inner.send, tensor, timeout=timeout)

    def send_nowait(self, tensor: Sendable) -> TensorHandle:
        """Send a message of one tensor without waiting; the copy runs in the thread of the event loop."""
        return self.call(self.inner.send_nowait, tensor)

    def post(self, tensor: Sendable) -> TensorHandle:
        """Send a message of one tensor without waiting, and copy the tensor in the worker thread afterwards.

        Unlike all other methods, it may also be called in a thread with another event loop, because it does
        not wait for permits, memory or copies.
        """
        return self.call_briefly(self.inner.post, tensor)

    def copied(self, handle: TensorHandle, *, timeout: float | None = None) -> None:
        """Wait until a tensor that was sent with `post` is copied, and may be changed or freed."""
        self.wait_for(self.inner.copied, handle, timeout=timeout)

    def message(self, *, timeout: float | None = None) -> "OpenMessage":
        """Begin a message of several tensors, which share one permit and arrive together or not at all.

        Use it as ``with sender.message() as message:``, and send each tensor in the block with
        ``message.send(tensor)``. Entering the block waits for a permit, at most `timeout` seconds; the end of
        the block completes the message. An exception that leaves the block discards the message.
        """
        return OpenMessage(self, self.call(self.inner.message), timeout)

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, timeout: float | None = None
    ) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory, which is sent without a copy.

        Waits for shared memory.
        """
        return self.wait_for(self.inner.allocate, shape, dtype, timeout=timeout)

    def discard(self, handle: TensorHandle) -> None:
        """Discard the whole message of a handle, because it is no longer needed."""
        self.call(self.inner.discard, handle)

    def discard_all(self) -> int:
        """Discard every message that the receiver has not taken yet, and return their number."""
        return self.call(self.inner.discard_all)

    def drain(self, *, timeout: float | None = None) -> None:
        """Wait until every message sent before this call was taken or discarded."""
        self.wait_for(self.inner.drain, timeout=timeout)


class OpenMessage(Block[aiotensor.OpenMessage]):
    """A message that is being sent, made by `TensorSender.message`.

    Arguments and errors are those of `aiotensor.OpenMessage`.
    """

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, timeout: float | None = None
    ) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory for this message, which is sent without a copy."""
        return self._owner.wait_for(self.inner.allocate, shape, dtype, timeout=timeout)

    def send(self, tensor: Sendable, *, timeout: float | None = None) -> TensorHandle:
        """Send one tensor of the message, and return its handle."""
        return self._owner.wait_for(self.inner.send, tensor, timeout=timeout)

    def finish(self) -> None:
        """Complete the message now rather than at the end of the block."""
        self._owner.call(self.inner.finish)


class TensorReceiver(BlockingObject[aiotensor.TensorReceiver, ReceiverStatistics]):
    """Receive tensors in threads; open it with ``with``, and share it between the threads.

    Arguments and errors are those of `aiotensor.TensorReceiver`.
    """

    @parameters_of(aiotensor.TensorReceiver)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(aiotensor.TensorReceiver(*args, **kwargs))

    @property
    def id(self) -> str:
        """The id of this receiver, which its senders report as `receiver_id`."""
        return self.inner.id

    def receive(
        self, handle: TensorHandle, *, copy: bool = False, timeout: float | None = None
    ) -> torch.Tensor:
        """Return the tensor that a handle names, once it has arrived.

        With `copy`, return a copy with its own memory. After a timeout, the tensor can still be received.
        """
        return self.take(handle, self.inner.receive, handle, copy=copy, timeout=timeout)

    def receive_nowait(self, handle: TensorHandle) -> torch.Tensor:
        """Return the tensor that a handle names if it has arrived, or raise `WouldBlockError`."""
        return self.take_now(handle, self.inner.receive_nowait, handle)

    def arrived(self, handle: TensorHandle, *, timeout: float | None = None) -> None:
        """Wait until the tensor that a handle names has arrived, without receiving it."""
        self.wait_for(self.inner.arrived, handle, timeout=timeout)

    def __iter__(self) -> Iterator[Delivery]:
        """Iterate over the tensors in the order of arrival, until this receiver is closed."""
        return UntilClosed(self.next)

    def next(self, *, timeout: float | None = None) -> Delivery:
        """Return the next tensor in the order of arrival, except tensors that calls await by handle.

        After a timeout, no tensor is lost. With a timeout of 0, the call does not wait.

        Raises:
            TimeoutError: no tensor arrived within `timeout` seconds.
            ClosedError: this receiver was closed.
        """
        delivery: Delivery = self.take(None, self._next, self.inner, timeout=timeout)
        return delivery

    def discard(self, handle: TensorHandle) -> None:
        """Discard the whole message of a handle, because it is no longer needed."""
        self.call(self.inner.discard, handle)
