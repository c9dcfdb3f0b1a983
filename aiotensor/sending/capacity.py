"""The capacity of a sender for new messages, for clients that choose among several senders."""

import weakref

from aiotensor.runtime.affinity import LoopAffinity
from aiotensor.sending.gates import CapacityListener
from aiotensor.sending.pipeline import Pipeline
from aiotensor.sending.settings import Settings

__all__ = ["SenderCapacity"]


class SenderCapacity:
    """Report the capacity of one sender, and notify listeners of its changes.

    Args:
        endpoint: its address, as in logs.
        settings: the limits of the sender.
        affinity: the state of the sender: new, open or closed.

    Attributes:
        max_wait_s: the limit on waiting times in seconds; None for no limit.
        pipeline: the pipeline of the sender; None before the sender is opened.
        listeners: the objects to notify when a new message may have become possible, held weakly.
    """

    def __init__(self, endpoint: str, settings: Settings, affinity: LoopAffinity) -> None:
        self.endpoint = endpoint
        self.max_wait_s = settings.max_wait_s
        self.pipeline: Pipeline | None = None
        self.listeners: weakref.WeakSet[CapacityListener] = weakref.WeakSet()
        self._affinity = affinity

    @property
    def free_permits(self) -> int:
        """The number of messages that can begin now; 0 without a ready receiver, or while calls wait."""
        pipeline = self.pipeline
        if pipeline is None or pipeline.sessions.current is None or pipeline.sessions.needs_admission:
            return 0
        permits, memory = pipeline.grants.permits.budget, pipeline.grants.memory.gate.budget
        return 0 if permits.waiting or memory.waiting else permits.limit - permits.in_use

    @property
    def has_failed(self) -> bool:
        """Whether calls raise an error until `connect_now` finds a receiver."""
        pipeline = self.pipeline
        if pipeline is None or not self._affinity.is_open:
            return True
        return pipeline.sessions.failure is not None

    def connect_now(self) -> None:
        """Connect now, as a send would, if the sender has stopped trying after a refusal."""
        if self.pipeline is not None and self._affinity.is_open:
            self.pipeline.sessions.connect_now()

    def listen(self, listener: CapacityListener) -> None:
        """Notify a listener whenever a new message may have become possible; the reference to it is weak."""
        self.listeners.add(listener)
        if self.pipeline is not None:
            self.pipeline.grants.notify_listeners()
