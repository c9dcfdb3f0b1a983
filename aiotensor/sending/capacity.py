"""The capacity of a sender for new messages, for clients that choose among several senders."""

import weakref

from aiotensor.runtime.affinity import LoopAffinity
from aiotensor.sending.gates import CapacityListener
from aiotensor.sending.in_flight import MessagesInFlight
from aiotensor.sending.settings import Settings

__all__ = ["SenderCapacity"]


class SenderCapacity:
    """Report the capacity of one sender, and its changes.

    Args:
        settings: the limits of the sender.
        affinity: states whether the sender is open.

    Attributes:
        max_wait_s: the limit on waiting times in seconds; None for no limit.
        messages: the messages in flight; None before the sender is opened.
        listeners: the objects to notify when a new message may have become possible.
    """

    def __init__(self, settings: Settings, affinity: LoopAffinity) -> None:
        self.max_wait_s = settings.wait_limits.max_wait_s
        self.messages: MessagesInFlight | None = None
        self.listeners: weakref.WeakSet[CapacityListener] = weakref.WeakSet()
        self._affinity = affinity

    @property
    def free_permits(self) -> int:
        """The number of messages that can begin immediately; 0 while calls wait for a permit or memory."""
        return 0 if self.messages is None else self.messages.free_permits

    @property
    def has_failed(self) -> bool:
        """Whether calls raise an error until `connect_now` finds a receiver, or permanently."""
        messages = self.messages
        if messages is None or not self._affinity.is_open:
            return True
        return (messages.failure or messages.sessions.failure) is not None

    def connect_now(self) -> None:
        """Connect again if the last receiver refused the sender; otherwise only a send does so."""
        if self.messages is not None and self._affinity.is_open:
            self.messages.sessions.connect_now()

    def listen(self, listener: CapacityListener) -> None:
        """Notify a listener, held by a weak reference, whenever a new message may have become possible."""
        self.listeners.add(listener)
        if self.messages is not None:
            self.messages.notify_listeners()
