"""iceoryx2: samples loaned from a pool in shared memory, published, and an event that wakes the subscriber.

A copied tensor is copied once, into the loaned sample; the subscriber's tensor is a view of the sample,
which goes back to the pool when the tensor is freed.
"""

import ctypes
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import iceoryx2
import torch

from bench.contenders.base import Layout

__all__ = ["ServiceSide", "connect"]

_HELD = 4  # samples that a subscriber may hold, and a publisher may loan, at once


class _Outlet:
    def __init__(self, node: Any, name: str, side: "ServiceSide") -> None:
        self._publisher = (
            _samples(node, name, side)
            .publisher_builder()
            .initial_max_slice_len(side.largest)
            .max_loaned_samples(_HELD)
            .backpressure_strategy(iceoryx2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._notifier = _events(node, name, side).notifier_builder().create()
        self._loaned: dict[int, Any] = {}

    def connect(self) -> None:
        self._publisher.update_connections()

    def send(self, tensor: torch.Tensor) -> None:
        sample = self._loaned.pop(tensor.data_ptr(), None)
        if sample is None:
            sample = self._publisher.loan_slice_uninit(len(tensor))
            ctypes.memmove(sample.payload_ptr, tensor.data_ptr(), len(tensor))
        sample.assume_init().send()
        self._notifier.notify()

    def allocate(self, size: int) -> torch.Tensor:
        sample = self._publisher.loan_slice_uninit(size)
        tensor = _view(sample, size)
        self._loaned[tensor.data_ptr()] = sample
        return tensor


class _Inlet:
    def __init__(self, node: Any, name: str, side: "ServiceSide") -> None:
        self._subscriber = _samples(node, name, side).subscriber_builder().create()
        self._listener = _events(node, name, side).listener_builder().create()

    def connect(self) -> None:
        self._subscriber.has_samples()

    def receive(self) -> torch.Tensor:
        while (sample := self._subscriber.receive()) is None:
            self._listener.blocking_wait()
        return _view(sample, sample.payload().number_of_elements)


class ServicePort:
    overlaps = False

    def __init__(self, outlet: _Outlet | None, inlet: _Inlet | None) -> None:
        self._outlet = outlet
        self._inlet = inlet

    async def connect(self, meet: Callable[[], Awaitable[None]]) -> None:
        # A subscriber that connects while its publisher connects or sends would lose the first sample.
        if self._outlet is not None:
            self._outlet.connect()
        await meet()
        if self._inlet is not None:
            self._inlet.connect()
        await meet()

    async def send(self, tensor: torch.Tensor) -> None:
        if self._outlet is None:
            raise TypeError("this side only receives")
        self._outlet.send(tensor)

    async def allocate(self, size: int) -> torch.Tensor:
        if self._outlet is None:
            raise TypeError("this side only receives")
        return self._outlet.allocate(size)

    async def receive(self) -> torch.Tensor:
        if self._inlet is None:
            raise TypeError("this side only sends")
        return self._inlet.receive()


@dataclass(frozen=True)
class ServiceSide:
    outgoing: str | None
    incoming: str | None
    depth: int
    largest: int
    publishers: int
    subscribers: int = 1

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ServicePort]:
        node = (
            iceoryx2.NodeBuilder.new()
            .signal_handling_mode(iceoryx2.SignalHandlingMode.Disabled)
            .create(iceoryx2.ServiceType.Ipc)
        )
        inlet = None if self.incoming is None else _Inlet(node, self.incoming, self)
        outlet = None if self.outgoing is None else _Outlet(node, self.outgoing, self)
        yield ServicePort(outlet, inlet)


def connect(layout: Layout) -> tuple[list[ServiceSide], ServiceSide]:
    # Services of other programs are in the same namespace, so the names contain that of the unique folder.
    there = f"{layout.folder.name}/there"
    back = f"{layout.folder.name}/back" if layout.both_ways else None
    limits = (layout.depth, layout.largest, layout.peers)
    return [ServiceSide(there, back, *limits) for _ in range(layout.peers)], ServiceSide(back, there, *limits)


def _samples(node: Any, name: str, side: ServiceSide) -> Any:
    return (
        node.service_builder(iceoryx2.ServiceName.new(name))
        .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
        .max_publishers(side.publishers)
        .max_subscribers(side.subscribers)
        .max_nodes(side.publishers + side.subscribers)
        .subscriber_max_buffer_size(side.depth)
        .subscriber_max_borrowed_samples(_HELD)
        .enable_safe_overflow(False)  # a full buffer makes the publisher wait
        .open_or_create()
    )


def _events(node: Any, name: str, side: ServiceSide) -> Any:
    return (
        node.service_builder(iceoryx2.ServiceName.new(f"{name}/events"))
        .event()
        .max_notifiers(side.publishers)
        .max_listeners(side.subscribers)
        .max_nodes(side.publishers + side.subscribers)
        .open_or_create()
    )


def _view(sample: Any, size: int) -> torch.Tensor:
    memory: Any = (ctypes.c_uint8 * size).from_address(sample.payload_ptr)
    memory.sample = sample  # lives as long as a view of the memory
    return torch.frombuffer(memory, dtype=torch.uint8)
