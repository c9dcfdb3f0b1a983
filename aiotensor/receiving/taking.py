"""Taking tensors from the mailbox of a receiver: waiting, reserving, and returning permits."""

import asyncio
from functools import partial

import torch

from aiotensor.errors import ClosedError, PeerLostError, RefusedError, WouldBlockError
from aiotensor.protocol.frames import Hello
from aiotensor.protocol.mailbox import Key
from aiotensor.receiving.arrivals import Limit
from aiotensor.receiving.intake import Intake
from aiotensor.receiving.senders import Senders
from aiotensor.runtime import tracing
from aiotensor.runtime.affinity import LoopAffinity
from aiotensor.runtime.outage import Absence
from aiotensor.transports.base import Listener
from aiotensor.types import Delivery, TensorHandle, Usage

__all__ = ["Taking", "key_of"]


_NOT_CONNECTED = (
    "no sender with this id has connected to this receiver: it is not open, or sends to another endpoint"
)


class Taking:
    """Take tensors by their handles or in the order of arrival; belongs to the running loop.

    Args:
        intake: the connections of the receiver.
        senders: the senders of the receiver.
        listener: the listener, which accepts the connections.
        affinity: the `LoopAffinity` of the receiver, which states whether it is closed.
        max_wait_s: the time in seconds after which a wait for a tensor fails; None for no limit.
        label: the address of the receiver, for the log.
    """

    def __init__(
        self,
        intake: Intake[Hello],
        senders: Senders,
        listener: Listener,
        affinity: LoopAffinity,
        max_wait_s: float | None,
        label: str,
    ) -> None:
        self.intake = intake
        self.senders = senders
        self.mailbox = senders.mailbox
        self.affinity = affinity
        self.arrivals = senders.arrivals
        self._listener = listener
        self._counts = senders.counts
        self._max_wait_s = max_wait_s
        self._loop = asyncio.get_running_loop()
        self._absence = Absence(label, self._missing)
        self._absence.begin()

    async def close(self) -> None:
        """End all waits, notify the senders, and release their memory; waits as `Senders.close` does."""
        self._absence.end()
        self.arrivals.wake_all()
        # Senders that receive a `Close` connect to the next receiver, and must not find this one again.
        self._listener.close()
        await self.intake.close()

    async def hold(self, key: Key) -> Delivery:
        """Wait for a tensor, reserve it, and return it; errors are those of `TensorReceiver.receive`."""
        item = self.find(key)
        if item is not None:
            return item
        claims, limit = self.mailbox.claims, None
        if self._max_wait_s is not None:
            limit = Limit(self._loop.time() + self._max_wait_s, partial(self._overdue, key))
        claims.add(key)
        try:
            while item is None:
                await self.arrivals.arrival(key, limit)
                if self.affinity.is_closed:
                    raise ClosedError("this TensorReceiver was closed")
                item = self.find(key)
        except WouldBlockError:
            item = self.find(key)  # it may have arrived in the iteration in which the time ran out
            if item is None:
                raise
        finally:
            claims.remove(key)
            if item is None:
                self.arrivals.give_up(key)
        return item

    def find(self, key: Key) -> Delivery | None:
        """Reserve a tensor and return it; return None if it has not arrived."""
        try:
            return self.mailbox.hold(key)
        except (PeerLostError, RefusedError):
            # The sender may have connected again, and a handle may be used here before the new hello is read.
            self._listener.accept_now()
            self.intake.read_now()
        return self.mailbox.hold(key)

    def take(self, key: Key, item: Delivery) -> torch.Tensor:
        """Take a reserved tensor; after the last one of a message, return the permit to the sender."""
        if self.mailbox.finish(key):
            peer = self.senders.connected.get(key.sender)
            if peer is not None:
                peer.connection.taken(key.message)
                self.senders.schedule_flush(peer)
        self._counts["tensors_taken"] += 1
        nbytes = item.tensor.nbytes
        self._counts["bytes_taken"] += nbytes
        if item.trace_context is not None and (tracer := tracing.tracer) is not None:
            name = f"{key.sender}.{key.message}.{key.tensor}"
            tracer.delivered("tensor", item.trace_context, name=name, nbytes=nbytes)
        return item.tensor

    def put_back(self, key: Key) -> None:
        """Return a reserved tensor to the mailbox."""
        self.arrivals.wake(self.mailbox.put_back(key))

    def discard(self, key: Key) -> None:
        """Discard the whole message of a tensor, even before it arrives."""
        keys = self.mailbox.discard(key.sender, key.message)
        peer = self.senders.connected.get(key.sender)
        if peer is not None:
            peer.discard(key.message)  # has no effect before the message has begun
        self.arrivals.wake(keys)

    def not_here(self, key: Key) -> WouldBlockError:
        """Return the error for a tensor that has not arrived.

        Raises:
            PeerLostError: reading from the senders has failed, so no more tensors will arrive.
        """
        self.arrivals.raise_if_failed()
        return WouldBlockError(f"{_name(key)} has not arrived", messages=Usage(requested=1))

    def _missing(self) -> str:
        """Return why a call waits for a tensor whose sender has not connected; "" if there is none."""
        for key in self.arrivals.waiters:
            if not self.mailbox.has_joined(key.sender):
                return f"{_name(key)} has not arrived: {_NOT_CONNECTED}"
        return ""

    def _overdue(self, key: Key) -> WouldBlockError:
        if self.mailbox.has_joined(key.sender):
            reason = "its sender is connected, but has not sent the whole message"
        else:
            reason = _NOT_CONNECTED
        return WouldBlockError(
            f"{_name(key)} has not arrived within {self._max_wait_s:g} s: {reason}",
            messages=Usage(requested=1),
        )


def key_of(handle: TensorHandle) -> Key:
    """Return the key of a handle.

    Raises:
        TypeError: the argument is not a handle.
        ValueError: a number in the handle is negative.
    """
    if not isinstance(handle, TensorHandle):
        raise TypeError(
            "handle must be an aiotensor.TensorHandle, as returned by `send`, got "
            f"{type(handle).__name__!r}: decode it with its type, for example msgspec.msgpack.decode(data, "
            "type=aiotensor.TensorHandle)"
        )
    if handle.message < 0 or handle.tensor < 0:
        raise ValueError(f"this handle is invalid because its numbers are negative: {handle}")
    return Key(handle.sender, handle.message, handle.tensor)


def _name(key: Key) -> str:
    return f"tensor {key.tensor} of message {key.message} of sender {key.sender}"
