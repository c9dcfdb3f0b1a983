"""iceoryx2: samples loaned from a pool in shared memory, published, and an event that wakes the subscribers.

A copied tensor is copied once, into the loaned sample; a subscriber's tensor is a view of the sample, which
goes back to the pool when the tensor is freed.
"""

import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import iceoryx2
import torch

from bench.contenders.base import Layout, Meet, Port, Sides

_HELD = 4  # samples that a subscriber may hold, and a publisher may loan, at once


class Limits(NamedTuple):
    """The limits of a service."""

    depth: int
    largest: int
    publishers: int
    subscribers: int


class Service:
    """What one process publishes under one name, and receives under another."""

    def __init__(self, outgoing: str | None, incoming: str | None, limits: Limits) -> None:
        self._limits = limits
        self._loaned: dict[int, Any] = {}
        node = (
            iceoryx2.NodeBuilder.new()
            .signal_handling_mode(iceoryx2.SignalHandlingMode.Disabled)
            .create(iceoryx2.ServiceType.Ipc)
        )
        self._publisher: Any = None
        self._subscriber: Any = None
        if incoming is not None:
            self._subscriber = self._samples(node, incoming).subscriber_builder().create()
            self._listener = self._events(node, incoming).listener_builder().create()
        if outgoing is not None:
            self._publisher = (
                self._samples(node, outgoing)
                .publisher_builder()
                .initial_max_slice_len(limits.largest)
                .max_loaned_samples(_HELD)
                .backpressure_strategy(iceoryx2.BackpressureStrategy.RetryUntilDelivered)
                .create()
            )
            self._notifier = self._events(node, outgoing).notifier_builder().create()

    def _samples(self, node: Any, name: str) -> Any:
        return (
            node.service_builder(iceoryx2.ServiceName.new(name))
            .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
            .max_publishers(self._limits.publishers)
            .max_subscribers(self._limits.subscribers)
            .max_nodes(self._limits.publishers + self._limits.subscribers)
            .subscriber_max_buffer_size(self._limits.depth)
            .subscriber_max_borrowed_samples(_HELD)
            .enable_safe_overflow(False)  # a full buffer makes the publisher wait
            .open_or_create()
        )

    def _events(self, node: Any, name: str) -> Any:
        return (
            node.service_builder(iceoryx2.ServiceName.new(f"{name}/events"))
            .event()
            .max_notifiers(self._limits.publishers)
            .max_listeners(self._limits.subscribers)
            .max_nodes(self._limits.publishers + self._limits.subscribers)
            .open_or_create()
        )

    async def connect(self, meet: Meet) -> None:
        # A subscriber that connects while its publisher connects or sends would lose the first sample.
        if self._publisher is not None:
            self._publisher.update_connections()
        await meet()
        if self._subscriber is not None:
            self._subscriber.has_samples()
        await meet()

    async def send(self, tensor: torch.Tensor) -> None:
        sample = self._loaned.pop(tensor.data_ptr(), None)
        if sample is None:
            sample = self._publisher.loan_slice_uninit(len(tensor))
            ctypes.memmove(sample.payload_ptr, tensor.data_ptr(), len(tensor))
        sample.assume_init().send()
        self._notifier.notify()

    async def allocate(self, size: int) -> torch.Tensor:
        sample = self._publisher.loan_slice_uninit(size)
        tensor = _view(sample, size)
        self._loaned[tensor.data_ptr()] = sample
        return tensor

    async def receive(self) -> torch.Tensor:
        while (sample := self._subscriber.receive()) is None:
            self._listener.blocking_wait()
        return _view(sample, sample.payload().number_of_elements)


def _view(sample: Any, size: int) -> torch.Tensor:
    memory: Any = (ctypes.c_uint8 * size).from_address(sample.payload_ptr)
    memory.sample = sample  # lives as long as a view of the memory
    return torch.frombuffer(memory, dtype=torch.uint8)


@asynccontextmanager
async def opened(outgoing: str | None, incoming: str | None, limits: Limits) -> AsyncIterator[Port]:
    service = Service(outgoing, incoming, limits)
    yield Port(service.send, service.receive, service.allocate, connect=service.connect)


def connect(layout: Layout) -> Sides[Port]:
    # Services of other programs are in the same namespace, so the names contain that of the unique folder.
    there, back = f"{layout.folder.name}/there", f"{layout.folder.name}/back"
    if layout.broadcasts:
        limits = Limits(layout.depth, layout.largest, 1, layout.peers)
        return [partial(opened, None, there, limits)] * layout.peers, partial(opened, there, None, limits)
    limits = Limits(layout.depth, layout.largest, layout.peers, 1)
    returns = back if layout.both_ways else None
    return [partial(opened, there, returns, limits)] * layout.peers, partial(opened, returns, there, limits)
